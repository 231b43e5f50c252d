"""Experts that the grouped products of devices do not know, in plain torch: those without gates,
down(relu(up(x))²), in some models within a latent (Nemotron 3), and those whose gated activation is clamped
(Step 3.5; layers/feed_forward.py).

Of few tokens, the weights of the experts that they select are gathered; of many in a step of decode rows,
which graphs may capture, every expert computes all tokens, with weight 0 where a token did not select it; in
other steps each expert computes its own tokens. Ranks split each expert by its inner dimension.

Quantized experts are dequantized while they are loaded, and plain ones are not quantized then.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from runtime.devices.base import Device, ForwardBatch
from runtime.errors import ModelError
from runtime.layers.feed_forward import FeedForward, PlainFeedForward, clamped_silu_and_mul
from runtime.layers.linear import Linear
from runtime.layers.moe.expert_weights import Expert
from runtime.layers.moe.feed_forward import Router
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.parallel.sequence_parallel import sum_of_ranks
from runtime.layers.weight import FormatLookup, Layer, Shard, SourceTensor, Weight, WeightOnly, channel_shard
from runtime.models.config.moe_config import MoeConfig
from runtime.models.config.quantization_schemes import WeightFormat


def is_stored(format: WeightFormat | None) -> bool:
    """Whether a checkpoint has a module quantized, and it is not to be quantized while it is loaded."""
    return format is not None and format.layout != "online"


class DequantizedLinear(Linear):
    """A matrix of an expert, which is dequantized while it is loaded."""

    def allocate(self, formats: FormatLookup) -> None:
        """See Layer.allocate."""
        format = formats("")
        super().allocate(lambda _: None if format is None else format.in_full())


class PlainExpert(Layer):
    """Where the checkpoint's tensors of one expert without a gate go: views of the stacks."""

    def __init__(self, up: Layer, down: Layer) -> None:
        self.up = up
        self.down = down


class PlainExperts(Layer):
    """Router, experts, the latent around them and the shared expert."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        moe: MoeConfig,
        limit: float = 0.0,
        *,
        shared_limit: float = 0.0,
    ) -> None:
        """`limit`: clamp of the activation of gated experts; `shared_limit`: of the shared expert, 0: none.
        Raises ModelError where experts are to be whole on some ranks."""
        if device.ep_size > 1 or device.all_to_all is not None:
            raise ModelError(
                "experts without gates, or with clamped ones, are split over all ranks; leave --ep-size and "
                "--moe-a2a-backend out"
            )
        self.device, self.dtype, self.limit, self.is_gated = device, dtype, limit, moe.is_gated
        self.num_experts, self.width = moe.num_experts, moe.latent_size or hidden
        self.inner = channel_shard(moe.intermediate_size, device.collectives, "moe_intermediate_size")
        self.gate = Router(device, dtype, hidden, moe.num_experts, moe.routing, has_bias=moe.has_bias)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if moe.latent_size is not None:
            self.fc1_latent_proj = ReplicatedLinear(device, dtype, hidden, self.width, bias=False)
            self.fc2_latent_proj = ReplicatedLinear(device, dtype, self.width, hidden, bias=False)
        self.shared_experts: FeedForward | PlainFeedForward | None = None
        if moe.shared_size and moe.is_gated:
            self.shared_experts = FeedForward(
                device, dtype, hidden, moe.shared_size, reduction="none", limit=shared_limit
            )
        elif moe.shared_size:
            self.shared_experts = PlainFeedForward(
                device, dtype, hidden, moe.shared_size, "relu2", bias=False, reduction="none"
            )
        self.experts: list[PlainExpert | Expert] = []  # while weights are loaded, then none
        # [experts, inner, width] and [experts, width, inner], once memory is taken; where experts have gates
        # the first is [experts, 2 * inner, width]
        self.stacks: tuple[Tensor, Tensor] | None = None

    def allocate(self, formats: FormatLookup) -> None:
        """Takes memory for the experts, or makes a layer of each matrix where they are quantized."""
        first = "gate_up_proj" if self.is_gated else "up"
        second = "down_proj" if self.is_gated else "down"
        if any(is_stored(formats(f"experts.0.{name}")) for name in (first, second)):
            self.experts = [self._quantized_expert() for _ in range(self.num_experts)]
            return
        inner, width = self.inner, self.width
        rows = inner.size * (2 if self.is_gated else 1)
        up, down = (
            torch.empty(self.num_experts, *shape, dtype=self.dtype, device=self.device.torch_device)
            for shape in ((rows, width), (width, inner.size))
        )
        self.stacks = up, down
        shape = inner.full, width
        firsts = {"": SourceTensor(shape, 0, inner)}
        if self.is_gated:
            firsts = {"gate": SourceTensor(shape, 0, inner), "up": SourceTensor(shape, 0, inner, inner.size)}
        seconds = {"": SourceTensor((width, inner.full), 1, inner)}
        kind = Expert if self.is_gated else PlainExpert
        self.experts = [
            kind(WeightOnly(Weight(up[i], firsts)), WeightOnly(Weight(down[i], seconds)))
            for i in range(self.num_experts)
        ]

    def _quantized_expert(self) -> PlainExpert | Expert:
        """An expert whose matrices are layers, as checkpoints may quantize them."""
        given, inner = (self.device, self.dtype), self.inner.full
        firsts: dict[str, int | Shard] = {"gate": inner, "up": inner} if self.is_gated else {"": inner}
        kind = Expert if self.is_gated else PlainExpert
        return kind(
            DequantizedLinear(*given, self.width, firsts, shard="column"),
            DequantizedLinear(*given, inner, {"": self.width}, shard="row", reduction="none"),
        )

    def finish_loading(self) -> None:
        """Drops the views, or stacks what quantized experts stand for."""
        if self.stacks is None:
            self.stacks = self._dequantized(0), self._dequantized(1)
        self.experts = []

    def _dequantized(self, matrix: int) -> Tensor:
        """The first or the second matrices of quantized experts, [experts, out, in]."""
        stack = torch.empty(0)
        for index, expert in enumerate(self.experts):
            layers = [layer for _, layer in expert.children()]
            linear_layer = layers[matrix]
            assert isinstance(linear_layer, Linear), "experts that are not quantized have stacks"
            weight = linear_layer.full_weight()
            if index == 0:
                stack = weight.new_empty(self.num_experts, *weight.shape)
            stack[index] = weight
        return stack

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """See TokenMixer; `queries` are the tokens alone."""
        return self.forward(queries[0], batch)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] -> [T, hidden], as SparseFeedForward.forward without expert all-to-all."""
        ids, weights = self.gate.forward(x)
        ids = ids.long()
        given = x if self.fc1_latent_proj is None else self.fc1_latent_proj.forward(x)
        if ids.numel() <= self.num_experts:
            out = self._gathered(given, ids, weights)
        elif batch.is_decode:
            out = self._all(given, ids, weights)
        else:
            out = self._apart(given, ids, weights)
        out = out.to(x.dtype)
        if self.fc2_latent_proj is not None:
            out = self.fc2_latent_proj.forward(out)
        if self.shared_experts is not None:
            out = out + self.shared_experts.forward(x)
        return sum_of_ranks(self.device, out)

    def _stacks(self) -> tuple[Tensor, Tensor]:
        assert self.stacks is not None, "a step before the weights are complete"
        return self.stacks

    def _activated(self, x: Tensor) -> Tensor:
        """What the first matrix of an expert makes, [..., inner] or [..., 2 * inner] -> [..., inner]."""
        return clamped_silu_and_mul(x, self.limit) if self.is_gated else relu(x).square()

    def _gathered(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        up, down = (stack[ids] for stack in self._stacks())  # [T, k, ...]
        inner = self._activated((up @ x[:, None, :, None]).squeeze(3))
        return ((down @ inner.unsqueeze(3)).squeeze(3) * weights.unsqueeze(2)).sum(dim=1)

    def _all(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        shares = weights.new_zeros(len(x), self.num_experts).scatter_(1, ids, weights)
        for expert, (up, down) in enumerate(zip(*self._stacks(), strict=True)):
            out += linear(self._activated(linear(x, up)), down) * shares[:, expert, None]
        return out

    def _apart(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        up, down = self._stacks()
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.num_experts).tolist()
        for expert, places in enumerate(order.split(counts)):
            if counts[expert]:
                tokens = places // ids.shape[1]
                inner = self._activated(linear(x[tokens], up[expert]))
                out.index_add_(0, tokens, linear(inner, down[expert]) * weights.flatten()[places, None])
        return out
