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
    "-shared",
    "-pthread",
    "-w",
)
UNITS = ("library.cpp", "team.cpp")


def find_compiler() -> tuple[str, ...] | None:
    """The command of a C++ compiler: $CXX, g++, clang++, c++, or Zig's from the package `ziglang`. None:
    there is none."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        if name and shutil.which(name.split()[0]):
            return tuple(name.split())
    if importlib.util.find_spec("ziglang") is not None:
        return sys.executable, "-m", "ziglang", "c++"
    return None


def static_options(compiler: tuple[str, ...]) -> tuple[str, ...]:
    """What makes the library need no C++ library at run time, and with Zig no newer C library than that of
    2018."""
    if is_zig(compiler):
        return "-target", f"{platform.machine()}-linux-gnu.2.28"
    return "-static-libgcc", *(() if "clang" in compiler[0] else ("-static-libstdc++",))


def is_zig(compiler: tuple[str, ...]) -> bool:
    """Whether this is the command of Zig's compiler."""
    return compiler[-2:] == ("ziglang", "c++")


def level_options(level: Level, compiler: tuple[str, ...]) -> tuple[str, ...]:
    """The options of a level in the words of this compiler."""
    return level.zig_options if is_zig(compiler) and level.zig_options is not None else level.options


def source_digest(options: tuple[str, ...], compiler: tuple[str, ...]) -> str:
    """A digest of all that decides what a build is: sources, options and compiler."""
    digest = hashlib.sha256(repr((options, OPTIONS, compiler)).encode())
    for path in sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def build_level(level: Level, compiler: tuple[str, ...], extra: tuple[str, ...] = ()) -> bool:
    """Compiles one level. False: it was there. Raises CalledProcessError with the compiler's words."""
    options = (*level_options(level, compiler), *extra)
    digest, stamp = source_digest(options, compiler), level.path.with_suffix(".sha256")
    if level.path.is_file() and stamp.is_file() and stamp.read_text("ascii") == digest:
        return False
    LIBRARIES.mkdir(exist_ok=True)
    unfinished = level.path.with_suffix(f".{os.getpid()}")
    sources = [str(FOLDER / unit) for unit in UNITS]
    command = [*compiler, *OPTIONS, *options, *sources, "-o", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        unfinished.rename(level.path)
    finally:
        unfinished.unlink(missing_ok=True)
    stamp.write_text(digest, "ascii")
    return True


def build(machine: str | None = None) -> list[Level]:
    """Compiles all levels of the machine's architecture. -> those that were compiled now. Raises RuntimeError
    where there is no compiler, or it fails."""
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or `pip install ziglang`")
    levels = [level for level in LEVELS if level.machine == (machine or platform.machine())]
    extra = static_options(compiler)
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            is_new = list(pool.map(lambda level: build_level(level, compiler, extra), levels))
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(compiler)} failed:\n{error.stderr[-2000:]}") from None
    return [level for level, new in zip(levels, is_new, strict=True) if new]


def main() -> None:
    """Builds, and says what was built."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        built = build()
    except RuntimeError as error:
        sys.exit(f"the CPU kernels were not built: {error}")
    for level in built:
        print(f"built {level.path.name}")


if __name__ == "__main__":
    main()
