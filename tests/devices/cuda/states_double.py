"""A double of flashinfer.mamba (flashinfer-python 0.7.2): what it is called with is held to its documents,
and what it returns is computed in float64."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """One token of each row; states are changed in place."""
    rows, heads, size = x.shape
    slots, _, _, kept = state.shape
    assert state.dtype in FLOATS and state.shape[1:] == (heads, size, kept) and state.stride(-1) == 1
    assert dt.shape == x.shape and dt.stride(2) == 0, "a step is that of a whole head"
    assert A.dtype == torch.float32 and A.shape == (heads, size, kept) and A.stride()[1:] == (0, 0)
    assert B.shape == C.shape and B.shape[0] == rows and B.shape[2] == kept and heads % B.shape[1] == 0
    assert D.shape == (heads, size) and D.stride(1) == 0
    assert z is None and dt_bias is None and not dt_softplus
    assert state_batch_indices is not None and state_batch_indices.shape == (rows,)
    assert state_batch_indices.dtype in (torch.int32, torch.int64)
    out = torch.empty_like(x)
    for row, slot in enumerate(state_batch_indices.tolist()):
        assert slot != pad_slot_id and 0 <= slot < slots
        for head in range(heads):
            group = head // (heads // B.shape[1])
            time = dt[row, head, 0].double()
            before = state[slot, head].double() * (time * A[head, 0, 0].double()).exp()
            after = before + torch.outer(x[row, head].double() * time, B[row, group].double())
            out[row, head] = after @ C[row, group].double() + x[row, head].double() * D[head, 0].double()
            state[slot, head] = after.to(state.dtype)
    return out


def install(patch: pytest.MonkeyPatch) -> None:
    """In place of the package, for a test."""
    modules = {"flashinfer": {}, "flashinfer.mamba": {"selective_state_update": selective_state_update}}
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
