"""Triton's interpreter, for tests and dry runs of benches on a machine without a GPU. Slow.

It must be chosen before anything imports triton.
"""

import os
import sys
from collections.abc import Callable
from typing import Protocol


class Scope(Protocol):
    """The attributes that triton's interpreter has replaced while a kernel runs."""

    def set_attr(self, owner: object, name: str, value: object) -> None:
        """Replaces an attribute until the kernel has run."""
        ...


def use_interpreter() -> None:
    """Makes kernels that are defined from now on run in numpy."""
    assert "triton.language" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
        "triton has been imported already"
    )
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch: Callable[[object, Scope], None] = interpreter._patch_lang_tensor
    if patch.__module__ == __name__:
        return

    def patch_lang_tensor(tensor: object, scope: Scope) -> None:
        """Gives scalars __index__: numpy 2.4 does not convert arrays of one element, which bounds of loops
        are."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
