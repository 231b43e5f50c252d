"""Mixture of experts (MoE): every token passes the few experts that its router selects, and the shared
experts where there are some.

Without expert all-to-all, whole experts are spread over `device.ep_size` groups of neighbouring ranks, and
within a group each expert is split by its inner dimension. All ranks route the same tokens, so every rank has
a partial sum for each token, and one all-reduce adds them, shared experts included.

With expert all-to-all (`device.all_to_all`) each rank has a sequence-parallel shard of the tokens and whole
experts. It routes its own tokens, computes the tokens that other ranks send to its experts, and passes its
own tokens through shared experts, which are replicated.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from runtime.devices.all_to_all import MoeAllToAll, PackedExperts
from runtime.devices.base import Device, ForwardBatch
from runtime.devices.experts import AddingExperts
from runtime.devices.operands import NormInputs
from runtime.devices.packed import PackedWeight
from runtime.layers.feed_forward import FeedForward
from runtime.layers.fused_ops import fused_ops_of
from runtime.layers.linear import Linear
from runtime.layers.moe.expert_table import ExpertTable
from runtime.layers.moe.expert_weights import Expert, ExpertWeights
from runtime.layers.moe.routing import sparsemixer
from runtime.layers.parallel.meanwhile import Meanwhile
from runtime.layers.parallel.sequence_parallel import SequenceParallel, sum_of_ranks
from runtime.layers.weight import (
    FormatLookup,
    Layer,
    SourceTensor,
    Subgroup,
    Weight,
    channel_shard,
    even_shard,
    replicated_shard,
)
from runtime.messages.experts import Placement, in_order
from runtime.models.config.moe_config import MoeConfig, Routing


class Router(Layer):
    """Selects the experts of each token. Scores are float32 whatever the model computes in, so that a near
    tie does not depend on rounding."""

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
        self.experts, self.ops, self.fused = device.experts, device.ops, fused_ops_of(device)
        self.routing, self.hidden, self.num_experts = routing, hidden, num_experts
        replicated = replicated_shard(num_experts)
        self.weight: Weight | None = Weight.empty(
            (num_experts, hidden),
            {"": SourceTensor((num_experts, hidden), 0, replicated)},
            dtype,
            device.torch_device,
        )
        self.e_score_correction_bias = self._correction_bias(num_experts, device) if has_bias else None
        # once it is loaded: as the device takes it for sums in float32
        self.packed: PackedWeight | None = None

    @staticmethod
    def _correction_bias(num_experts: int, device: Device) -> Weight:
        """float32 [experts]; some checkpoints have it as [1, experts]."""
        tensor = torch.empty(num_experts, dtype=torch.float32, device=device.torch_device)
        source = SourceTensor(
            (num_experts,),
            0,
            replicated_shard(num_experts),
            load=lambda reader: tensor.copy_(reader[...].flatten()),
            other_shapes=((1, num_experts),),
        )
        return Weight(tensor, {"": source})

    def finish_loading(self) -> None:
        """Packs the weight: in float32 where the device packs weights of any type."""
        assert self.weight is not None
        weight = self.weight.tensor
        packs_rows = self.ops.packs_rows
        self.packed = self.ops.pack_linear(weight.float()) if packs_rows else self.fused.pack_router(weight)
        self.weight = None

    def forward(self, x: Tensor, wide: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> expert ids, int64 or int32 [T, k], and their weights, float32 [T, k]. `wide`: x as
        float32; None: it is made of x."""
        assert self.packed is not None
        if not isinstance(self.packed, Tensor):
            return self.choose(self.ops.linear(x.float() if wide is None else wide, self.packed, None))
        if wide is None:
            return self.choose(self.fused.router_logits(x, self.packed))
        return self.choose(linear(wide, self.packed))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The results of `forward` from the product's, float32 [T, E]."""
        bias = None if self.e_score_correction_bias is None else self.e_score_correction_bias.tensor
        if self.routing.score == "sparsemixer":
            return sparsemixer(logits, self.routing.jitter)
        return self.experts.route(logits, bias, self.routing)


class SparseFeedForward(Layer):
    """The feed-forward of a layer with experts."""

    def __init__(
        self, device: Device, dtype: torch.dtype, hidden: int, moe: MoeConfig, *, shared_limit: float = 0.0
    ) -> None:
        """`shared_limit`: see FeedForward.limit, of the shared experts."""
        self.device = device
        ranks, groups = device.collectives, device.ep_size
        split = ranks.size // groups  # ranks that share one expert
        self.num_experts, spread = moe.num_experts, device.expert_places
        num_places = moe.num_experts + (0 if spread is None else spread.num_copies)
        # this rank's places of experts
        self.local = even_shard(num_places, Subgroup(ranks.rank // split, groups), "experts", "--ep-size")
        inner = channel_shard(
            moe.intermediate_size, Subgroup(ranks.rank % split, split), "moe_intermediate_size"
        )
        self.gate = Router(device, dtype, hidden, moe.num_experts, moe.routing, has_bias=moe.has_bias)
        placement = (
            in_order(num_places, num_places)
            if spread is None
            else spread.of_layer(device.layer, moe.num_experts)
        )
        self.weights_of = partial(
            ExpertWeights, device, dtype, hidden, inner, moe.num_experts, is_first=ranks.rank % split == 0
        )
        self.expert_weights = self.weights_of(placement[self.local.range])
        self.experts: list[Expert] = []  # all experts of the layer while weights are loaded, then none
        self.sequence_parallel = None if device.all_to_all is None else SequenceParallel(device.group_ranks)
        self.table: ExpertTable | None = None  # None: experts are at places of their own numbers
        if spread is not None:
            rank = None if device.all_to_all is None else ranks.rank
            self.table = ExpertTable(
                moe.num_experts, placement, spread.dispatch, device.torch_device, self.local, rank
            )
        shared = (
            FeedForward(
                device,
                dtype,
                hidden,
                moe.shared_size,
                reduction="none",
                replicated=self.sequence_parallel is not None,
                limit=shared_limit,
            )
            if moe.shared_size
            else None
        )
        # checkpoints name it either way
        self.shared_expert = shared if moe.has_shared_gate else None
        self.shared_experts = None if moe.has_shared_gate else shared
        self.shared_expert_gate = (
            Linear(device, dtype, hidden, {"": 1}, shard="replicated") if moe.has_shared_gate else None
        )
        self.packed: PackedExperts | None = (
            None  # what Experts.pack or Experts.pack_quantized made of the weights
        )
        self.counts: Tensor | None = None  # int32 [experts]: routed tokens are counted here, if it is set
        self.leaves_sum = False  # the sum over ranks to who reads the result
        # int32 [tokens, k]: the experts of each token of a step are written here, if it is set
        self.routed: Tensor | None = None

    def leave_sum(self) -> None:
        """See Linear.leave_sum."""
        self.leaves_sum = True

    def allocate(self, formats: FormatLookup) -> None:
        """Takes memory for the experts of this rank. Raises ModelError where they are quantized
        differently."""
        self.experts = self.expert_weights.allocate(formats)

    def finish_loading(self) -> None:
        """Packs the experts for the device."""
        self.experts = []  # so that packing can free the weights that it replaces
        self.packed = self.expert_weights.pack()

    def forward(self, x: Tensor, batch: ForwardBatch, wide: Tensor | None = None) -> Tensor:
        """x and the result are [T, hidden], or with expert all-to-all this rank's shard [P, hidden]. Without
        it x has all tokens, and where ranks have shards between attentions the result is this rank's. With
        attention groups x has the tokens of all groups, and the result is a partial sum. `wide`: x as
        float32; None: it is made of x."""
        shared = self.begin_shared(x)
        return self._routed(x, *self.gate.forward(x, wide), shared, batch)

    def of_norm(self, inputs: NormInputs, batch: ForwardBatch) -> tuple[Tensor, Tensor] | None:
        """(`forward` of the norm that add_rms_norm makes of `inputs`, x + residual), where the device has one
        launch for the norm and the router's product; None: it has none."""
        router = self.gate
        if not isinstance(router.packed, Tensor):
            return None
        found = router.fused.router_logits_of_norm(inputs, router.packed)
        if found is None:
            return None
        logits, total, x = found
        return self._routed(x, *router.choose(logits), self.begin_shared(x), batch), total

    def _routed(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Callable[[], Tensor] | None,
        batch: ForwardBatch,
    ) -> Tensor:
        """The result of `forward` for tokens whose experts are known."""
        if self.gate.routing.scales_inputs:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        if self.sequence_parallel is not None and self.device.all_to_all is not None:
            exchange = self.device.all_to_all.of(batch.is_decode)
            if shared is not None and self.device.overlap.shared_experts:
                shared = Meanwhile(self.device.collectives, shared)
            return add_shared(
                self._exchanged(exchange, self.sequence_parallel, x, ids, weights, batch), shared
            )
        self.count(ids, batch.is_real)
        if self.routed is not None:
            self.routed[: len(ids)].copy_(ids[: len(self.routed)])
        if self.table is not None:
            ids = self.table.places(ids)
        experts, start = self.device.experts, self.local.start
        if shared is not None and isinstance(experts, AddingExperts):
            out = experts.apply_added(x, ids, weights, self.packed, shared, start)
        else:
            out = add_shared(experts.apply(x, ids, weights, self.packed, start), shared)
        return out if self.leaves_sum else sum_of_ranks(self.device, out)

    def _exchanged(
        self,
        exchange: MoeAllToAll,
        parallel: SequenceParallel,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        """The experts' sums for this rank's shard of its group's tokens, x [P, hidden]. Where P is less than
        that of another group it is filled up: an exchange is given as many rows on all ranks."""
        ids = parallel.mask_padding(ids, len(batch.positions))
        is_real = batch.is_real
        self.count(ids, None if is_real is None else parallel.shard(is_real.unsqueeze(1)).squeeze(1))
        if self.table is not None:
            ids = self.table.places(ids)
        own = len(x)
        if batch.group_tokens and (more := parallel.shard_size(max(batch.group_tokens)) - own):
            x, weights = (pad(part, (0, 0, 0, more)) for part in (x, weights))
            ids = pad(ids, (0, 0, 0, more), value=-1)
        has_int8 = self.expert_weights.has_int8_activations
        return exchange.apply(x, ids, weights, self.local.size, self.packed, has_int8)[:own]

    def arriving(self, placement: Placement) -> tuple[int, ...]:
        """The experts that a placement brings to this rank, which it has not yet."""
        wanted, own = placement[self.local.range], self.expert_weights.own
        return tuple(sorted(set(wanted) - set(own)))

    def move(self, placement: Placement, arrived: ExpertWeights | None) -> None:
        """Takes another placement into use. `arrived`: the loaded weights of the experts that it brings to
        this rank; None: there are none."""
        assert self.table is not None and self.packed is not None
        own = (*self.expert_weights.own, *(() if arrived is None else arrived.own))
        wanted = placement[self.local.range]
        added = None if arrived is None else arrived.pack()
        order = [own.index(expert) for expert in wanted]
        self.packed = self.device.experts.rearranged(self.packed, added, order)
        self.expert_weights.own = wanted
        self.table.set(placement)

    def count(self, ids: Tensor, is_real: Tensor | None) -> None:
        """Adds the routed tokens to `counts`. Rows with ids below 0, or for which `is_real` is False, are
        padding."""
        if self.counts is not None:
            counted = ids >= 0 if is_real is None else (ids >= 0) & is_real.unsqueeze(1)
            places = ids.clamp(min=0).flatten().long()
            self.counts.scatter_add_(0, places, counted.flatten().to(torch.int32))

    def begin_shared(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Returns what gives the shared experts' output [T, hidden]; None: there are no shared experts. They
        are computed on the side stream where the device has one, else when the output is asked for."""
        shared, side_stream = self.shared_expert or self.shared_experts, self.device.side_stream
        if shared is None:
            return None

        def output() -> Tensor:
            out = shared.forward(x)
            return (
                out if self.shared_expert_gate is None else out * self.shared_expert_gate.forward(x).sigmoid()
            )

        return output if side_stream is None else side_stream.launch(output)


def add_shared(out: Tensor, shared: Callable[[], Tensor] | None) -> Tensor:
    """Routed output plus shared output, [T, hidden]. May overwrite `out`."""
    if shared is not None:
        out += shared()
    return out
