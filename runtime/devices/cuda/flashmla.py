"""FlashMLA over pages of latents: `--attention-backend flashmla`, the package flash_mla of
deepseek-ai/FlashMLA, written by its source at commit 9241ae3.

Its dense decode kernel is for compute capability 9, pages of 64 tokens, latents of 512 and rotary parts of 64
numbers in the dtype of queries, one or several queries for each row. (Its pages of 8 bits are for sparse
attention, and its kernels of prompts for compute capability 10.) The first call of a step schedules the rows
on the device, by their lengths there, so a captured step schedules itself at each replay.
"""

import torch
from torch import Tensor

from runtime.devices.cuda.absorbed import LatentBackend, LatentRows
from runtime.devices.cuda.kernels.launch import Gpu


class FlashMlaBackend(LatentBackend[object]):
    """flash_mla_with_kvcache; a schedule is its FlashMLASchedMeta."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        # its name is new: packages whose schedules are two tensors have none
        from flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_with_kvcache

        def absorbed(q: Tensor, pages: Tensor, rows: LatentRows[object], scale: float) -> Tensor:
            found: Tensor = flash_mla_with_kvcache(
                q,
                pages.unsqueeze(2),
                rows.table,
                rows.lengths,
                512,
                rows.schedule,
                softmax_scale=scale,
                causal=rows.count > 1,
            )[0]
            return found

        self.gpu = gpu
        self.absorbed = absorbed
        self._schedule: type = FlashMLASchedMeta

    def open_schedule(self) -> object:
        """A schedule that the first call makes."""
        return self._schedule()
