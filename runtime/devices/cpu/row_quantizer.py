"""Plain rows of a checkpoint rounded to 8 or 4 bits by all threads, while weights are loaded."""

from torch import Tensor

from runtime.devices.cpu.matrices import NUMBERS, Threads

MAX_GROUP = 256  # quantize::PART of kernels/quantize.h


class CpuRowQuantizer:
    """See RowQuantizer."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads

    def quantize(self, values: Tensor, group: int, codes: Tensor, scales: Tensor) -> bool:
        """See RowQuantizer.quantize."""
        inputs = values.shape[1]
        fits = values.dtype in NUMBERS and codes.is_contiguous() and scales.is_contiguous()
        if not fits or (group and (group > MAX_GROUP or group % 2 or inputs % 2)):
            return False
        rows = values.contiguous()
        self.threads.functions.kernels_quantize(
            self.threads.handle,
            NUMBERS[rows.dtype],
            rows.data_ptr(),
            len(rows),
            inputs,
            group,
            codes.data_ptr(),
            scales.data_ptr(),
        )
        return True
