"""Where the experts of a mixture-of-experts (MoE) model lie, and commands that move them.

A layer's experts have *places*, in equal runs on the groups of ranks (--ep-size): with 8 experts, 2 copies
more and 2 groups, places 0 to 4 are on the first group and 5 to 9 on the second. A layer's placement names
the expert of each place; every expert has one place or more.
"""

from typing import Literal

from msgspec import Struct

Placement = tuple[int, ...]  # of one layer: the expert of each place
Dispatch = Literal["static", "dynamic", "fake"]


class ExpertPlaces(Struct, frozen=True, array_like=True):
    """The placements of a model whose experts have copies, or may move."""

    num_copies: int = 0  # places beyond one for each expert, in each layer
    dispatch: Dispatch = "static"  # how tokens choose among the copies of an expert
    # by index of the layer in the model; layers that are not in it have `in_order`
    layers: dict[int, Placement] = {}

    def of_layer(self, index: int, num_experts: int) -> Placement:
        """The placement of one layer."""
        return self.layers.get(index) or in_order(num_experts, num_experts + self.num_copies)


def in_order(num_experts: int, num_places: int) -> Placement:
    """All experts in order, and as many copies behind them as there are further places: of expert 0 first."""
    return tuple(place % num_experts for place in range(num_places))


class ReadExperts(Struct, frozen=True, array_like=True, tag="read_experts"):
    """Read the weights of experts that these placements bring to this rank, while steps run; replaces what
    was read before. ExpertsPlaced answers it, from all ranks."""

    id: int
    layers: dict[int, Placement]


class MoveExperts(Struct, frozen=True, array_like=True, tag="move_experts"):
    """Take the placements that were read into use, between two steps. ExpertsPlaced answers it, from all
    ranks."""

    id: int


class ExpertsPlaced(Struct, frozen=True, array_like=True, tag="experts_placed"):
    """A rank has done what ReadExperts or MoveExperts says, or cannot."""

    id: int
    rank: int
    error: str = ""  # empty: it is done
