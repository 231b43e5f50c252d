"""Imports torch without the parts that only exporting, compiling and training use; they are imported when
something asks for an attribute of them.

`import torch` imports all of torch. A third of its time and 25 MB of memory go to modules that serving never
calls: definitions of operators for tensors without data (the device "meta"), export, quantization-aware
training, data loaders. Each of them becomes a module of importlib.util.LazyLoader, so code that uses one by
its name finds it.

Two things in torch depend on a part without naming it, and fail loudly while it is deferred:
`torch.Generator()`, and operators on tensors of the device "meta" whose definition is written in Python. Who
needs them calls `load_deferred` first. Views, copies and new tensors of that device need nothing. All this
changes with versions of torch, so only those of TRIED are imported this way.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import LazyLoader
from threading import RLock
from types import ModuleType

TRIED = ("2.13",)  # versions with which tests have passed

# what `import torch` imports for its side effects, or to have it as an attribute
DEFERRED = (
    "torch._meta_registrations",  # with torch._decomp, torch._refs and torch._prims
    "torch.ao",
    "torch.distributed._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
)
COMPILERS = ("torch._dynamo", "torch._inductor")  # which find names missing where parts are deferred
_loading = RLock()


class _Deferring(MetaPathFinder):
    """Finds the modules of DEFERRED, to be loaded later."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec whose loader waits for the first attribute that is asked for; None for other modules."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


class _LoadingFirst(MetaPathFinder):
    """Has what is deferred imported before a compiler of torch, by any import of that."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: other finders find it."""
        if fullname in COMPILERS:
            load_deferred()
        return None


@contextmanager
def deferring_torch() -> Iterator[None]:
    """Defers the modules of DEFERRED that are imported meanwhile for the first time, if torch is of a version
    that was tried with it."""
    if not _is_tried():
        yield
        return
    finder = _Deferring()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if deferred():
            sys.meta_path.insert(0, _LoadingFirst())


def deferred() -> list[str]:
    """The modules that are deferred now."""
    return [name for name in DEFERRED if _is_deferred(sys.modules.get(name))]


def load_deferred() -> None:
    """Imports all that is deferred: what depends on it works from then on. Raises ImportError."""
    with _loading:
        for name in deferred():
            vars(import_module(name))


def _is_tried() -> bool:
    try:
        return ".".join(version("torch").split(".")[:2]) in TRIED  # of 2.13.0+cpu
    except PackageNotFoundError:
        return False


def _is_deferred(module: ModuleType | None) -> bool:
    return type(module).__name__ == "_LazyModule"  # the type: to ask for an attribute would load it
