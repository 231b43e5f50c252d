"""What pyproject.toml cannot say: the CPU kernels are compiled while the package is built. Without a C++
compiler the build asks for Zig's. Where it fails all the same, the package is built without them: torch
computes then.

    RUNTIME_WHEEL_MACHINE=aarch64 pip wheel --no-deps --wheel-dir dist .

builds a wheel for another kind of machine, or with x86_64 for machines with an older C library than this
one's: Zig compiles its kernels, and a build that fails is an error."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path(__file__).parent / "runtime/devices/cpu/kernels"
_spec = importlib.util.spec_from_file_location("build_kernels", KERNELS / "build.py")
assert _spec is not None and _spec.loader is not None
build_kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_kernels)


MACHINE = os.environ.get("RUNTIME_WHEEL_MACHINE", "")  # of platform.machine(); empty: this one


class BuildWithKernels(build_py):
    """Compiles the kernels into the source tree, from where package data are taken; those of a named machine
    into the wheel alone."""

    def run(self) -> None:
        """See Command.run."""
        libraries = Path(self.build_lib) / "runtime/devices/cpu/kernels/lib"
        shutil.rmtree(libraries, ignore_errors=True)  # an earlier build's may be another machine's
        if MACHINE:
            super().run()
            shutil.rmtree(libraries, ignore_errors=True)
            zig = build_kernels.find_zig()
            if zig is None:
                raise SystemExit("RUNTIME_WHEEL_MACHINE needs Zig's compiler: pip install ziglang")
            build_kernels.build(MACHINE, libraries, zig)
            for stamp in libraries.glob("*.sha256"):
                stamp.unlink()
            return
        try:
            build_kernels.build()
        except (RuntimeError, OSError) as error:
            print(f"the CPU kernels were not built: {error}", file=sys.stderr)
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for every Python and one kind of processor, if it holds kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """See bdist_wheel.get_tag."""
        if MACHINE:
            self.root_is_pure = False
            return "py3", "none", f"manylinux_{build_kernels.GLIBC.replace('.', '_')}_{MACHINE}"
        if not any(KERNELS.glob("lib/*.so")):
            return super().get_tag()
        self.root_is_pure = False
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
    setup_requires=[] if build_kernels.find_compiler() and not MACHINE else ["ziglang>=0.13"],
)
