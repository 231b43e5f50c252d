"""How the ranks of a mixture of experts exchange tokens, where each rank has a part of a step's tokens.
dispatch.py has what all devices with collectives can do; a device may have operators of its own.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Exchange(Protocol):
    """Tokens travel to the ranks of their experts, and sums come back. All ranks call it alike, whoever has
    how many tokens."""

    def apply(
        self, x: "Tensor", ids: "Tensor", weights: "Tensor", num_local: int, packed: Any, is_rounded: bool
    ) -> "Tensor":
        """As Experts.apply, of this rank's part of the tokens, x [P, hidden], P the same on all ranks, and of
        all ranks' experts: ids int64 [P, k], below 0 in all of a row that is no token's, which may come back
        as anything. Each rank has `num_local` experts, in rank order; `packed` are this rank's. With
        `is_rounded` these experts round what they are given to int8, with a scale for each token, so that
        nothing is lost when it travels so."""
        ...


@dataclass(frozen=True, slots=True)
class Exchanges:
    """That of steps with prompts, and that of steps in which every row decodes, which graphs must be able to
    capture."""

    prompts: Exchange
    decodes: Exchange

    def of(self, is_decode: bool) -> Exchange:
        return self.decodes if is_decode else self.prompts
