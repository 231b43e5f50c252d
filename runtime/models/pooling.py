"""What a model makes of a text when it makes no text: a vector, or a number for each of its classes."""

from typing import Literal

from msgspec import Struct

PoolingMode = Literal["last", "mean", "cls"]
Activation = Literal["softmax", "sigmoid", "none"]


class Pooling(Struct, frozen=True, kw_only=True):
    """How the vectors of a text's tokens become one result of `size` numbers."""

    task: Literal["embed", "classify"]
    mode: PoolingMode  # of the tokens' vectors: that of the last one, their mean, that of the first one
    size: int
    is_whole: bool  # a text must be computed in one step, all of it: no chunks, no cached prefixes
    is_normalised: bool = False  # embeddings have length 1
    labels: tuple[str, ...] = ()  # of a classifier's numbers
    activation: Activation = "none"  # what makes probabilities of them
