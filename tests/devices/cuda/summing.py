"""The cpu device with the norms of the cuda device that sum what ranks have parts of: a double for ranks
without cards. Files that all ranks map stand for the memory that GPUs share; their kernels run in the
interpreter."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device as open_cpu
from runtime.devices.cpu.facts import FACTS as FACTS
from runtime.devices.cuda.interpret import use_interpreter
from runtime.devices.operands import NormInputs
from runtime.layers.fused_ops import UnfusedOps
from runtime.messages.ranks import StartRank

use_interpreter()
from runtime.devices.cuda.norm_sums import NormSums  # noqa: E402

MOST_ROWS = 1  # of longer steps ranks sum before the norm


def open_sums(folder: Path, rank: int, size: int) -> NormSums:
    """What NormSums.open gives on GPUs. `folder`: of the ranks' files, zeros at first."""
    buffers = [
        torch.from_file(f"{folder}/{i}", shared=True, size=NormSums.num_bytes(), dtype=torch.uint8)
        for i in range(size)
    ]
    return NormSums(buffers[rank], [buffer.data_ptr() for buffer in buffers], rank, buffers)


class SummingOps(UnfusedOps):
    """Operators of the cpu, and norms that sum few rows."""

    sums_ranks = True

    def __init__(self, device: Device, sums: NormSums, calls: Path) -> None:
        """`calls`: a file with a line for each call, its number of rows."""
        super().__init__(device.ops)
        self.sums = sums
        self.calls = calls

    def add_rms_norm_of_ranks(self, inputs: NormInputs, feeds: object) -> tuple[Tensor, Tensor] | None:
        with self.calls.open("a") as file:
            file.write(f"{len(inputs.x)}\n")
        if len(inputs.x) > MOST_ROWS or not self.sums.takes(inputs):
            return None
        return self.sums.add(inputs, None, early=False)


def open_device(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
    """The cpu of a rank whose norms sum."""
    device = open_cpu(start, rank, dtype)
    folder = Path(start.rendezvous + " memory")
    folder.mkdir(exist_ok=True)
    ops = SummingOps(device, open_sums(folder, rank, start.tp_size), folder / f"calls of {rank}")
    return replace(device, fused=ops, programs=None, logits_ops=None, row_quantizer=None)
