"""The table of emulated operators, and how one refuses a call.

An operator is a function of CPU tensors with the arguments of torch_npu's own schema. It checks what CANN
documents and what torch_npu's shape functions let pass:

    need          what the host can see: dtypes, shapes, layouts, lists. CANN refuses such a call.
    need_values   values in device memory: page ids, slots, expert ids. The kernels do not check them, and a
                  wrong value reads or writes other memory, so the emulation checks. While only shapes are
                  computed (in a capture, in a queue) there are no values, and nothing is checked.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Operator = Callable[..., Any]
OPERATORS: dict[str, Operator] = {}  # "npu::npu_rms_norm", or "npu::npu_x.overload"


class Refused(RuntimeError):
    """A call that CANN documents as wrong, or one that would read or write outside its tensors."""


class _Shapes(threading.local):
    only = False  # no values: blank tensors stand for the device's


_shapes = _Shapes()


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Registers the emulation of these operators."""

    def keep(function: Operator) -> Operator:
        for name in names:
            assert name not in OPERATORS, name
            OPERATORS[name] = function
        return function

    return keep


def need(holds: object, why: str) -> None:
    """Raises Refused unless it holds."""
    if not holds:
        raise Refused(why)


def need_values(holds: Callable[[], Tensor | bool], why: str) -> None:
    """The same for what depends on values."""
    if not _shapes.only and not bool(holds()):
        raise Refused(why)


def need_dtype(name: str, tensor: Tensor, *dtypes: Any) -> None:
    """Raises Refused for other dtypes."""
    need(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not one of {[str(dtype) for dtype in dtypes]}")


def need_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """None stands for any size."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, size) for size, want in zip(tensor.shape, shape, strict=True)
    )
    need(fits, f"{name} is {tuple(tensor.shape)}, not {shape}")


def need_contiguous(**tensors: Tensor | None) -> None:
    """Raises Refused for tensors that are not contiguous."""
    for name, tensor in tensors.items():
        need(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")


def need_unused(**arguments: Any) -> None:
    """Arguments whose effect is not emulated."""
    given = [name for name, value in arguments.items() if value not in (None, 0, False, "")]
    need(not given, f"not emulated: {given}")


def shapes_only() -> bool:
    """Whether values are absent, so that only shapes count."""
    return _shapes.only


@contextmanager
def only_shapes() -> Iterator[None]:
    """Computes shapes alone within the block."""
    before, _shapes.only = _shapes.only, True
    try:
        yield
    finally:
        _shapes.only = before


class Limits:
    """`strict`: also what only a full-size model can keep to: no fp32, and head sizes of real models. Off,
    tiny models in fp32 run, whose tokens can be compared with the CPU's: tests that are marked `lenient`.
    `no_values`: only what is called counts."""

    strict = os.environ.get("SIM_NPU_STRICT", "1") == "1"
    # nothing is computed: tensors have no memory of their own
    no_values = os.environ.get("SIM_NPU_SHAPES") == "1"


def need_strictly(holds: object, why: str) -> None:
    """Raises Refused unless it holds, in strict mode."""
    if Limits.strict:
        need(holds, why)


def need_half(**tensors: Tensor | None) -> None:
    """float16 or bfloat16; float32 where limits are not strict."""
    halves = (
        (torch.float16, torch.bfloat16) if Limits.strict else (torch.float16, torch.bfloat16, torch.float32)
    )
    for name, tensor in tensors.items():
        if tensor is not None:
            need_dtype(name, tensor, *halves)
