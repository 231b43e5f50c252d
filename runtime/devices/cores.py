"""How many threads may compute at the same time on this machine. Torch-free."""

import os
from collections.abc import Set
from pathlib import Path

from runtime.devices.cgroup import cpu_limit


def usable_cores(cpus: Set[int] | None = None, root: Path = Path("/")) -> int:
    """Physical cores of `cpus` (None: those of this process), within the limit of its control groups; at
    least 1. Two threads of one core (SMT) share its arithmetic, and would only get into each other's way."""
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    cores = {_siblings(cpu, root) for cpu in cpus}
    limit = cpu_limit(root)
    return max(1, len(cores) if limit is None else min(len(cores), int(limit)))


def threads_of_rank(cores: int, num_ranks: int = 1) -> int:
    """Threads of each of the ranks that share these cores; one core stays with the event loop where there are
    enough."""
    spare = 1 if cores > 2 * num_ranks else 0
    return max(1, (cores - spare) // num_ranks)


def _siblings(cpu: int, root: Path) -> str:
    """What the kernel calls the threads of this CPU's core; the CPU itself where it says nothing."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return path.read_text("ascii").strip() or str(cpu)
    except OSError:
        return str(cpu)
