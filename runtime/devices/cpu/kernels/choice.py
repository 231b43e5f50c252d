"""Which builds of the kernels this machine may use, and what a better one would bring. Torch-free."""

import os

from runtime.devices.cpu.kernels.levels import Level, capable_levels, supported_levels
from runtime.errors import StartError

VARIABLE = "RUNTIME_CPU_KERNELS"  # a level's name, or "none"; unset or empty: the best that the machine runs
NONE = "none"


def usable_levels() -> tuple[Level, ...]:
    """The levels that may compute here, the best first: all that this machine runs and that are built, or the
    one that the environment names. (): torch computes everything. Raises StartError where the environment
    names a level that there is not, that this machine does not run, or that is not built."""
    wanted = os.environ.get(VARIABLE, "")
    supported = supported_levels()
    built = tuple(level for level in supported if level.path.is_file())
    if not wanted:
        return built
    if wanted == NONE:
        return ()
    named = next((level for level in built if level.name == wanted), None)
    if named is None:
        names = ", ".join((*(level.name for level in built), NONE))
        raise StartError(f"{VARIABLE}={wanted} {_problem(wanted, supported)}; choose one of {names}")
    return (named,)


def _problem(wanted: str, supported: tuple[Level, ...]) -> str:
    """Why a level that the environment names cannot be used."""
    if any(level.name == wanted for level in supported):
        return "is not built"
    if any(level.name == wanted for level in capable_levels()):
        return "needs registers that the operating system does not give to this process"
    return "is no level of the CPU kernels that this machine runs"


def better_levels(than: Level) -> tuple[Level, ...]:
    """What this machine's CPU has above this level: the build lacks it, the operating system refuses it, or
    the environment chose another. The best first."""
    capable = capable_levels()
    return capable[: capable.index(than)] if than in capable else ()


def upgrade(to: Level) -> str:
    """What to do to compute by a better level than now."""
    if os.environ.get(VARIABLE):
        return f"unset {VARIABLE}"
    if to.path.is_file():
        return f"{to.name} needs registers that Linux gives from 5.16 on, and not in every sandbox"
    return "install a newer g++ (12) or clang++ (14), then install the package again"


def remedy() -> str:
    """What to do where there are no kernels."""
    if os.environ.get(VARIABLE):
        return f"unset {VARIABLE}"
    if not supported_levels():
        return "use a CPU with AVX2, or an arm64 one"
    return "install g++ or clang++, then install the package again"
