"""What all launches share: where kernels run, and the sizes that suit them there.

Kernels run where their tensors are. Without a GPU that is Triton's interpreter (TRITON_INTERPRET=1 before
triton is first imported), which knows bfloat16 as bits only: what enters `tl.dot` is float32 there, and all
other arithmetic is in float32 everywhere.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FP8_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}  # kept as bytes; see narrow.py


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the sizes of tiles and grids depend on."""

    num_cores: int  # multiprocessors
    shared_bytes: int  # that one of them has for all programs on it
    has_fp8: bool = False  # whether its tensor cores take 8-bit floats


INTERPRETER = Gpu(num_cores=4, shared_bytes=1 << 30)  # numpy likes few and large tiles


def gpu_of(torch_device: torch.device) -> Gpu:
    """The GPU behind a torch device."""
    if torch_device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(torch_device)
    return Gpu(
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        (properties.major, properties.minor) >= (8, 9),
    )


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What the matrix products of a kernel over tensors of `dtype` take."""
    return tl.float32 if knobs.runtime.interpret and dtype == torch.bfloat16 else TL_DTYPES[dtype]


def next_power_of_2(number: int, least: int = 1) -> int:
    """The next power of two that is not below it, nor below `least`."""
    return max(least, triton.next_power_of_2(number))
