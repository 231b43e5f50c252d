"""Interface of the exchange of tokens between the ranks of a mixture-of-experts layer, where each rank has a
part of a step's tokens. Torch-free at run time.

torch_all_to_all.py has implementations for all devices with collectives; a device may have operators of its
own.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PackedExperts(Protocol):
    """Weights of a rank's experts in the form that a device's `Experts.apply` reads. Only the device looks
    inside."""


class MoeAllToAll(Protocol):
    """Sends tokens to the ranks of their experts and brings the weighted sums back. All ranks call it for
    each step, with or without tokens."""

    def apply(
        self,
        x: "Tensor",
        ids: "Tensor",
        weights: "Tensor",
        num_local: int,
        packed: PackedExperts,
        is_rounded: bool,
    ) -> "Tensor":
        """What Experts.apply computes, for this rank's part of the tokens and the experts of all ranks.

        x [P, hidden], where P is the same on all ranks; ids int64 [P, k] and weights float32 [P, k]. A row of
        padding has ids below 0 and an undefined result. Each rank has `num_local` experts, in rank order;
        `packed` are this rank's. With `is_rounded` the experts quantize activations to int8 with a scale for
        each token, so that tokens may travel in that form without a loss.
        """
        ...


@dataclass(frozen=True, slots=True)
class AllToAllModes:
    """The exchange of steps with prompts, and that of steps in which every row decodes, which graphs must be
    able to capture."""

    prompts: MoeAllToAll
    decodes: MoeAllToAll

    def of(self, is_decode: bool) -> MoeAllToAll:
        """The exchange of a step."""
        return self.decodes if is_decode else self.prompts
