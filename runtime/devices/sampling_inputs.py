"""What a device needs to know to sample tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.devices.facts import ANY_K

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How to sample a token from each of `N` rows of logits; tensors [N] on the device."""

    temperature: "Tensor"  # float32; 0: the token of the largest logit
    top_p: "Tensor"  # float32
    top_k: "Tensor"  # int64; 0: no limit
    min_p: "Tensor"  # float32
    uniform: "Tensor"  # float64 in [0, 1): the row's random number
    largest_k: int = ANY_K  # an upper bound of the rows' top_k, known on the host; 0: no row has a top_k
    has_top_p: bool = True  # False: no row has a top_p below 1
    # float32 [N, 3]: temperature, top_p and min_p, and int32 [N]: top_k or the size of the vocabulary, where
    # the device has made them together
    settings: "Tensor | None" = None
    bounds: "Tensor | None" = None
