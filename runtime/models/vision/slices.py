"""Encoders that stop on the way: what encodes yields behind each layer, so that steps of sequences that
decode can be computed in between (scheduling/encodings.py decides where).

What is yielded is the part of the whole work that is done, from 0 to 1, by the sizes of what layers do.
Between two yields nothing but the generator holds what was computed; closing it frees that.
"""

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

from torch import Tensor

Result = TypeVar("Result")
Slices = Generator[float, None, Result]


class TowerLayer(Protocol):
    """A block of a tower."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """x [B, L, size] -> the same."""
        ...


def finish(slices: Slices[Result]) -> Result:
    """Computes to the end. -> what comes of it"""
    try:
        while True:
            next(slices)
    except StopIteration as end:
        found: Result = end.value
        return found


def through(layers: Sequence[TowerLayer], x: Tensor, *others: Tensor) -> Slices[Tensor]:
    """Through layers of equal work, which take `others` besides. -> as the last one gives it"""
    for index, layer in enumerate(layers):
        x = layer.forward(x, *others)
        yield (index + 1) / len(layers)
    return x


def within(slices: Slices[Result], begin: float, end: float) -> Slices[Result]:
    """What is the part from `begin` to `end` of a larger whole."""
    try:
        while True:
            yield begin + (end - begin) * next(slices)
    except StopIteration as last:
        found: Result = last.value
        return found


def parts_done(works: Sequence[float]) -> list[float]:
    """The part of the whole that is done behind each of these works, from 0 to 1."""
    done = list(accumulate(works))
    return [one / done[-1] for one in done]


def layer_work(count: int, size: int, attended: int) -> float:
    """Work of a layer of `size` on `count` patches, each of which attends to `attended` ones: 12 * size
    products of `size` numbers for projections and feed-forward, and 2 for each patch that is attended to."""
    return count * (12.0 * size + 2.0 * attended)
