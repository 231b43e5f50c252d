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
    has_nan: Tensor | None = None  # bool [N], of the logits at each place; None: not looked for
    # of a captured verify step: N / R, and `num_accepted` is of all R rows; 0: of no such step
    width: int = 0

    def with_nan(self, has_nan: np.ndarray) -> list[int]:
        """The rows, of those that sample, whose logits have a NaN at one of their places; `has_nan` on the
        host."""
        assert self.rows is not None, "captured steps are not looked at"
        return np.flatnonzero(np.logical_or.reduceat(has_nan, self.rows.first_rows())).tolist()

    def accepted(self, num: np.ndarray, path: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """`num_accepted` and `path` on the host -> int64: places among the N whose tokens the step brings, in
        order, and how many of them each row that samples has."""
        if self.rows is not None:
            return self.rows.accepted(num, path)
        columns = np.arange(self.width)
        return np.flatnonzero(columns < num[:, None]), num
