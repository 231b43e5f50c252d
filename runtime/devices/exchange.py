"""How tokens travel between the ranks of a mixture of experts, where each rank has a part of a step's tokens. dispatch.py has
what all devices with collectives can do; a device may have operators of its own.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Visitors:
    """Tokens at the rank of their experts: what Experts.apply takes."""

    x: "Tensor"  # [R, hidden]
    ids: "Tensor"  # int64 [R, k'], of this rank's experts, from 0; any other is not for this rank
    weights: "Tensor"  # float32 [R, k']
    ticket: Any  # by which their sums go back


class Exchange(Protocol):
    """Tokens travel to the ranks of their experts, and sums back. All ranks call it alike, whoever has how many tokens."""

    def dispatch(self, x: "Tensor", ids: "Tensor", weights: "Tensor", num_local: int) -> Visitors:
        """Of this rank's tokens x [P, hidden], P the same on all ranks, with experts ids int64 [P, k] (below 0: none) and weights float32
        [P, k], to the visitors of this rank. Each rank has `num_local` experts, in rank order."""
        ...

    def combine(self, rows: "Tensor", ticket: Any) -> "Tensor":
        """What Experts.apply made of the visitors, [R, hidden] -> the sums of this rank's tokens, [P, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Exchanges:
    """That of steps with prompts, and that of steps in which every row decodes, which graphs must be able to capture."""

    prompts: Exchange
    decodes: Exchange

    def of(self, is_decode: bool) -> Exchange:
        return self.decodes if is_decode else self.prompts
