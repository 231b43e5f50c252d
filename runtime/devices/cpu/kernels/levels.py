"""The instruction sets that the kernels are compiled for, the best first. Torch-free."""

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARIES = FOLDER / "lib"


@dataclass(frozen=True, slots=True)
class Level:
    """One build of the library."""

    name: str
    machine: str  # of platform.machine()
    flags: frozenset[str]  # that /proc/cpuinfo must name
    options: tuple[str, ...]  # of the compiler: GCC and Clang have the same
    brings: str  # its products next to those of the level below, measured where it says how much
    zig_options: tuple[str, ...] | None = None  # where Zig's differ from them
    asks: Callable[[], bool] | None = None  # for what the kernel gives to processes that ask for it
    slower_on: str = ""  # vendor of processors on which the level below has the faster products

    @property
    def path(self) -> Path:
        """Where the library of this level lies once it is built."""
        return LIBRARIES / f"kernels-{self.machine}-{self.name}.so"


_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64


def may_use_tiles() -> bool:
    """Asks Linux for the tiles of AMX, for this process and its threads. False: it has none to give (before
    Linux 5.16, or in a sandbox)."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0


# Intel's VDPBF16PS has a quarter of the rate of fused multiply-adds of float32, for twice the products each:
# bfloat16 is for AMX there, which virtual machines often hide.
INTEL = "GenuineIntel"

# products by torch take so much longer than those of avx512_bf16, one thread
TORCH_COSTS = "products take 3 to 4 times as long, those of 4-bit weights 60 times and more"
OVER_TORCH = "3 times as fast as torch, with 4-bit weights 25 times and more"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_VNNI = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_VNNI_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"})

_BF16 = (*_VNNI, "-mavx512bf16")
_BF16_FLAGS = _VNNI_FLAGS | {"avx512_bf16"}

LEVELS = (
    Level(
        "amx",
        "x86_64",
        _BF16_FLAGS | {"amx_tile", "amx_bf16", "amx_int8"},
        (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        "faster prompts and large batches in bfloat16 and int8",
        asks=may_use_tiles,
    ),
    Level(
        "avx512_bf16",
        "x86_64",
        _BF16_FLAGS,
        _BF16,
        "bfloat16 1.5 times as fast from 8 rows on, else the same",
        slower_on=INTEL,
    ),
    Level(
        "avx512_vnni", "x86_64", _VNNI_FLAGS, _VNNI, "1.5 to 3 times as fast from 8 rows on, else the same"
    ),
    Level("avx2", "x86_64", frozenset({"avx2", "fma", "f16c"}), _AVX2, OVER_TORCH),
    Level(
        "i8mm",
        "aarch64",
        frozenset({"asimddp", "asimdhp", "i8mm", "bf16"}),
        ("-march=armv8.2-a+dotprod+fp16+i8mm+bf16",),
        "faster prompts and batches in bfloat16 and int8",
        ("-mcpu=generic+dotprod+fullfp16+i8mm+bf16",),
    ),
    Level(
        "dotprod",
        "aarch64",
        frozenset({"asimddp", "asimdhp"}),
        ("-march=armv8.2-a+dotprod+fp16",),
        "faster products of int8 and 4 bits",
        ("-mcpu=generic+dotprod+fullfp16",),
    ),
    Level("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",), OVER_TORCH, ("-mcpu=generic",)),
)


def cpu_info() -> str:
    """What Linux says of the processors; empty: nothing."""
    try:
        return Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return ""


def cpu_flags() -> frozenset[str]:
    """What /proc/cpuinfo says that every CPU of the machine can do."""
    lines = cpu_info().splitlines()
    sets = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(set.intersection(*sets)) if sets else frozenset()


def cpu_vendor() -> str:
    """The processor's vendor as /proc/cpuinfo names it on x86-64; empty elsewhere."""
    vendors = (line.partition(":")[2] for line in cpu_info().splitlines() if line.startswith("vendor_id"))
    return next(vendors, "").strip()


def capable_levels(
    machine: str | None = None, flags: frozenset[str] | None = None, vendor: str | None = None
) -> tuple[Level, ...]:
    """The levels whose instructions this machine's CPU has, the best first: in the order of LEVELS, but that
    one which is slower on this vendor's processors comes behind the next."""
    machine = platform.machine() if machine is None else machine
    flags = cpu_flags() if flags is None else flags
    vendor = cpu_vendor() if vendor is None else vendor
    ranks = {
        level: index + (1.5 if vendor and level.slower_on == vendor else 0)
        for index, level in enumerate(LEVELS)
    }
    able = (level for level in LEVELS if level.machine == machine and level.flags <= flags)
    return tuple(sorted(able, key=ranks.__getitem__))


def supported_levels(
    machine: str | None = None, flags: frozenset[str] | None = None, vendor: str | None = None
) -> tuple[Level, ...]:
    """The levels that this machine runs, the best first: those of its CPU that its kernel allows."""
    able = capable_levels(machine, flags, vendor)
    return tuple(level for level in able if level.asks is None or level.asks())
