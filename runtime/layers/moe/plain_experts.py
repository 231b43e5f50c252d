"""Experts without gates, down(relu(up(x))²), in some models within a latent (Nemotron 3).

The grouped products of devices are those of gated experts, so these are plain torch: of few tokens, the
weights of the experts that they select are gathered; of many in a step of decode rows, which graphs may
capture, every expert computes all tokens, with weight 0 where a token did not select it; in other steps each
expert computes its own tokens. Ranks split each expert by its inner dimension.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from runtime.devices.base import Device, ForwardBatch
from runtime.errors import ModelError
from runtime.layers.feed_forward import PlainFeedForward
from runtime.layers.moe.feed_forward import Router
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.weight import FormatLookup, Layer, SourceTensor, Weight, WeightOnly, even_shard
from runtime.models.config.moe_config import MoeConfig


class PlainExpert(Layer):
    """Where the checkpoint's tensors of one expert go: views of the stacks."""

    def __init__(self, up: Weight, down: Weight) -> None:
        self.up = WeightOnly(up)
        self.down = WeightOnly(down)


class PlainExperts(Layer):
    """Router, experts, the latent around them and the shared expert."""

    def __init__(self, device: Device, dtype: torch.dtype, hidden: int, moe: MoeConfig) -> None:
        if device.ep_size > 1 or device.all_to_all is not None:
            raise ModelError(
                "experts without gates are split over all ranks; leave --ep-size and --moe-a2a-backend out"
            )
        self.device, self.dtype = device, dtype
        self.num_experts, self.width = moe.num_experts, moe.latent_size or hidden
        self.inner = even_shard(moe.intermediate_size, device.collectives, "moe_intermediate_size")
        self.gate = Router(device, dtype, hidden, moe.num_experts, moe.routing, has_bias=moe.has_bias)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if moe.latent_size is not None:
            self.fc1_latent_proj = ReplicatedLinear(device, dtype, hidden, self.width, bias=False)
            self.fc2_latent_proj = ReplicatedLinear(device, dtype, self.width, hidden, bias=False)
        self.shared_experts = (
            PlainFeedForward(device, dtype, hidden, moe.shared_size, "relu2", bias=False, reduction="none")
            if moe.shared_size
            else None
        )
        self.experts: list[PlainExpert] = []  # while weights are loaded, then none
        # [experts, inner, width] and [experts, width, inner], once memory is taken
        self.stacks: tuple[Tensor, Tensor] | None = None

    def allocate(self, formats: FormatLookup) -> None:
        """Takes memory for the experts. Raises ModelError where they are quantized."""
        if formats("experts.0.up") is not None or formats("experts.0.down") is not None:
            raise ModelError(
                "experts without gates are quantised here, which is not supported; use the plain version of "
                "the model"
            )
        inner, width = self.inner, self.width
        up, down = (
            torch.empty(self.num_experts, *shape, dtype=self.dtype, device=self.device.torch_device)
            for shape in ((inner.size, width), (width, inner.size))
        )
        self.stacks = up, down
        sources = SourceTensor((inner.full, width), 0, inner), SourceTensor((width, inner.full), 1, inner)
        self.experts = [
            PlainExpert(
                *(Weight(stack[i], {"": source}) for stack, source in zip(self.stacks, sources, strict=True))
            )
            for i in range(self.num_experts)
        ]

    def finish_loading(self) -> None:
        """Drops the views."""
        self.experts = []

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """See TokenMixer; `queries` are the tokens alone."""
        return self.forward(queries[0], batch)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        ids, weights = self.gate.forward(x)
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
        return self.device.collectives.all_reduce(out)

    def _stacks(self) -> tuple[Tensor, Tensor]:
        assert self.stacks is not None, "a step before the weights are complete"
        return self.stacks

    def _gathered(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        up, down = (stack[ids] for stack in self._stacks())  # [T, k, ...]
        inner = relu(up @ x[:, None, :, None]).square()
        return ((down @ inner).squeeze(3) * weights.unsqueeze(2)).sum(dim=1)

    def _all(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        shares = weights.new_zeros(len(x), self.num_experts).scatter_(1, ids, weights)
        for expert, (up, down) in enumerate(zip(*self._stacks(), strict=True)):
            out += linear(relu(linear(x, up)).square(), down) * shares[:, expert, None]
        return out

    def _apart(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        up, down = self._stacks()
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.num_experts).tolist()
        for expert, places in enumerate(order.split(counts)):
            if counts[expert]:
                tokens = places // ids.shape[1]
                inner = relu(linear(x[tokens], up[expert])).square()
                out.index_add_(0, tokens, linear(inner, down[expert]) * weights.flatten()[places, None])
        return out
