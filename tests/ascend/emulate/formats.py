"""npu_format_cast: weights in FRACTAL_NZ. Their contents stay in logical order here; torch_npu and the
operators know the format.

A private format is for matrix products, and a view of it only as a transpose. Anything else would have to be
converted back, copy by copy, which the runtime never wants: it is refused.
"""

from typing import Any

import torch
import torch_npu
from torch import Tensor

from tests.ascend.emulate import queue
from tests.ascend.emulate.memory import ND, NZ, format_of, host, leaves, make_private
from tests.ascend.emulate.table import Limits, need, operator

CASTS = ("npu::npu_format_cast", "npu::_npu_format_cast")
READERS = (
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::matmul",
    "aten::linear",
    "aten::baddbmm",
    "aten::addmm_",
    "aten::copy_",
    "aten::_to_copy",
    "aten::clone",
    "npu::npu_prefetch",
)  # a copy converts, which is right for loading
# c0; int32 holds eight int4
LANES = {torch.int8: 32, torch.float16: 16, torch.bfloat16: 16, torch.float32: 16, torch.int32: 8}


@operator(*CASTS)
def cast(x: Tensor, acl_format: int, **more: Any) -> Tensor:
    """On device tensors, unlike the other operators: it makes one."""
    need(all(value is None for value in more.values()), f"not emulated: {more}")
    need(acl_format in (ND, NZ), f"format {acl_format} is not emulated")
    if acl_format == NZ:
        need(x.dim() in (2, 3), f"FRACTAL_NZ: a weight is 2-D or 3-D, not {x.dim()}-D")
        need(x.dtype in LANES, f"FRACTAL_NZ: {x.dtype}")
        check_sizes(x)
    made = torch_npu.empty_with_format(tuple(x.shape), dtype=x.dtype, device=x.device, acl_format=acl_format)
    to, of = host(made), host(x)
    if queue.is_lazy():
        queue.enqueue(lambda: to.copy_(of))
    elif not Limits.no_values:
        to.copy_(of)
    if acl_format == NZ:
        make_private(made)
    return made


def check_sizes(x: Tensor) -> None:
    """k % 16, n % 16 for 16 bits, n % 32 for int8: others are padded by the cast, and refused by the
    quantised products (aclnn documentation of each; vllm-ascend casts only such)."""
    rows, columns = x.shape[-2:]
    lanes = LANES[x.dtype]
    need(
        rows % 16 == 0 and columns % lanes == 0,
        f"FRACTAL_NZ of {x.dtype}: {rows} x {columns} is no multiple of 16 x {lanes}",
    )


def refuse(name: str, given: Any) -> None:
    """torch's own operators on a private format."""
    if name.split(".")[0] in READERS:
        return
    for leaf in leaves(given, []):
        if isinstance(leaf, Tensor):
            need(format_of(leaf) == ND, f"{name} of a tensor in FRACTAL_NZ")
