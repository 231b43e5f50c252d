"""`./dev test-levels [--full] [LEVEL ...]`: the tests of the CPU kernels on levels that this machine does not
have.

The kernels of arm64 are compiled as for a wheel, and run by qemu; the tests run here, in memory that the
emulator shares. Exit status 0 with a line that says why, where qemu or a compiler is missing; 1 where a test
failed.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.devices.cpu.kernels import build
from runtime.devices.cpu.kernels.levels import LEVELS, LIBRARIES, supported_levels

HERE = Path(__file__).resolve().parent
FOLDER = LIBRARIES / "emulated"
SYSTEM = Path("/usr/aarch64-linux-gnu")  # arm64's C library: Debian's package libc6-arm64-cross
TESTS = ("tests/devices/cpu/test_kernels.py", "tests/devices/cpu/test_screen.py")
OF_THE_MACHINE = "not levels_are_chosen and not imports_no_compiler"  # tests of no level
# level -> the model of a CPU in qemu's words: one that has no more than the level asks for, if there is one
CPUS = {"neon": "cortex-a72", "dotprod": "neoverse-n1", "i8mm": "max"}
DOUBLE = "amx"  # whose tiles are those of amx_double.h, on a CPU with AVX512


LEVELS_HELP = f"of {', '.join((*CPUS, DOUBLE))}; all, if none is named"


class Missing(Exception):
    """What a level cannot be run without."""


@dataclass(frozen=True)
class Prepared:
    """How pytest runs on one level."""

    level: str
    variables: dict[str, str]


def compile_c(compiler: tuple[str, ...], source: str, to: Path, *options: str) -> Path:
    """Compiles a file of this folder. Raises CalledProcessError with the compiler's words."""
    if not to.is_file() or to.stat().st_mtime < (HERE / source).stat().st_mtime:
        build.run([*compiler, "-O2", *options, str(HERE / source), "-o", str(to)])
    return to


def in_c(compiler: tuple[str, ...]) -> tuple[str, ...]:
    """The C compiler beside this C++ compiler."""
    return (
        *compiler[:-1],
        compiler[-1].replace("g++", "gcc").replace("clang++", "clang").replace("c++", "cc"),
    )


def prepare_arm64(name: str) -> Prepared:
    """Compiles a level of arm64 and its driver. Raises Missing."""
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if qemu is None or not SYSTEM.is_dir():
        raise Missing("qemu and arm64's C library: apt install qemu-user libc6-arm64-cross")
    compiler, here = build.find_compiler("aarch64"), build.find_compiler()
    if compiler is None or here is None:
        raise Missing("a compiler for arm64: pip install ziglang")
    level = next(level for level in LEVELS if level.name == name)
    build.build_level(level, compiler, (), FOLDER)
    target = build.target_options(compiler, "aarch64")
    driver = compile_c(in_c(compiler), "driver.c", FOLDER / "driver", *target, "-ldl")
    arena = compile_c(
        in_c(here), "arena.c", FOLDER / "arena.so", "-shared", "-fPIC", "-fno-builtin", "-pthread"
    )
    variables = {
        "EMULATED_COMMAND": shlex.join([qemu, "-cpu", CPUS[name], "-L", str(SYSTEM), str(driver)]),
        "LD_PRELOAD": str(arena),
        "PYTHONMALLOC": "malloc",  # else structures lie in pages of Python's own
    }
    return Prepared(name, variables)


def prepare_double() -> Prepared:
    """Compiles the level of AMX with tiles in C++, and what else this CPU has of it. Raises Missing."""
    without_tiles = next((level for level in supported_levels() if level.name.startswith("avx512")), None)
    compiler = build.find_compiler()
    if without_tiles is None or compiler is None:
        raise Missing("a CPU with AVX512 and VNNI, and a C++ compiler")
    tiles = f'-DAMX_DOUBLE="{HERE / "amx_double.h"}"'
    level = next(level for level in LEVELS if level.name == DOUBLE)
    build.build_level(replace(level, options=without_tiles.options), compiler, (tiles,), FOLDER)
    return Prepared(DOUBLE, {})


def run_tests(prepared: Prepared, options: list[str]) -> bool:
    """Runs the tests of the kernels on a level. -> whether all have passed"""
    began = time.monotonic()
    plugin = ("-p", "tests.devices.cpu.emulator.plugin", "-p", "no:cacheprovider")
    settings = {"EMULATED_LEVEL": prepared.level, "EMULATED_FOLDER": str(FOLDER), "EMULATED_COMMAND": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *TESTS, *options],
        env={**os.environ, **settings, **prepared.variables},
        capture_output=True,
        text=True,
    )
    print(f"---- {prepared.level}: {time.monotonic() - began:.0f} s\n{done.stdout}{done.stderr}", flush=True)
    return done.returncode == 0


def main() -> None:
    """Runs every level, two at a time."""
    parser = argparse.ArgumentParser(prog="./dev test-levels", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all cases of the big matrices")
    parser.add_argument(
        "levels", nargs="*", metavar="LEVEL", help=f"of {', '.join(CPUS)}; all, if none is named"
    )
    arguments = parser.parse_args()
    options = ["-k", OF_THE_MACHINE, *(["--full"] if arguments.full else [])]
    prepared = []
    for name in arguments.levels or (*CPUS, DOUBLE):
        try:
            prepared.append(prepare_double() if name == DOUBLE else prepare_arm64(name))
        except Missing as missing:
            print(f"---- {name}: skipped, it needs {missing}")
    with ThreadPoolExecutor(2) as pool:
        passed = list(pool.map(lambda one: run_tests(one, options), prepared))
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    assert platform.system() == "Linux"
    main()
