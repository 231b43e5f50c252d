"""What a step has sampled, before it is reported."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from runtime.layers.sampling.sampler import Logprobs
from runtime.ranks.sample_rows import SampleRows


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step has sampled, on the device."""

    tokens: Tensor  # int64 [N], after each place where the step samples
    logprobs: Logprobs | None  # of these tokens; None: not asked for
    rows: SampleRows | None  # where that is; None: after each row of a captured step
    # of verify rows, int64 [V] and [V, C]: how much is accepted and which nodes; None: no such rows, or
    # chains
    num_accepted: Tensor | None = None
    path: Tensor | None = None
    # of a captured verify step: N / R, and `num_accepted` is of all R rows; 0: of no such step
    width: int = 0

    def accepted(self, num: np.ndarray, path: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """`num_accepted` and `path` on the host -> int64: places among the N whose tokens the step brings, in
        order, and how many of them each row that samples has."""
        if self.rows is not None:
            return self.rows.accepted(num, path)
        columns = np.arange(self.width)
        return np.flatnonzero(columns < num[:, None]), num
