"""LongCat Flash (Meituan, 2025). A layer of its config.json is two here, each with latent attention and a
dense feed-forward. Beside the first feed-forward stand experts, and what they return is added behind the
second one, so that they may be computed meanwhile. Some experts return what they are given: a token chooses
how many numbers are computed for it."""

import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.operands import NormInputs
from runtime.layers.moe.feed_forward import Router, SparseFeedForward
from runtime.layers.parallel.context_parallel import of_all_parts, own_tokens
from runtime.layers.parallel.sequence_parallel import sum_of_ranks
from runtime.models.base import AttentionLayer, CompiledLayer, Pieces
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.moe_config import MoeConfig
from runtime.models.config.renames import Renames
from runtime.models.deepseek import DeepSeek, MlaSelfAttention
from runtime.models.llama import LlamaDecoderLayer


class ScaledLatents(MlaSelfAttention):
    """Latent attention whose latents are scaled behind their norms: the norms' weights are."""

    def finish_loading(self) -> None:
        """Scales the weights of norms, then see MlaSelfAttention."""
        if self.q_a_layernorm is not None:
            self.q_a_layernorm.weight.tensor.mul_(self.mla.query_scale)
        self.kv_a_layernorm.weight.tensor.mul_(self.mla.latent_scale)
        super().finish_loading()


class ZeroExperts(SparseFeedForward):
    """Experts, and further ones that return what they are given."""

    def __init__(self, device: Device, dtype: torch.dtype, hidden: int, moe: MoeConfig) -> None:
        super().__init__(device, dtype, hidden, moe)
        total = moe.num_experts + moe.num_zero
        self.gate = Router(device, dtype, hidden, total, moe.routing, has_bias=moe.has_bias)

    def of_norm(self, inputs: NormInputs, batch: ForwardBatch) -> tuple[Tensor, Tensor] | None:
        """None: experts that return what they are given are picked out first."""
        return None

    def forward(self, x: Tensor, batch: ForwardBatch, wide: Tensor | None = None) -> Tensor:
        """[T, hidden] -> [T, hidden]; with attention groups this rank's partial sum of all groups' tokens.
        `wide`: x as float32; None: it is made of x."""
        ids, weights = self.gate.forward(x, wide)
        is_zero = ids >= self.num_experts
        kept = (weights * is_zero).sum(1, keepdim=True)
        self.count(ids.masked_fill(is_zero, -1), batch.is_real)
        ids, weights = ids.masked_fill(is_zero, 0), weights.masked_fill(is_zero, 0.0)
        out = self.device.experts.apply(x, ids, weights, self.packed, self.local.start)
        own = x * kept.to(x.dtype)
        if not self.device.has_groups:
            return sum_of_ranks(self.device, out) + own
        return out + own if self.device.collectives.rank == 0 else out  # the sum over ranks has it once


class LongcatDecoderLayer(LlamaDecoderLayer):
    """Half a layer: attention and a dense feed-forward, with experts beside it or with those of the half
    before behind it."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        super().__init__(device, dtype, structs.replace(config, moe=None), index, attention_class)
        moe = config.moe
        assert moe is not None
        self.shortcut = ZeroExperts(device, dtype, config.hidden_size, moe) if moe.layers[index] else None

    def finish(
        self, attended: Tensor, residual: Tensor, shortcut: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """From the attention output to the pair that the next half begins with, and what the experts of this
        half return; `shortcut`: what those of the half before returned."""
        x = self.self_attn.o_proj.forward(attended)
        if self.shares_prompts:
            x = of_all_parts(batch.part, x)
        x, residual = self.post_attention_layernorm.add(x, residual)
        given = self.shared.join(x, batch)
        out = self.shared.divide(self.mlp.forward(given), batch)
        if self.shortcut is not None:
            return out, residual, self.shared.divide(self.shortcut.forward(given, batch), batch)
        assert shortcut is not None
        return out + shortcut, residual, None


class Longcat(DeepSeek):
    """LongCat Flash. See GenerativeModel. Its next-token layers are not loaded."""

    attention_class = ScaledLatents
    layer_class = LongcatDecoderLayer
    ignored_weights: tuple[str, ...] = (*DeepSeek.ignored_weights, r"^model\.mtp\.")

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        self.renames = (*self.renames, *halves(config.num_layers))
        assert config.moe is not None
        first = config.moe.num_experts  # transformers writes weights of experts that have none, too
        zero = "|".join(str(first + i) for i in range(config.moe.num_zero)) or "none"
        self.ignored_weights = (*self.ignored_weights, rf"\.mlp\.experts\.({zero})\.")

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """See GenerativeModel.piecewise. `compiled` is not used."""
        positions = own_tokens(batch.part, batch.positions)
        tables = [rotary.tables(positions) for rotary in self.rotaries]
        x = self.inputs(batch)
        residual = torch.zeros_like(x)
        shortcut: Tensor | None = None
        before: dict[int, Tensor] = {}
        for index, (layer, kind) in enumerate(zip(self.layers, self.rotary_of_layer, strict=True)):
            assert isinstance(layer, LongcatDecoderLayer)
            if index in self.aux_layers:
                before[index] = x + residual
            queries, residual = layer.before_attention(x, residual, *tables[kind], batch)
            output = yield layer.self_attn, queries
            x, residual, shortcut = layer.finish(output, residual, shortcut, batch)
        return self.with_aux(x + residual, before)


def halves(count: int) -> Renames:
    """Parts of checkpoints' names -> ours, for `count` halves of layers."""
    found: list[tuple[str, str]] = []
    for index in range(count):
        theirs, ours, half = f"layers.{index // 2}.", f"layers.{index}.", index % 2
        for name in ("self_attn", "input_layernorm", "post_attention_layernorm"):
            found.append((f"{theirs}{name}.{half}.", f"{ours}{name}."))
        found.append((f"{theirs}mlps.{half}.", f"{ours}mlp."))
        if not half:
            found += [
                (f"{theirs}mlp.router.classifier.", f"{ours}shortcut.gate."),
                (f"{theirs}mlp.router.", f"{ours}shortcut.gate."),
                (f"{theirs}mlp.experts.", f"{ours}shortcut.experts."),
            ]
    return tuple(found)
