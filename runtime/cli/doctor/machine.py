"""What this machine has, and what it should have: `runtime check doctor`. Reads files and asks tools; loads
no torch, changes nothing."""

import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from runtime.cli.doctor import ascend
from runtime.cli.doctor import probe as look
from runtime.cli.doctor.probe import Finding, read
from runtime.devices.cpu.kernels import choice
from runtime.devices.cpu.kernels.levels import TORCH_COSTS
from runtime.errors import StartError
from runtime.options.compat.environment import ENVIRONMENT

LIMITS = (
    ("open files", resource.RLIMIT_NOFILE, 4096, "a connection is a file; raise it: ulimit -n 4096"),
    (
        "locked memory",
        resource.RLIMIT_MEMLOCK,
        64 << 20,
        "devices pin host memory; raise it: ulimit -l unlimited",
    ),
)
CPU_FEATURES = (
    "amx_bf16",
    "amx_int8",
    "avx512_bf16",
    "avx512_vnni",
    "avx512f",
    "avx2",
    "sve",
    "bf16",
    "i8mm",
    "asimd",
)


def examine(
    *, host: str, port: int, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Everything, in the order of a start-up: software, processor, memory, accelerators, limits, network,
    settings."""
    has_npu = any((root / "dev").glob("davinci[0-9]*"))
    return [
        *_software(),
        *_processor(root),
        *_memory(root),
        *_nvidia(root),
        *ascend.examine(root, environment),
        *_limits(),
        *_network(host, port),
        *_settings(root, environment, has_npu),
    ]


def _software() -> Iterator[Finding]:
    is_new = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        platform.python_version(),
        "ok" if is_new else "problem",
        "" if is_new else "install Python 3.11 or newer",
    )
    is_linux = sys.platform == "linux"
    yield Finding(
        "system",
        f"{platform.system()} {platform.release()} {platform.machine()}",
        "ok" if is_linux else "problem",
        "" if is_linux else "the rings need memfd and eventfd of Linux",
    )
    for name, is_needed in (
        ("torch", True),
        ("torch_npu", False),
        ("triton", False),
        ("uvloop", True),
        ("hypercorn", True),
    ):
        found = look.package(name)
        if found is None and is_needed:
            yield Finding(name, "missing", "problem", f"install it: pip install {name}")
        elif found is not None:
            yield Finding(name, found)


def _processor(root: Path) -> Iterator[Finding]:
    text = read(root / "proc/cpuinfo")
    model = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    words = set(flags[1].split()) if flags else set()
    cores = len(os.sched_getaffinity(0))
    yield Finding("processor", f"{model[1] if model else 'unknown'}, {cores} cores for this process")
    yield Finding(
        "instructions",
        " ".join(word for word in CPU_FEATURES if word in words) or "none of those that matter",
    )
    yield _kernels()
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    yield Finding(
        "numa nodes",
        str(max(nodes, 1)),
        "note" if nodes > 1 else "ok",
        "bind the server to one node: numactl --cpunodebind=0 --membind=0 runtime serve ..."
        if nodes > 1
        else "",
    )


def _kernels() -> Finding:
    """Which build of the CPU kernels computes, what computes where none does, and what a better one that the
    CPU could run would bring."""
    try:
        level = next(iter(choice.usable_levels()), None)
    except StartError as error:
        return Finding("cpu kernels", "no choice", "problem", str(error))
    if level is None:
        return Finding("cpu kernels", f"none: torch computes, {TORCH_COSTS}", "note", choice.remedy())
    better = choice.better_levels(level)
    if not better:
        return Finding("cpu kernels", f"{level.name}, the best of this CPU")
    lacks = "; ".join(f"{one.name} ({one.brings})" for one in better)
    return Finding(
        "cpu kernels", f"{level.name}; this CPU has more: {lacks}", "note", choice.upgrade(better[0])
    )


def _memory(root: Path) -> Iterator[Finding]:
    lines = dict(re.findall(r"^(\w+):\s+(\d+)", read(root / "proc/meminfo"), re.M))
    yield Finding(
        "memory",
        f"{int(lines.get('MemAvailable', 0)) / 2**20:.1f} of {int(lines.get('MemTotal', 0)) / 2**20:.1f} "
        "GiB available",
    )
    shared = root / "dev/shm"
    size = f"{shutil.disk_usage(shared).total / 2**30:.1f} GiB" if shared.is_dir() else "none"
    yield Finding("shared memory", f"{size} in /dev/shm, of which the rings use nothing")


def _nvidia(root: Path) -> Iterator[Finding]:
    driver = re.search(r"Module\s+([\d.]+)", read(root / "proc/driver/nvidia/version"))
    if driver is None:
        yield Finding("cuda devices", "none")
        return
    listed = (
        look.ask("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
        or "nvidia-smi does not answer"
    )
    yield Finding(
        "cuda devices",
        f"driver {driver[1]}: " + "; ".join(listed.splitlines()),
        "note",
        "--device cuda serves on them; docs/cuda.md says what an H200 has shown",
    )


def _limits() -> Iterator[Finding]:
    for name, kind, least, remedy in LIMITS:
        soft, hard = resource.getrlimit(kind)
        is_enough = soft == resource.RLIM_INFINITY or soft >= least
        shown = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
        yield Finding(
            f"limit: {name}",
            f"{shown[0]} (at most {shown[1]})",
            "ok" if is_enough else "note",
            "" if is_enough else remedy,
        )


def _network(host: str, port: int) -> Iterator[Finding]:
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            yield Finding(
                "port",
                f"{host}:{port} cannot be taken: {error}",
                "problem",
                "choose another with --port; 0 takes a free one",
            )
        else:
            yield Finding("port", f"{host}:{port} is free")


def _settings(root: Path, environment: Mapping[str, str], has_npu: bool) -> Iterator[Finding]:
    """The tuning guide's settings: those of the machine are compared, those of the ranks and of the user are
    shown where they are set."""
    for setting in ENVIRONMENT:
        if setting.kind == "machine":
            current = read(root / setting.probe.lstrip("/")).strip()
            differs = bool(current) and current != setting.recommended
            yield Finding(
                setting.name,
                current or "not present",
                "note" if differs and has_npu else "ok",
                f"recommended for npu devices: {setting.recommended}" if differs else "",
            )
        elif setting.kind != "read" and (has_npu or setting.name in environment):
            recommended = f"; recommended {setting.recommended}" if setting.recommended else ""
            yield Finding(
                setting.name,
                environment.get(setting.name, "not set"),
                "note",
                f"{setting.counterpart}{recommended}",
            )
