"""Triton without a GPU: it binds, specialises and names kernels as for a card, and compiled kernels run
nothing."""

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Driver:
    """What a launch asks of Triton's driver."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class Nothing:
    """A compiled kernel that runs nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        pass


# kernel, signature, constants by place, attributes by place, options
Compile = Callable[[JITFunction, dict[str, str], dict[Any, Any], dict[Any, Any], Any], None]


def install(arch: int, compile: Compile) -> None:
    """Makes Triton call `compile` for each variant of a kernel that it would compile, once."""

    def do_compile(
        kernel: JITFunction,
        key: Any,
        signature: dict[str, str],
        device: int,
        constexprs: dict[Any, Any],
        options: Any,
        attrs: dict[Any, Any],
        warmup: bool,
    ) -> Nothing:
        compile(kernel, signature, constexprs, attrs, options)
        kernel.device_caches[device][0][key] = found = Nothing()
        return found

    driver.set_active(Driver(arch))
    JITFunction._do_compile = do_compile
