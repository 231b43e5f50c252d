"""What the event loop and the ranks tell each other of how tokens spread over experts.

A rank counts on its device, for each layer with experts and each of these, the tokens that chose it; steps bring none of it back. Who
wants to know asks, between two steps, and all ranks answer as one: where each has a part of the tokens, counts are summed first.
"""

from typing import Literal

import numpy as np
from msgspec import Struct

Wish = Literal["read", "start", "stop", "dump"]


class CountExperts(Struct, frozen=True, array_like=True, tag="count_experts"):
    """Tell the counts since the ranks started. Before: `start` forgets the record and records from here on, step by step; `stop` ends that;
    `dump` writes what is recorded to a file in the folder, and forgets it. ExpertCounts answers it, from rank 0."""

    id: int
    wish: Wish
    folder: str = ""


class ExpertCounts(Struct, frozen=True, array_like=True, tag="expert_counts"):
    """Tokens of each expert since the ranks started."""

    id: int
    layers: tuple[int, ...]  # of the model, those with experts
    counts: np.ndarray  # int64 [layers * experts]
    num_steps: int  # that the record held
    file: str = ""  # that was written
    error: str = ""  # why none was
