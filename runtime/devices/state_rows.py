"""The rows of a step as recurrent layers see them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

StateTensors = tuple["Tensor", ...]  # of one layer, each [state slots, ...]


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where each row finds the states of its sequence, and leaves the new ones.

    Decode rows come first, with one token each. Every other row has `count` tokens from `begin` on in the
    step's line of tokens; they all come after the decode rows.
    """

    tensors: list[StateTensors]  # of each recurrent layer
    decodes: "Tensor"  # int64 [D]: state slots of the decode rows
    extends: tuple[tuple[int, int, int], ...] = ()  # (state slot, begin, count) of the other rows
