"""What a device computes of mixture-of-experts layers. Torch-free at run time."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from runtime.devices.all_to_all import PackedExperts
from runtime.devices.operands import Quantized
from runtime.models.config.moe_config import Routing

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class AddingExperts(Protocol):
    """Experts of a device that may add another output to theirs in the launch that sums them."""

    def apply_added(
        self,
        x: "Tensor",
        expert_ids: "Tensor",
        weights: "Tensor",
        packed: PackedExperts,
        added: "Callable[[], Tensor]",
        first: int | None = None,
    ) -> "Tensor":
        """Experts.apply plus what `added` gives, [T, hidden], in the dtype of `x`. It is called when all but
        the sum is launched."""
        ...


class Experts(Protocol):
    """Routing, and the experts of a rank."""

    def route(self, logits: "Tensor", bias: "Tensor | None", routing: Routing) -> "tuple[Tensor, Tensor]":
        """The `top_k` experts of each token: float32 logits [T, E] -> ids, int64 or int32 [T, k], and
        weights float32 [T, k].

        Scores are the softmax or sigmoid of the logits; other kinds are never asked for. Experts are chosen
        by score plus `bias` [E], among the `top_groups` groups of experts (equal parts of E, in order) with
        the largest such score, or sum of two. Weights are the scores without bias.
        """
        ...

    def pack(self, gate_up: "Tensor", down: "Tensor") -> PackedExperts:
        """Packs the weights [E, 2 * inner, hidden] and [E, hidden, inner] of this rank's experts. The caller
        gives up the originals."""
        ...

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> PackedExperts:
        """Packs stacks of quantized weights. The caller gives up the originals."""
        ...

    def rearranged(
        self, packed: PackedExperts, added: PackedExperts | None, order: Sequence[int]
    ) -> PackedExperts:
        """Packed experts that are entries `order` of those of `packed` and, behind them, `added`; as many as
        `packed` has. Where steps are captured they are in the memory of `packed`. The caller gives up
        both."""
        ...

    def apply(
        self,
        x: "Tensor",
        expert_ids: "Tensor",
        weights: "Tensor",
        packed: PackedExperts,
        first: int | None = None,
    ) -> "Tensor":
        """x [T, hidden] -> for each token the sum over its `expert_ids` [T, k] of weight * down(silu(gate(x))
        * up(x)).

        Ids outside 0 .. E - 1 are experts of other ranks and add nothing; with `first` they are those of all
        ranks' experts, none of them below 0, and this rank's are `first` .. `first` + E - 1.
        """
        ...
