"""Pooling: from the hidden states of a step's tokens to one vector for each text."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.layers.upload import upload
from runtime.models.config.pooling import PoolingMode


@dataclass(frozen=True, slots=True)
class PoolingMetadata:
    """The rows of a step that are complete with it: their tokens become a result."""

    mode: PoolingMode
    starts: Tensor  # int64 [N]: index of each row's first token in the step
    counts: Tensor  # int64 [N]: tokens of each row

    def select(self, hidden: Tensor) -> Tensor:
        """The last or the first token of each row: [T, hidden] -> [N, hidden]."""
        return hidden.index_select(0, self.starts + self.counts - 1 if self.mode == "last" else self.starts)

    def mean(self, hidden: Tensor) -> Tensor:
        """The mean of each row's tokens: [T, hidden] -> float32 [N, hidden]."""
        rows = torch.repeat_interleave(torch.arange(len(self.counts), device=hidden.device), self.counts)
        offsets = torch.arange(len(rows), device=hidden.device) - (
            self.counts.cumsum(0) - self.counts
        ).repeat_interleave(self.counts)
        tokens = hidden.index_select(0, self.starts.repeat_interleave(self.counts) + offsets).float()
        sums = torch.zeros(len(self.counts), hidden.shape[1], device=hidden.device).index_add_(
            0, rows, tokens
        )
        return sums / self.counts.unsqueeze(1)


def plan_pooling(
    mode: PoolingMode, counts: np.ndarray, rows: np.ndarray, torch_device: torch.device
) -> PoolingMetadata:
    """`counts`: tokens of each row of the step, int64 [R]; `rows`: indices of those that are complete, int64
    [N]."""
    starts = counts.cumsum() - counts
    return PoolingMetadata(mode, upload(starts[rows], torch_device), upload(counts[rows], torch_device))
