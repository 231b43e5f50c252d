"""Mixture of experts: every token passes the few experts that its router chooses, and the shared one where
there is one.

Whole experts are spread over `device.ep_size` groups of neighbouring ranks, and within a group each expert is
split by its inner dimension. All ranks route the same tokens, so every rank has a part of each token's sum,
and one exchange adds them, shared expert included.

Or (`device.exchanges`) each rank has a part of the tokens and whole experts, routes its own tokens, computes
what comes to its experts, and passes its own tokens through a shared expert that every rank has whole.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Batch, Device
from runtime.errors import ModelError
from runtime.layers.feed_forward import FeedForward
from runtime.layers.linear import Linear
from runtime.layers.parallel.sequence_parallel import Parts
from runtime.layers.quantization.quantized_weight import Storage, allocate, completed
from runtime.layers.weight import Held, Layer, Lookup, Part, Place, Share, Weight, even_share
from runtime.models.moe_config import MoeConfig, Routing
from runtime.models.quantization_schemes import Int8, Stored


class Router(Layer):
    """Chooses experts. Scores are float32 whatever the model computes in: a near tie must not depend on
    rounding."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        num_experts: int,
        routing: Routing,
        *,
        has_bias: bool,
    ) -> None:
        self.experts = device.experts
        self.routing = routing
        whole = Share(num_experts, 0, num_experts)
        self.weight: Weight | None = Weight(
            (num_experts, hidden), {"": Part((num_experts, hidden), 0, whole)}, dtype, device.torch_device
        )
        self.e_score_correction_bias = (
            Weight((num_experts,), {"": Part((num_experts,), 0, whole)}, torch.float32, device.torch_device)
            if has_bias
            else None
        )
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
    """Where the checkpoint's tensors of one expert go: parts of the stacks; nowhere, with shares of no size,
    on ranks without it."""

    def __init__(self, gate_up: Layer, down: Layer) -> None:
        self.gate_up_proj = gate_up
        self.down_proj = down


class Stacks:
    """The weights of all experts of this rank, [experts, 2 * inner, hidden] and [experts, hidden, inner], and
    each one's parts in them."""

    def __init__(
        self, device: Device, dtype: torch.dtype, hidden: int, inner: Share, local: Share, is_first: bool
    ) -> None:
        self.device, self.dtype, self.hidden, self.inner, self.local = device, dtype, hidden, inner, local
        self.is_first = is_first  # of the ranks that share an expert
        self.tensors: tuple[Tensor, Tensor] | None = None
        # in place of them, of experts in few bits
        self.bits: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self.storages: tuple[Storage, Storage] | None = None  # of any expert here

    def open(self, stored: tuple[Stored | None, Stored | None]) -> list[Expert]:
        first, second = stored
        num_experts, whole = self.local.size, Share(self.hidden, 0, self.hidden)
        if (first is None) != (second is None):
            raise ModelError("experts have only some of their weights quantised, which is not supported")
        if first is None or second is None:
            self.tensors = (
                torch.empty(
                    num_experts,
                    2 * self.inner.size,
                    self.hidden,
                    dtype=self.dtype,
                    device=self.device.torch_device,
                ),
                torch.empty(
                    num_experts,
                    self.hidden,
                    self.inner.size,
                    dtype=self.dtype,
                    device=self.device.torch_device,
                ),
            )
            return [self._plain(self.tensors, i - self.local.start) for i in range(self.local.full)]
        torch_device, lead = self.device.torch_device, (num_experts,)
        self.bits = (
            allocate(first.scheme, 2 * self.inner.size, whole, torch_device, lead),
            allocate(second.scheme, self.hidden, self.inner, torch_device, lead),
        )
        return [self._stored(first, second, i - self.local.start) for i in range(self.local.full)]

    def _is_here(self, index: int) -> bool:
        return 0 <= index < self.local.size

    def _plain(self, stacks: tuple[Tensor, Tensor], index: int) -> Expert:
        gate_up, down = stacks
        inner, hidden = self.inner, self.hidden
        if self._is_here(index):
            tensors = gate_up[index], down[index]
        else:
            inner, tensors = (
                Share(inner.full, 0, 0),
                (gate_up.new_empty(0, hidden), down.new_empty(hidden, 0)),
            )
        shape = (inner.full, hidden)
        parts = {"gate": Part(shape, 0, inner), "up": Part(shape, 0, inner, inner.size)}
        return Expert(
            Held(Weight.of(tensors[0], parts)),
            Held(Weight.of(tensors[1], {"": Part((hidden, inner.full), 1, inner)})),
        )

    def _stored(self, first: Stored, second: Stored, index: int) -> Expert:
        assert self.bits is not None
        is_here, whole = self._is_here(index), Share(self.hidden, 0, self.hidden)
        tensors = [{name: t[index] for name, t in stack.items()} if is_here else {} for stack in self.bits]
        inner, outer = (
            (self.inner, whole) if is_here else (Share(self.inner.full, 0, 0), Share(self.hidden, 0, 0))
        )
        storages = (
            Storage(first, {"gate": inner, "up": inner}, whole, tensors[0], counts_sums=True),
            Storage(second, {"": outer}, self.inner, tensors[1], counts_sums=self.is_first),
        )
        if is_here:
            self.storages = storages
        return Expert(*storages)

    def pack(self) -> Any:
        experts = self.device.experts
        if self.bits is not None and self.storages is not None:
            packed = experts.pack_quantized(
                *(completed(storage, stack) for storage, stack in zip(self.storages, self.bits, strict=True))
            )
        else:
            assert self.tensors is not None
            packed = experts.pack(*self.tensors)
        self.tensors = self.bits = self.storages = None
        return packed


class SparseFeedForward(Layer):
    """The feed-forward of a layer with experts."""

    def __init__(self, device: Device, dtype: torch.dtype, hidden: int, moe: MoeConfig) -> None:
        self.device = device
        ranks, groups = device.collectives, device.ep_size
        split = ranks.size // groups  # ranks that share one expert
        self.local = even_share(moe.num_experts, Place(ranks.rank // split, groups), "experts", "--ep-size")
        inner = even_share(
            moe.intermediate_size,
            Place(ranks.rank % split, split),
            "moe_intermediate_size",
            "--tp-size / --ep-size",
        )
        self.gate = Router(device, dtype, hidden, moe.num_experts, moe.routing, has_bias=moe.has_bias)
        self.stacks = Stacks(device, dtype, hidden, inner, self.local, ranks.rank % split == 0)
        self.experts: list[Expert] = []  # of all ranks
        self.parts = None if device.exchanges is None else Parts(ranks)
        shared = (
            FeedForward(device, dtype, hidden, moe.shared_size, sums=False, whole=self.parts is not None)
            if moe.shared_size
            else None
        )
        self.shared_expert = shared if moe.has_shared_gate else None  # the two spellings of checkpoints
        self.shared_experts = None if moe.has_shared_gate else shared
        self.shared_expert_gate = (
            Linear(device, dtype, hidden, {"": 1}, shard="whole") if moe.has_shared_gate else None
        )
        self.is_rounded = False  # what these experts are given, by themselves, to int8
        self.packed: Any = None
        self.counts: Tensor | None = None  # int32 [experts]: tokens that chose each are added here

    def open(self, lookup: Lookup) -> None:
        found = {
            (lookup(f"experts.{i}.gate_up_proj"), lookup(f"experts.{i}.down_proj"))
            for i in range(self.local.full)
        }
        if len(found) > 1:
            raise ModelError("the experts of a layer are quantised differently, which is not supported")
        stored = found.pop()
        self.is_rounded = stored[0] is not None and stored[0].scheme == Int8("token")
        self.experts = self.stacks.open(stored)

    def finish(self) -> None:
        self.experts = []  # so that packing can free what it replaces
        self.packed = self.stacks.pack()

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x and the result are [T, hidden], or with exchanges this rank's part of it."""
        shared = self.begin_shared(x)
        ids, weights = self.gate.forward(x)
        if self.parts is not None and self.device.exchanges is not None:
            ids = self.parts.hide(ids, len(batch.positions))
            self.count(
                ids, None if batch.is_real is None else self.parts.cut(batch.is_real.unsqueeze(1)).squeeze(1)
            )
            exchange = self.device.exchanges.of(batch.is_decode)
            return add_shared(
                exchange.apply(x, ids, weights, self.local.size, self.packed, self.is_rounded), shared
            )
        self.count(ids, batch.is_real)
        if self.local.start:
            ids = ids - self.local.start
        out = self.device.experts.apply(x, ids, weights, self.packed)
        return self.device.collectives.all_reduce(add_shared(out, shared))

    def count(self, ids: Tensor, is_real: Tensor | None) -> None:
        """Ids below 0 are nobody's."""
        if self.counts is not None:
            chosen = ids >= 0 if is_real is None else (ids >= 0) & is_real.unsqueeze(1)
            self.counts.scatter_add_(0, ids.clamp(min=0).flatten(), chosen.flatten().to(torch.int32))

    def begin_shared(self, x: Tensor) -> Callable[[], Tensor] | None:
        """What gives the shared experts' part; beside the routed ones' where the device has a stream for it,
        else when it is asked."""
        shared, beside = self.shared_expert or self.shared_experts, self.device.beside
        if shared is None:
            return None

        def part() -> Tensor:
            out = shared.forward(x)
            return (
                out if self.shared_expert_gate is None else out * self.shared_expert_gate.forward(x).sigmoid()
            )

        return part if beside is None else beside.begin(part)


def add_shared(out: Tensor, shared: Callable[[], Tensor] | None) -> Tensor:
    """May overwrite `out`."""
    if shared is not None:
        out += shared()
    return out
