"""gpt-oss (OpenAI, 2025), its experts plain or in MXFP4 (layers/quantization/mxfp4.py).

Unlike Llama: heads have attention sinks, every second layer has a sliding window, all projections have
biases, and every feed-forward is MoE. Its experts have biases, and a gate whose halves are clamped, which
the MoE kernels of most devices do not know (ClampedExperts in devices/operands.py). There experts are
computed one by one over all tokens, with weight 0 where a token did not select the expert. That is exact and
can be captured, but slower than grouped kernels. Experts in MXFP4 stay so where the device computes with
them, and are read into plain numbers elsewhere.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime import log
from runtime.devices.all_to_all import PackedExperts
from runtime.devices.base import Device, ForwardBatch
from runtime.devices.operands import ClampedExperts
from runtime.devices.packed import PackedWeight
from runtime.errors import ModelError
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.context_parallel import of_all_parts, own_tokens
from runtime.layers.parallel.group_tokens import SharedTokens
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.parallel.sequence_parallel import sum_of_ranks
from runtime.layers.quantization.mxfp4 import Mxfp4Stack, is_whole
from runtime.layers.weight import (
    Layer,
    Shard,
    SourceTensor,
    Weight,
    channel_shard,
    replicated_shard,
    scaled_shard,
)
from runtime.models.base import AttentionLayer
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.moe_config import MoeConfig
from runtime.models.llama import Llama

ALPHA, LIMIT = 1.702, 7.0  # of the gate: its sigmoid's gain, and what its halves are clamped to


class Experts(Layer):
    """The stacked expert weights as the checkpoint has them. Ranks split each expert by its inner dimension,
    in which columns of gate and up alternate."""

    def __init__(
        self, device: Device, dtype: torch.dtype, hidden: int, moe: MoeConfig, *, is_mxfp4: bool
    ) -> None:
        if device.ep_size > 1 or device.all_to_all is not None:
            raise ModelError(
                "gpt-oss has its experts on all ranks, split; leave --ep-size and --moe-a2a-backend out"
            )
        self.device = device
        self.packed: PackedExperts | None = (
            None  # once they are loaded, where the device computes them together
        )
        experts, torch_device = moe.num_experts, device.torch_device
        self.is_first = device.collectives.rank == 0
        inner = channel_shard(moe.intermediate_size, device.collectives, "intermediate_size")
        both, replicated = scaled_shard(inner, 2), replicated_shard(hidden)

        def weight(dim: int, shard: Shard, *shape: int) -> Weight:
            local = tuple(shard.size if i == dim else size for i, size in enumerate(shape))
            return Weight.empty(local, {"": SourceTensor(shape, dim, shard)}, dtype, torch_device)

        self.gate_up_proj_bias: Weight | None = weight(1, both, experts, both.full)
        self.down_proj_bias: Weight | None = weight(1, replicated, experts, hidden)
        self.gate_up_proj: Weight | Mxfp4Stack | None
        self.down_proj: Weight | Mxfp4Stack | None
        if not is_mxfp4:
            self.gate_up_proj = weight(2, both, experts, hidden, both.full)
            self.down_proj = weight(1, inner, experts, inner.full, hidden)
            return
        keeps = self.can_keep(device, moe)

        def stack(outputs: Shard, inputs: Shard) -> Mxfp4Stack:
            shape = experts, inputs.size, outputs.size
            out = None if keeps else torch.empty(shape, dtype=dtype, device=torch_device)
            return Mxfp4Stack(experts, outputs, inputs, torch_device, out)

        self.gate_up_proj, self.down_proj = stack(both, replicated), stack(replicated, inner)

    @staticmethod
    def can_keep(device: Device, moe: MoeConfig) -> bool:
        """Whether experts in MXFP4 stay so: the device computes with them, and ranks split whole groups."""
        experts = device.experts
        inner = channel_shard(moe.intermediate_size, device.collectives, "intermediate_size")
        return isinstance(experts, ClampedExperts) and experts.packs_mxfp4 and is_whole(inner)

    def finish_loading(self) -> None:
        """Drops the output bias on all ranks but the first, so that the sum over ranks adds it once, and
        packs the experts for the device."""
        assert self.gate_up_proj_bias is not None and self.down_proj_bias is not None
        if not self.is_first:
            self.down_proj_bias.tensor.zero_()
        experts, gate_up, down = self.device.experts, self.gate_up_proj, self.down_proj
        if not isinstance(experts, ClampedExperts):
            return
        biases = gate_above_up(self.gate_up_proj_bias.tensor), self.down_proj_bias.tensor
        if isinstance(gate_up, Mxfp4Stack) and isinstance(down, Mxfp4Stack) and gate_up.is_kept:
            codes, exponents = (gate_above_up(part) for part in gate_up.coded())
            self.packed = experts.pack_clamped_mxfp4((codes, exponents), down.coded(), biases)
        else:
            first, _, second, _ = self._stacks()
            self.packed = experts.pack_clamped(
                gate_above_up(first.transpose(1, 2)), second.transpose(1, 2), biases
            )
        if self.packed is not None:
            self.gate_up_proj = self.gate_up_proj_bias = self.down_proj = self.down_proj_bias = None

    def _stacks(self) -> list[Tensor]:
        stacks = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        return [stack.tensor for stack in stacks if stack is not None]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden] and each token's experts, int64 [T, k], with their weights, float32 [T, k] -> this
        rank's partial sum [T, hidden]."""
        if self.packed is not None:
            return self.device.experts.apply(x, ids, weights, self.packed)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        stacks = self._stacks()
        routed_weights = weights.new_zeros(len(x), len(stacks[0])).scatter_(1, ids, weights)
        for expert, (first, first_bias, second, second_bias) in enumerate(zip(*stacks, strict=True)):
            inner = clamped(torch.addmm(first_bias, x, first))
            out += torch.addmm(second_bias, inner, second) * routed_weights[:, expert, None]
        return out


def gate_above_up(rows: Tensor) -> Tensor:
    """[E, 2 * inner, ...]: rows of gate and up that alternate as all rows of gate, then those of up."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def clamped(gate_up: Tensor) -> Tensor:
    """The gated activation with clamped halves: [T, 2 * inner] -> [T, inner]."""
    gate, up = gate_up[:, ::2].clamp(max=LIMIT), gate_up[:, 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


class FeedForward(Layer):
    """Router and experts."""

    def __init__(
        self, device: Device, dtype: torch.dtype, hidden: int, moe: MoeConfig, *, is_mxfp4: bool
    ) -> None:
        self.device = device
        self.routing = moe.routing
        self.router = ReplicatedLinear(device, torch.float32, hidden, moe.num_experts, bias=True)
        self.experts = Experts(device, dtype, hidden, moe, is_mxfp4=is_mxfp4)
        self.packed_router: PackedWeight | None = None  # where the device packs weights of any type

    def finish_loading(self) -> None:
        """Packs the router."""
        if self.device.ops.packs_rows:
            self.packed_router = self.device.ops.pack_linear(self.router.weight.tensor)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]; with attention groups this rank's partial sum of all groups' tokens."""
        assert self.router.bias is not None
        logits = linear(x.float(), self.router.weight.tensor, self.router.bias.tensor)
        ids, weights = self.device.experts.route(logits, None, self.routing)
        out = self.experts.forward(x, ids.long(), weights)
        return sum_of_ranks(self.device, out.to(x.dtype))


class GptOssDecoderLayer(Layer):
    """One block. See DecoderLayer."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        assert config.moe is not None
        self.input_layernorm = RMSNorm(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention_class(device, dtype, config, index)
        self.post_attention_layernorm = RMSNorm(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(device, dtype, config.hidden_size, config.moe, is_mxfp4=is_mxfp4(config))
        self.shared = SharedTokens(device, [self.mlp])
        self.shares_prompts = device.prompt_split is not None  # with other ranks, in attention

    def before_attention(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """See DecoderLayer.before_attention."""
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.project(own_tokens(batch.part, x), cos, sin, batch), residual

    def after_attention(
        self, attended: Tensor, residual: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer.after_attention."""
        x = self.self_attn.o_proj.forward(attended)
        if self.shares_prompts:  # a compiled layer is one function for any batch: it looks at none
            x = of_all_parts(batch.part, x)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.shared.divide(self.mlp.forward(self.shared.join(x, batch)), batch), residual


def is_mxfp4(config: ModelConfig) -> bool:
    """Whether the checkpoint has its experts in MXFP4. GGUF files name each layer's."""
    found = config.quantization
    return found is not None and (
        found.method == "mxfp4"
        or (found.method == "gguf" and found.format_of("layers.0.mlp.experts") is not None)
    )


class GptOss(Llama):
    """gpt-oss. See GenerativeModel."""

    layer_class = GptOssDecoderLayer

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        has_log = device.collectives.rank == 0 and device.torch_device.type != "meta"
        if (
            has_log
            and is_mxfp4(config)
            and config.moe is not None
            and not Experts.can_keep(device, config.moe)
        ):
            log.get("start").info(
                "experts in MXFP4 become plain numbers while they are loaded; "
                "the cpu, in 16 bits, and cuda compute with them as they are, in whole groups of 32 a rank",
                dtype=str(dtype).removeprefix("torch."),
            )
