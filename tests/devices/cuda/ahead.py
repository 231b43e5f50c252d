"""Compiles the kernels of some launches for a GPU that is not present: `python -m tests.devices.cuda.ahead 90
attention ...`.

Launches take tensors of the cpu and run nothing; for each compiled kernel a line of JSON has what a program
of it takes and what its machine code counts. This finds what the interpreter cannot: what Triton's compiler
refuses, registers that spill, more shared memory than a GPU has, and loops that have become longer.
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
from triton.runtime.jit import JITFunction

from tests.devices.cuda import no_gpu

BIN = Path(nvidia.__file__).parent / "bin"
# tensor cores' products in machine code: of warps (HMMA, IMMA, QMMA) and of groups of warps (HGMMA ...)
EARLY = ("wait", "launch_dependents")
PRODUCT = re.compile(r"\b[HIQ]G?MMA\b")


def output_of(tool: str, option: str, cubin: bytes) -> str:
    """What a tool of Triton's prints on a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [BIN / tool, option, file.name], check=True, capture_output=True, text=True
        ).stdout


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, which is where registers spill."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", output_of("cuobjdump", "-res-usage", cubin))
    assert found is not None
    return int(found[1]), int(found[2])


def loops(code: str) -> list[int]:
    """Instructions of each innermost loop with products of the tensor cores, the shortest first: of
    nvdisasm's lines, those between a label and a branch back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    found: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            branch = re.search(r"\bBRA(?:\.\w+)* .*`\((\.L_x_\d+)\)", instruction[1])
            if branch and branch[1] in labels:
                found.append((labels[branch[1]], len(instructions)))
    inner = [
        (begin, end)
        for begin, end in found
        if not any(begin <= low and high <= end and (low, high) != (begin, end) for low, high in found)
    ]
    return sorted(
        end - begin
        for begin, end in inner
        if any(PRODUCT.search(instruction) for instruction in instructions[begin:end])
    )


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
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options.__dict__)
        ptx, cubin = made.asm["ptx"], made.asm["cubin"]
        registers, stack_bytes = usage(cubin)
        # to disassemble a kernel takes longer than to assemble it
        code = output_of("nvdisasm", "-c", cubin) if "mma" in ptx else ""
        print(
            json.dumps(
                {
                    "kernel": kernel.__name__,
                    "arch": self.arch,
                    "registers": registers,
                    "stack_bytes": stack_bytes,
                    "shared_bytes": made.metadata.shared,
                    "num_warps": options.num_warps,
                    "num_stages": options.num_stages,
                    # waits for kernels ahead, and lets the next one start
                    "early": [ptx.count(f"griddepcontrol.{word}") for word in EARLY],
                    "wgmma": "wgmma.mma_async" in ptx,
                    "loops": loops(code),
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
