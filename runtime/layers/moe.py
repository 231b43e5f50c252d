"""Mixture of experts: every token passes the few experts that its router chooses, and the shared one where there is one.

All ranks route the same tokens. Whole experts are spread over `device.ep_size` groups of neighbouring ranks, and within a group each
expert is split by its inner dimension; so every rank has a part of each token's sum, and one exchange adds them, shared expert included.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Device
from runtime.layers.feed_forward import FeedForward
from runtime.layers.linear import Linear
from runtime.layers.weight import Held, Layer, Part, Place, Share, Weight, even_share
from runtime.models.sparse import Mixture, Routing


class Router(Layer):
    """Chooses experts. Scores are float32 whatever the model computes in: a near tie must not depend on rounding."""

    def __init__(self, device: Device, dtype: torch.dtype, hidden: int, num_experts: int, routing: Routing, *, has_bias: bool) -> None:
        self.experts = device.experts
        self.routing = routing
        whole = Share(num_experts, 0, num_experts)
        self.weight: Weight | None = Weight((num_experts, hidden), {"": Part((num_experts, hidden), 0, whole)}, dtype, device.place)
        self.e_score_correction_bias = Weight((num_experts,), {"": Part((num_experts,), 0, whole)}, torch.float32,
                                              device.place) if has_bias else None
        self.scores: Tensor | None = None  # float32 [experts, hidden]

    def finish(self) -> None:
        assert self.weight is not None
        self.scores = self.weight.tensor.float()
        self.weight = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> experts int64 [T, k] and their weights, float32 [T, k]."""
        assert self.scores is not None
        bias = None if self.e_score_correction_bias is None else self.e_score_correction_bias.tensor
        return self.experts.route(linear(x.float(), self.scores), bias, self.routing)


class Expert(Layer):
    """Where the checkpoint's tensors of one expert go: parts of the stacks; nowhere, with shares of no size, on ranks without it."""

    def __init__(self, gate_up: Weight, down: Weight) -> None:
        self.gate_up_proj = Held(gate_up)
        self.down_proj = Held(down)


class SparseFeedForward(Layer):
    """The feed-forward of a layer with experts."""

    def __init__(self, device: Device, dtype: torch.dtype, hidden: int, mixture: Mixture) -> None:
        self.device = device
        ranks, groups = device.collectives, device.ep_size
        split = ranks.size // groups  # ranks that share one expert
        self.local = even_share(mixture.num_experts, Place(ranks.rank // split, groups), "experts", "--ep-size")
        inner = even_share(mixture.intermediate_size, Place(ranks.rank % split, split), "moe_intermediate_size", "--tp-size / --ep-size")
        self.gate = Router(device, dtype, hidden, mixture.num_experts, mixture.routing, has_bias=mixture.has_bias)
        stacks = (torch.empty(self.local.size, 2 * inner.size, hidden, dtype=dtype, device=device.place),
                  torch.empty(self.local.size, hidden, inner.size, dtype=dtype, device=device.place))
        self.stacks: tuple[Tensor, Tensor] | None = stacks
        self.experts = [self._expert(stacks, i - self.local.start, inner) for i in range(mixture.num_experts)]
        shared = FeedForward(device, dtype, hidden, mixture.shared_size, sums=False) if mixture.shared_size else None
        self.shared_expert = shared if mixture.has_shared_gate else None  # the two spellings of checkpoints
        self.shared_experts = None if mixture.has_shared_gate else shared
        self.shared_expert_gate = Linear(device, dtype, hidden, {"": 1}, shard="whole") if mixture.has_shared_gate else None
        self.packed: Any = None

    def _expert(self, stacks: tuple[Tensor, Tensor], place: int, inner: Share) -> Expert:
        gate_up, down = stacks
        hidden = down.shape[1]
        is_here = 0 <= place < self.local.size
        if is_here:
            tensors = gate_up[place], down[place]
        else:
            inner, tensors = Share(inner.full, 0, 0), (gate_up.new_empty(0, hidden), down.new_empty(hidden, 0))
        shape = (inner.full, hidden)
        parts = {"gate": Part(shape, 0, inner), "up": Part(shape, 0, inner, inner.size)}
        return Expert(Weight.of(tensors[0], parts), Weight.of(tensors[1], {"": Part((hidden, inner.full), 1, inner)}))

    def finish(self) -> None:
        assert self.stacks is not None
        self.experts = []  # so that packing can free what it replaces
        self.packed = self.device.experts.pack(*self.stacks)
        self.stacks = None

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate.forward(x)
        if self.local.start:
            ids = ids - self.local.start
        out = self.device.experts.apply(x, ids, weights, self.packed)
        shared = self.shared_expert or self.shared_experts
        if shared is not None:
            part = shared.forward(x)
            out += part if self.shared_expert_gate is None else part * self.shared_expert_gate.forward(x).sigmoid()
        return self.device.collectives.all_reduce(out)
