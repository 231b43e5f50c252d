"""Sums over ranks that the norm behind them makes itself, of few rows (kernels/sum_norm.py): the memory of all
GPUs of a model through which they go (torch.distributed._symmetric_memory)."""

import torch
from torch import Tensor

from runtime.devices.cuda.kernels.activation_quantization import RowCodes
from runtime.devices.cuda.kernels.launch import launch_options, next_power_of_2
from runtime.devices.cuda.kernels.norm import add_rms_norm, num_warps_for
from runtime.devices.cuda.kernels.sum_norm import sum_rms_norm_kernel
from runtime.devices.operands import NormInputs

ROWS = 64  # the most rows, each of which is a program that waits for the same one of all other ranks
ROW_BYTES = 32 << 10  # the most of a row
MOST_BYTES = 256 << 10  # of all rows: of more, every rank would read too much
FLAG_BYTES = 4 << 10
MOST_RANKS = FLAG_BYTES // 4 // ROWS
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class NormSums:
    """One rank's memory, and where that of all ranks is."""

    def __init__(self, buffer: Tensor, addresses: list[int], rank: int, others: object = None) -> None:
        """`buffer`: this rank's, all zeros; `addresses`: of all ranks' buffers, as this rank reads them;
        `others`: what keeps those of others there."""
        self.buffer = buffer
        self.others = others
        self.rank = rank
        self.size = len(addresses)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=buffer.device)
        self.turns = torch.zeros(ROWS, dtype=torch.int32, device=buffer.device)

    @staticmethod
    def num_bytes() -> int:
        """How large a buffer is."""
        return FLAG_BYTES + 2 * ROWS * ROW_BYTES

    @classmethod
    def open(cls, group: str, rank: int, size: int, torch_device: torch.device) -> "NormSums":
        """Called by all ranks of the group. Raises RuntimeError where the GPUs cannot read each other's
        memory, or are too many."""
        if size > MOST_RANKS:
            raise RuntimeError(f"{size} ranks, and norms sum those of {MOST_RANKS}")
        from torch.distributed import _symmetric_memory

        buffer = _symmetric_memory.empty(cls.num_bytes(), dtype=torch.uint8, device=torch_device)
        buffer.zero_()
        torch.cuda.synchronize(torch_device)  # before another rank can know the memory
        handle = _symmetric_memory.rendezvous(buffer, group)
        offset = buffer.data_ptr() - handle.buffer_ptrs[rank]
        return cls(buffer, [pointer + offset for pointer in handle.buffer_ptrs], rank, handle)

    def check(self) -> None:
        """Sums and norms numbers that all ranks know, in both places. Raises RuntimeError for a wrong
        result."""
        for dtype in DTYPES:
            pattern = (torch.arange(2 * 512, device=self.buffer.device) % 7).view(2, 512)
            weight = torch.ones(512, dtype=dtype, device=self.buffer.device)
            for turn in range(2):
                # small integers, which all dtypes hold exactly
                parts = [(pattern + turn + rank).to(dtype) for rank in range(self.size)]
                residual = (pattern % 3).to(dtype)
                summed = torch.stack(parts).sum(0)
                wanted = add_rms_norm(summed, residual.clone(), weight, 1e-6)
                found = self.add(NormInputs(parts[self.rank], residual, weight, 1e-6), None, early=False)
                if not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)):
                    raise RuntimeError(f"a norm of a sum in {dtype} was wrong")

    def takes(self, inputs: NormInputs) -> bool:
        """Whether the sum of all ranks' x goes through this memory: the same on all of them."""
        x, residual = inputs.x, inputs.residual
        row_bytes = x.shape[1] * x.itemsize
        is_small = 0 < len(x) <= ROWS and row_bytes <= ROW_BYTES and x.nbytes <= MOST_BYTES
        is_held = x.stride(1) == residual.stride(1) == 1 and row_bytes % 16 == 0
        return is_small and is_held and x.dtype in DTYPES and not torch.compiler.is_compiling()

    def add(self, inputs: NormInputs, quantized: RowCodes | None, *, early: bool) -> tuple[Tensor, Tensor]:
        """kernels/norm.py's add_rms_norm of the sum over ranks of x; overwrites the residual."""
        x, residual, weight, eps = inputs
        out, block = x.new_empty(x.shape), next_power_of_2(x.shape[1], 16)
        sum_rms_norm_kernel[(len(x),)](
            x,
            residual,
            out,
            weight,
            out if quantized is None else quantized.codes,
            out if quantized is None else quantized.scales,
            self.addresses,
            self.turns,
            self.rank,
            x.stride(0),
            residual.stride(0),
            0 if quantized is None else quantized.scales.shape[1],
            eps,
            SIZE=x.shape[1],
            BLOCK=block,
            RANKS=self.size,
            ROWS=ROWS,
            FLAG_BYTES=FLAG_BYTES,
            ROW_BYTES=ROW_BYTES,
            KIND="" if quantized is None else quantized.kind,
            GROUP=0 if quantized is None else quantized.group,
            EARLY=early,
            num_warps=num_warps_for(block),
            **launch_options(early=early),
        )
        return out, residual
