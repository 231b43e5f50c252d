"""Limits of memory and processor time of the control groups of this process, v2 and v1, and kills because of
them. Torch-free.

A limit of any group up to the root of the mount counts. File cache that the kernel would give up is not
"used": a checkpoint that was read once fills the group's usage up to its limit.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # v1 writes a number near 2^63 where there is no limit


class Version(NamedTuple):
    """Names of what a version of control groups has."""

    fstype: str
    controller: str  # in /proc/self/cgroup
    mount: str  # where it usually is
    limits: tuple[str, ...]
    usage: str
    reclaimable: str  # key of memory.stat
    events: str  # file with the number of processes that were killed


VERSIONS = (
    Version(
        "cgroup2",
        "",
        "sys/fs/cgroup",
        ("memory.max", "memory.high"),
        "memory.current",
        "inactive_file",
        "memory.events",
    ),
    Version(
        "cgroup",
        "memory",
        "sys/fs/cgroup/memory",
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.oom_control",
    ),
)


CPU_V1 = VERSIONS[1]._replace(controller="cpu", mount="sys/fs/cgroup/cpu")


class MemoryLimit(NamedTuple):
    """The limit of one control group."""

    name: str  # of the file, e.g. memory.max
    limit_bytes: int
    used_bytes: int  # without file cache that the kernel would give up

    @property
    def left_bytes(self) -> int:
        """What the group may still take; not negative."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limit(root: Path = _ROOT) -> MemoryLimit | None:
    """The limit that leaves least to this process; None: there is no limit."""
    limits = [limit for version in VERSIONS for limit in _limits(version, root)]
    return min(limits, key=lambda limit: limit.left_bytes, default=None)


def cpu_limit(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that this process may use, by the tightest of its groups; None: no limit."""
    limits = []
    for folder in _folders(VERSIONS[0], root):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        limits.append((quota, period))
    for folder in _folders(CPU_V1, root):
        limits.append((_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
    shares = [int(quota) / int(period) for quota, period in limits if quota.isdigit() and period.isdigit()]
    return min(shares, default=None)


def num_oom_kills(root: Path = _ROOT) -> int:
    """Processes of this control group that the kernel has killed for want of memory."""
    for version in VERSIONS:
        for folder in _folders(version, root):
            events = _fields(folder / version.events)
            if "oom_kill" in events:
                return events["oom_kill"]
    return 0


def available_bytes(root: Path = _ROOT) -> int:
    """Available memory of the machine, or what is left of this process's limit if that is less."""
    meminfo = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit = memory_limit(root)
    return available if limit is None else min(available, limit.left_bytes)


def _limits(version: Version, root: Path) -> Iterator[MemoryLimit]:
    for folder in _folders(version, root):
        usage = _read(folder / version.usage)
        for name in version.limits:
            limit = _read(folder / name)
            if limit.isdigit() and usage.isdigit() and int(limit) < _NO_LIMIT:
                cache = _fields(folder / "memory.stat").get(version.reclaimable, 0)
                yield MemoryLimit(name, int(limit), max(0, int(usage) - cache))


def _folders(version: Version, root: Path) -> Iterator[Path]:
    """The folder of this process's group, then those of the groups around it, up to the mount."""
    mount, inner = _mount(version, root)
    group = _group(version, root)
    outer = inner.rstrip("/") + "/"
    # a group outside of what is mounted cannot be seen: the mount stands for it
    inside = group[len(outer) :] if (group + "/").startswith(outer) else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:
        parts = []
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _mount(version: Version, root: Path) -> tuple[Path, str]:
    """Where the groups are mounted, and the group that is the root of the mount."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        fstype, _, options = kind.partition(" ")
        if fstype == version.fstype and version.controller in ("", *options.split(" ")[-1].split(",")):
            fields = mount.split(" ")
            return root / fields[4].lstrip("/"), fields[3]
    return root / version.mount, "/"


def _group(version: Version, root: Path) -> str:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if version.controller in controllers.split(","):
            return group
    return "/"


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = [line.split() for line in _read(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(path: Path) -> str:
    """The text of a file; empty where there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
