"""How an attention layer makes weights of the products of queries and keys. Torch-free."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Always true of a layer: softmax over what is seen of cap(scale * product), in the order of the
    fields."""

    scale: float
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0: all of them
    cap: float = 0.0  # scores become cap * tanh(score / cap) (Gemma-2, 2024); 0: they stay
    # float32 [H]: a logit that takes part in each head's sum and adds nothing (Xiao et al., 2023)
    sinks: "Tensor | None" = None
