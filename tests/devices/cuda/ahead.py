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

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.devices.cuda import no_gpu


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
    """Compiles each variant of a kernel, and prints a line of JSON for it."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def compile(
        self,
        kernel: JITFunction,
        signature: dict[str, str],
        constants: dict[Any, Any],
        attributes: dict[Any, Any],
        options: Any,
    ) -> None:
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options.__dict__)
        report = ptxas(made.asm["ptx"], self.arch)
        spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", report))
        registers = max(int(count) for count in re.findall(r"Used (\d+) registers", report))
        print(
            json.dumps(
                {
                    "kernel": kernel.__name__,
                    "arch": self.arch,
                    "registers": registers,
                    "spilled_bytes": spilled,
                    "shared_bytes": made.metadata.shared,
                    "num_warps": options.num_warps,
                    "num_stages": options.num_stages,
                    "wgmma": "wgmma.mma_async" in made.asm["ptx"],
                    "constants": {
                        kernel.arg_names[i]: str(value)
                        for (i,), value in constants.items()
                        if kernel.arg_names[i].isupper()
                    },
                }
            ),
            flush=True,
        )


def main() -> None:
    """Compiles the launches that are named, or all."""
    from tests.devices.cuda.launches import GPUS, LAUNCHES

    arch = int(sys.argv[1])
    no_gpu.install(arch, Ahead(arch).compile)
    for name in sys.argv[2:] or LAUNCHES:
        LAUNCHES[name](GPUS[arch])


if __name__ == "__main__":
    main()
