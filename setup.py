"""What pyproject.toml cannot say: the CPU kernels are compiled while the package is built. Without a C++ compiler
the build asks for Zig's. Where it fails all the same, the package is built without them: torch computes then."""

import importlib.util
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


class BuildWithKernels(build_py):
    """Compiles the kernels into the source tree, from where package data are taken."""

    def run(self) -> None:
        """See Command.run."""
        try:
            build_kernels.build()
        except (RuntimeError, OSError) as error:
            print(f"the CPU kernels were not built: {error}", file=sys.stderr)
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for every Python and one kind of processor, if it holds kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """See bdist_wheel.get_tag."""
        if not any(KERNELS.glob("lib/*.so")):
            return super().get_tag()
        self.root_is_pure = False
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
    setup_requires=[] if build_kernels.find_compiler() else ["ziglang>=0.13"],
)
