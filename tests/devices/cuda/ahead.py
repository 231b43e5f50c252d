"""Compiles the kernels of some launches for a GPU that is not present: `python -m tests.devices.cuda.ahead 90
attention ...`.

Launches take tensors of the cpu and run nothing; for each compiled kernel a line of JSON has ptxas's report.
This finds what the interpreter cannot: what Triton's compiler refuses, registers that spill, and more shared
memory than a GPU has.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

OPTIONS = ("num_warps", "num_stages")


def signature(
    function: JITFunction, arguments: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[Any, Any]]:
    """Types, constants and divisibility by 16, as a launch on the GPU specialises them."""
    types, constants, facts = {}, {}, {}
    for index, param in enumerate(function.params):
        value = arguments[param.name] if param.name in arguments else param.default
        if (
            param.is_constexpr
            or value is None
            or (isinstance(value, int) and not isinstance(value, bool) and value == 1)
        ):
            types[param.name], constants[(index,)] = "constexpr", value
            continue
        types[param.name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor) or (isinstance(number, int) and number % 16 == 0):
            facts[(index,)] = [["tt.divisibility", 16]]
    return types, constants, facts


def ptxas(ptx: str, arch: int) -> str:
    """ptxas's report on a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        program = Path(nvidia.__file__).parent / "bin" / "ptxas"
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        return subprocess.run(
            [program, "-v", f"--gpu-name={name}", path, "-o", Path(folder, "kernel.o")],
            check=True,
            capture_output=True,
            text=True,
        ).stderr


class Ahead:
    """Compiles each kernel once for each specialisation of its arguments."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.seen: set[str] = set()

    def run(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Compiles a kernel for these arguments and prints a line of JSON."""
        names = [param.name for param in function.params]
        options = {key: value for key, value in kwargs.items() if key in OPTIONS}
        arguments = dict(zip(names, args, strict=False)) | {
            key: value for key, value in kwargs.items() if key in names
        }
        types, constants, facts = signature(function, arguments)
        if (key := repr((function.__name__, types, constants, facts, options))) in self.seen:
            return
        self.seen.add(key)
        source = ASTSource(function, types, constants, facts)
        made = triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options)
        report = ptxas(made.asm["ptx"], self.arch)
        spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", report))
        registers = max(int(count) for count in re.findall(r"Used (\d+) registers", report))
        print(
            json.dumps(
                {
                    "kernel": function.__name__,
                    "arch": self.arch,
                    "registers": registers,
                    "spilled_bytes": spilled,
                    "shared_bytes": made.metadata.shared,
                    **options,
                    "wgmma": "wgmma.mma_async" in made.asm["ptx"],
                    "constants": {
                        names[i]: str(value) for (i,), value in constants.items() if names[i].isupper()
                    },
                }
            ),
            flush=True,
        )


def main() -> None:
    """Compiles the launches that are named, or all."""
    from tests.devices.cuda.launches import GPUS, LAUNCHES

    arch = int(sys.argv[1])
    ahead = Ahead(arch)
    JITFunction.run = lambda self, *args, **kwargs: ahead.run(self, *args, **kwargs)
    for name in sys.argv[2:] or LAUNCHES:
        LAUNCHES[name](GPUS[arch])


if __name__ == "__main__":
    main()
