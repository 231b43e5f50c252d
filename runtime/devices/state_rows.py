"""The rows of a step as recurrent layers see them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

StateTensors = tuple["Tensor", ...]  # of one layer, each [state slots, ...]
# Writes to state slots, int64 [V], the states of `V` verify rows behind their first tokens, as many as int64
# [V] says.
Advance = Callable[["Tensor", "Tensor"], None]


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """`V` rows of up to `N` tokens that start from the states of their sequences, and leave these as they are
    until it is known how many of the tokens are accepted. For that, each layer appends a function to
    `advances`, which keeps the inputs of these tokens."""

    ranges: tuple[tuple[int, int, int], ...]  # (state slot, begin, count) of each row
    slots: "Tensor"  # int64 [V]: state slots
    places: "Tensor"  # int64 [V, N]: tokens of the step; a row of fewer than N repeats its last one
    tokens: "Tensor"  # int64 [sum of counts]: the tokens of the step, row after row ...
    nodes: "Tensor"  # int64 [sum of counts]: ... and where each is among the V * N
    advances: list[Advance] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where each row finds the states of its sequence, and leaves the new ones.

    Decode rows come first, with one token each. Every other row has `count` tokens from `begin` on in the
    step's line of tokens; they all come after the decode rows.
    """

    tensors: list[StateTensors]  # of each recurrent layer
    decodes: "Tensor"  # int64 [D]: state slots of the decode rows
    extends: tuple[tuple[int, int, int], ...] = ()  # (state slot, begin, count) of rows that are not verified
    verifies: VerifyRows | None = None  # rows whose drafts may be refused; None: there are none
