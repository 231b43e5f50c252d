"""Triton's interpreter: what it replaces in triton's language for a kernel."""

from types import ModuleType

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from runtime.devices.cuda.kernels.norm import rms_norm
from tests.devices.cuda.torch_device import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU runs kernels itself")


def functions(module: ModuleType) -> dict[str, object]:
    """What the names of a module mean now."""
    return {name: getattr(module, name) for name in dir(module)}


def test_the_language_is_replaced_for_a_launch_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that calls functions of triton's own (`tl.sum`), in twelve programs."""
    replaced: list[object] = []
    patch = interpreter._patch_builtin

    def counted(owner: object, *others: object) -> None:
        replaced.append(owner)
        patch(owner, *others)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    before = [functions(module) for module in (tl, tl.core, tl.math)]
    x = torch.randn(12, 64)
    out = rms_norm(x, torch.ones(64), 1e-5)
    torch.testing.assert_close(out, x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt())
    # for the kernel, and for the first function of triton's that it calls, which sees both modules
    assert all(1 <= replaced.count(module) <= 2 for module in (tl, tl.core, tl.math))
    assert before == [functions(module) for module in (tl, tl.core, tl.math)]
