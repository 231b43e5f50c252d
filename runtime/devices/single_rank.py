"""Of a model with one rank, which has nobody to exchange with."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class SingleRank:
    """The collectives of a single rank: every exchange gives back what it got."""

    rank = 0
    size = 1

    def all_reduce(self, x: "Tensor") -> "Tensor":
        return x

    def all_gather(self, x: "Tensor", dim: int) -> "Tensor":
        return x

    def reduce_scatter(self, x: "Tensor") -> "Tensor":
        return x

    def all_to_all(
        self, x: "Tensor", sent: list[int] | None = None, came: list[int] | None = None
    ) -> "Tensor":
        return x

    def broadcast(self, x: "Tensor") -> "Tensor":
        return x

    def outcomes(self, mine: str) -> list[str]:
        return [mine]

    def close(self) -> None:
        return None
