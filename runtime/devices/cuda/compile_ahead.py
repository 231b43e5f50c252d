"""Compiles the variants of Triton kernels before they are launched, many at a time.

Triton compiles a kernel when it is first launched with other constants, dtypes or alignments of its
arguments. That takes about a second, and the stream stands still meanwhile. Triton keeps what it has compiled
on disk (TRITON_CACHE_DIR), so a later start only loads it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode, FutureKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from runtime.devices.cores import usable_cores
from runtime.devices.cuda.options import CudaOptions
from runtime.devices.progress import Gauge, Progress

MOST_THREADS = 16
aten = torch.ops.aten
ALLOCATIONS = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


class ZeroedMemory(TorchDispatchMode):
    """New memory is zeros: results of kernels that are not run are then valid ids and finite numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found.zero_() if function.overloadpacket in ALLOCATIONS else found


class Variants:
    """Compiles each variant of a kernel that is launched once, and launches nothing."""

    def __init__(self) -> None:
        self.launch = JITFunction.run
        self.seen: set[Any] = set()
        # compiled kernels, and those that are being compiled
        self.kernels: list[Any] = []

    def compile(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """In place of JITFunction.run."""
        binder = kernel.device_caches[driver.active.get_current_device()][-1]
        _, specialization, options = binder(*args, **kwargs)
        variant = kernel, tuple(specialization), str(options)
        if variant not in self.seen:
            self.seen.add(variant)
            self.kernels.append(self.launch(kernel, *args, grid=grid, warmup=True, **kwargs))

    def load(self, threads: Executor, progress: Progress) -> None:
        """Waits for all of them and loads them to the GPU. Raises what Triton raised for one of them."""
        gauge = Gauge(progress, "profile", len(self.kernels))
        for _ in threads.map(_launcher, self.kernels):
            gauge.add(1)


def _launcher(kernel: Any) -> Any:
    """The launcher of a kernel that is compiled or being compiled; Triton makes it, and loads the kernel,
    when it is first read."""
    return (kernel.result() if isinstance(kernel, FutureKernel) else kernel).run


class TritonCompiler:
    """KernelCompiler (devices/base.py) of Triton's kernels."""

    def __init__(self, num_threads: int, enter_thread: Callable[[], None]) -> None:
        """`enter_thread`: called in each thread before it compiles."""
        self.num_threads = num_threads
        self.enter_thread = enter_thread

    @contextmanager
    def compiling(self, progress: Progress) -> Iterator[None]:
        """See KernelCompiler.compiling."""
        variants = Variants()

        def compile(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
            variants.compile(kernel, *args, **kwargs)

        pool = ThreadPoolExecutor(self.num_threads, "compile", self.enter_thread)
        with pool as threads, AsyncCompileMode(threads):
            JITFunction.run = compile
            try:
                with ZeroedMemory():
                    yield
            finally:
                JITFunction.run = variants.launch
            variants.load(threads, progress)


def open_compiler(
    options: CudaOptions, torch_device: torch.device, ranks_on_machine: int
) -> TritonCompiler | None:
    """The compiler of a rank, which has its share of the machine's cores; None with flex_attention, whose
    kernels torch compiles, and not where new memory is zeros."""
    if "flex_attention" in (options.prefill_attention_backend, options.decode_attention_backend):
        return None
    num_threads = max(1, min(MOST_THREADS, usable_cores() // ranks_on_machine))
    return TritonCompiler(num_threads, partial(torch.cuda.set_device, torch_device))
