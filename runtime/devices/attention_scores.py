"""How an attention layer turns products of queries and keys into weights. Torch-free at run time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Parameters of a layer's attention: weights are softmax(cap(scale * product) - slope * distance) over
    the visible tokens, where the distance is that of a key's position from the query's."""

    scale: float
    window: int = 0  # sliding window: a token sees itself and the window - 1 tokens before it; 0: all of them
    cap: float = 0.0  # scores become cap * tanh(score / cap) (Gemma-2, 2024); 0: no cap
    # float32 [H]: a logit in each head's softmax that has no value (attention sink, Xiao et al., 2023)
    sinks: "Tensor | None" = None
    # float32 [H]: linear biases by distance (ALiBi, Press et al., 2022); of layers without a window.
    # None: 0 for each head
    slopes: "Tensor | None" = None
