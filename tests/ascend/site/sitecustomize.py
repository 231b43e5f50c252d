"""Python imports this at start, in every process that tests.ascend.simulate begot: what imports torch_npu
gets the simulation with it."""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


class WithSimulation(importlib.abc.Loader):
    """Loads torch_npu between the libraries that it needs and the emulation of what they would compute."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Default."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module between loading the libraries and starting the emulation."""
        libraries = Path(os.environ["SIM_CANN_LIBRARIES"])
        for path in (libraries / "libascendcl.so", *sorted(libraries.glob("*.so"))):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self._loader.exec_module(module)
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))
        from tests.ascend.emulate.device import HostNpu

        HostNpu.install()
        HostNpu().__enter__()  # a dispatch mode is a thread's: this one, and each that starts from now on
        start = threading.Thread.start

        def start_with_device(thread: threading.Thread) -> None:
            work = thread.run

            def run() -> None:
                with HostNpu():
                    work()

            thread.run = run  # type: ignore[method-assign]
            start(thread)

        threading.Thread.start = start_with_device  # type: ignore[method-assign]


class Finder(importlib.abc.MetaPathFinder):
    """Finds torch_npu only, where it would be found anyhow."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of torch_npu, with this loader."""
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = WithSimulation(spec.loader)
        return spec


if "SIM_CANN_LIBRARIES" in os.environ:
    sys.meta_path.insert(0, Finder())
