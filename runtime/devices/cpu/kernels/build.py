"""Compiles the kernels for every level of this machine's architecture: `python -m
runtime.devices.cpu.kernels.build`. Nothing is done for a level whose sources have not changed. Imports
nothing but the standard library and its neighbour, because it runs while the package is installed."""

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __package__:
    from runtime.devices.cpu.kernels.levels import FOLDER, LEVELS, LIBRARIES, Level
else:  # while the package is built, before it can be imported
    sys.path.insert(0, str(Path(__file__).parent))
    from levels import FOLDER, LEVELS, LIBRARIES, Level

OPTIONS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-pthread",
    "-w",
)
GLIBC = "2.28"  # the C library, of 2018, that what Zig compiles needs at least
UNITS = ("library.cpp", "team.cpp", "memory.cpp")
PACKING = ("float8.h", "ggml.h", "quantize.h", "rows.h", "simd.h", "weights.h")  # say how weights are packed


def find_compiler(machine: str | None = None) -> tuple[str, ...] | None:
    """The command of a C++ compiler for this machine: $CXX, g++, clang++, c++, or Zig's from the package
    `ziglang`. For another one: its cross compiler of GNU, or Zig's. None: there is none."""
    is_here = is_this_machine(machine or platform.machine())
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++") if is_here else (f"{machine}-linux-gnu-g++",)
    for name in names:
        if name and shutil.which(name.split()[0]):
            return tuple(name.split())
    return find_zig()


def find_zig() -> tuple[str, ...] | None:
    """The command of Zig's C++ compiler, from the package `ziglang`. None: that is not installed."""
    if importlib.util.find_spec("ziglang") is not None:
        return sys.executable, "-m", "ziglang", "c++"
    return None


def is_this_machine(machine: str) -> bool:
    """Whether programs for Linux on `machine` are what compilers here make by themselves."""
    return machine == platform.machine() and platform.system() == "Linux"


def target_options(compiler: tuple[str, ...], machine: str) -> tuple[str, ...]:
    """What Zig compiles for: a C library no newer than that of 2018, or musl where this machine has it."""
    if not is_zig(compiler):
        return ()
    has_musl = is_this_machine(machine) and platform.libc_ver()[0] != "glibc"
    return "-target", f"{machine}-linux-musl" if has_musl else f"{machine}-linux-gnu.{GLIBC}"


def link_command(compiler: tuple[str, ...]) -> tuple[str, ...]:
    """The linker that makes a library which needs nothing but the C library at run time. Zig's C++ library
    would be compiled first, for a minute: memory.cpp has the little of it that is not in headers."""
    if is_zig(compiler):
        return *compiler[:-1], "cc", "-shared", "-Wl,-z,defs"
    return *compiler, "-shared", "-static-libgcc", *(() if "clang" in compiler[0] else ("-static-libstdc++",))


def is_zig(compiler: tuple[str, ...]) -> bool:
    """Whether this is the command of Zig's compiler."""
    return compiler[-2:] == ("ziglang", "c++")


def level_options(level: Level, compiler: tuple[str, ...]) -> tuple[str, ...]:
    """The options of a level in the words of this compiler."""
    return level.zig_options if is_zig(compiler) and level.zig_options is not None else level.options


def source_digest(options: tuple[str, ...], compiler: tuple[str, ...]) -> str:
    """A digest of all that decides what a build is: sources, options and compiler."""
    digest = hashlib.sha256(repr((options, OPTIONS, link_command(compiler), compiler)).encode())
    for path in sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def packing_digest(folder: Path = FOLDER) -> int:
    """A digest, of 60 bits, of the sources that decide how weights are packed. A library knows that of its
    own build, by which packed weights are found again (kept_matrices.py)."""
    digest = hashlib.sha256()
    for name in PACKING:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return int(digest.hexdigest()[:15], 16)


def build_level(
    level: Level, compiler: tuple[str, ...], extra: tuple[str, ...] = (), folder: Path = LIBRARIES
) -> bool:
    """Compiles one level into a folder. False: it was there. Raises CalledProcessError with the compiler's
    words."""
    library, target = folder / level.path.name, target_options(compiler, level.machine)
    packing = f"-DPACKING_DIGEST={packing_digest()}"
    options = (*target, *level_options(level, compiler), packing, *extra)
    digest, stamp = source_digest(options, compiler), library.with_suffix(".sha256")
    if library.is_file() and stamp.is_file() and stamp.read_text("ascii") == digest:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        objects = [f"{unfinished}/{unit}.o" for unit in UNITS]
        for unit, compiled in zip(UNITS, objects, strict=True):
            run([*compiler, *OPTIONS, *options, "-c", str(FOLDER / unit), "-o", compiled])
        linked = Path(unfinished) / library.name
        run([*link_command(compiler), *target, *objects, "-lm", "-pthread", "-o", str(linked)])
        linked.rename(library)
    stamp.write_text(digest, "ascii")
    return True


def run(command: list[str]) -> None:
    """Runs a compiler. Raises CalledProcessError with its words."""
    subprocess.run(command, check=True, capture_output=True, text=True)


def knows_level(compiler: tuple[str, ...], level: Level) -> bool:
    """Whether the compiler has the instructions of a level: those of AMX are younger than GCC 10."""
    options = (*target_options(compiler, level.machine), *level_options(level, compiler))
    command = [*compiler, *options, "-E", "-x", "c++", "/dev/null"]  # Zig would link, were it not for -E
    return subprocess.run(command, capture_output=True).returncode == 0


def build(
    machine: str | None = None, folder: Path = LIBRARIES, compiler: tuple[str, ...] | None = None
) -> list[Level]:
    """Compiles all levels of an architecture, this machine's if none is named, by the compiler that is found
    if none is given. -> those that were compiled now. Raises RuntimeError where there is no compiler, where
    it fails, and for a machine without kernels."""
    if machine is None and platform.system() != "Linux":
        raise RuntimeError(f"they need Linux (its futexes), and this is {platform.system()}")
    machine = machine or platform.machine()
    levels = [level for level in LEVELS if level.machine == machine]
    if not levels:
        there_are = ", ".join(sorted({level.machine for level in LEVELS}))
        raise RuntimeError(f"there are none for {machine}, but for {there_are}")
    compiler = compiler or find_compiler(machine)
    if compiler is None:
        needed = (
            "g++ or clang++" if is_this_machine(machine) else f"g++-{machine}-linux-gnu".replace("_", "-")
        )
        raise RuntimeError(f"no C++ compiler: install {needed}, or `pip install ziglang`")
    levels = [level for level in levels if knows_level(compiler, level)]
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            is_new = list(pool.map(lambda level: build_level(level, compiler, (), folder), levels))
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(compiler)} failed:\n{error.stderr[-2000:]}") from None
    return [level for level, new in zip(levels, is_new, strict=True) if new]


def main() -> None:
    """Builds, and says what was built."""
    parser = argparse.ArgumentParser(description=__doc__)
    machines = sorted({level.machine for level in LEVELS})
    parser.add_argument("--machine", choices=machines, help="another one than this, by Zig's compiler")
    arguments = parser.parse_args()
    try:
        built = build(arguments.machine)
    except RuntimeError as error:
        sys.exit(f"the CPU kernels were not built: {error}")
    for level in built:
        print(f"built {level.path.name}")


if __name__ == "__main__":
    main()
