"""A serving runtime for large language models. As a library: `runtime.Engine`, `runtime.LLM`, `runtime.asgi`
(see engine.py)."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.engine import LLM, Answer, Engine, asgi

__version__ = "0.1.0"
__all__ = ["LLM", "Answer", "Engine", "asgi"]


def __getattr__(name: str) -> object:
    """Imports the library when one of its names is used, so that `runtime --help` and the ranks need not."""
    if name in __all__:
        return getattr(import_module("runtime.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
