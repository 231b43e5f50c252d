"""Collectives of a model with a single rank. Torch-free at run time."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class SingleRank:
    """Collectives (devices/base.py) of one rank: each returns its argument."""

    rank = 0
    size = 1
    meanwhile: "Callable[[], None] | None" = None

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """`x` itself."""
        return x

    def all_gather(self, x: "Tensor", dim: int) -> "Tensor":
        """`x` itself."""
        return x

    def reduce_scatter(self, x: "Tensor") -> "Tensor":
        """`x` itself."""
        return x

    def all_to_all(
        self, x: "Tensor", sent: list[int] | None = None, received: list[int] | None = None
    ) -> "Tensor":
        """`x` itself."""
        return x

    def broadcast(self, x: "Tensor") -> "Tensor":
        """`x` itself."""
        return x

    def outcomes(self, mine: str) -> list[str]:
        """This rank's outcome alone."""
        return [mine]

    def close(self) -> None:
        """Nothing to end."""
