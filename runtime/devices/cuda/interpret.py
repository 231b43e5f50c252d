"""Triton's interpreter, for tests and dry runs of benches on a machine without a GPU. Slow.

It must be chosen before anything imports triton.
"""

import os
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Protocol

LANGUAGE = ("triton.language", "triton.language.core")


class Scope(Protocol):
    """The attributes that triton's interpreter has replaced while a kernel runs."""

    def set_attr(self, owner: object, name: str, value: object) -> None:
        """Replaces an attribute until the kernel has run."""
        ...

    def restore(self) -> None:
        """Puts back all that was replaced."""
        ...


class LaunchScope:
    """What a launched kernel has replaced in triton's language, by `patch`, for the functions that it calls.

    The interpreter patches the language at every call between functions of a kernel, which takes a third of
    its time and is never undone."""

    def __init__(self, patch: Callable[[FunctionType], Scope]) -> None:
        self._patch = patch
        self._scopes: list[Scope] = []
        self._patched: set[str] = set()

    def enter(self, function: FunctionType) -> "LaunchScope":
        """Patches those modules of the language that `function` uses and no caller has patched."""
        used = function.__globals__.values()
        modules = {name for name in LANGUAGE if any(value is sys.modules[name] for value in used)}
        if not self._scopes or not modules <= self._patched:
            self._scopes.append(self._patch(function))
            self._patched |= modules
        return self

    def restore(self) -> None:
        """Puts everything back: the kernel has run."""
        self._patched.clear()
        while self._scopes:
            self._scopes.pop().restore()


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
    interpreter._patch_lang = LaunchScope(interpreter._patch_lang).enter
