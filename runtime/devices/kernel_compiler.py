"""Compilation of kernels before they are launched, on devices that compile them at their first launch.
Torch-free."""

from contextlib import AbstractContextManager
from typing import Protocol

from runtime.devices.progress import Progress


class KernelCompiler(Protocol):
    """Compiles kernels ahead."""

    def compiling(self, progress: Progress) -> AbstractContextManager[None]:
        """Within the context, kernels that are launched are compiled and not run, and new tensors are zeros;
        at its end, all of them can be launched without being compiled."""
        ...
