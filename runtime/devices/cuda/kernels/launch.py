"""What all kernel launches share: facts about the GPU, and dtypes and sizes of kernels.

Kernels run where their tensors are. Without a GPU that is Triton's interpreter (TRITON_INTERPRET=1 before
triton is first imported), which knows bfloat16 as bits only: operands of `tl.dot` are float32 there, and all
other arithmetic is float32 everywhere.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FP8_KINDS = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}  # read and written as bytes; see fp8_bytes.py


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the sizes of tiles and grids depend on."""

    num_cores: int  # multiprocessors
    shared_bytes: int  # shared memory of a multiprocessor, for all programs on it
    has_fp8: bool = False  # whether tensor cores multiply 8-bit floats
    starts_early: bool = False  # whether kernels start before those ahead of them have ended
    is_hopper: bool = False  # compute capability 9
    has_block_scales: bool = False  # whether cuBLAS multiplies 8-bit floats with scales of blocks


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
        is_hopper=properties.major == 9,
        has_block_scales=properties.major == 9,
    )


def starts_early(gpu: Gpu) -> bool:
    """Whether a launch on this GPU may start early; the interpreter knows nothing of it."""
    return gpu.starts_early and not knobs.runtime.interpret


def launch_options(*, early: bool) -> dict[str, bool]:
    """Triton's options of a launch that may start early."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def await_inputs(EARLY: tl.constexpr) -> None:
    """Lets the next kernel start as soon as there is room for it, and waits for those ahead. Where kernels do
    not start early, nothing."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The dtype of operands of `tl.dot` in a kernel over tensors of `dtype`."""
    return tl.float32 if knobs.runtime.interpret and dtype == torch.bfloat16 else TL_DTYPES[dtype]


def next_power_of_2(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and `least`."""
    return max(least, triton.next_power_of_2(number))
