"""NUMA nodes of this machine, as Linux lists them."""

import os
from pathlib import Path

from runtime.errors import StartError

NODES = Path("/sys/devices/system/node")


def cores_of(node: int, root: Path = NODES) -> set[int]:
    """The cores of a node that this process may run on, at least one. Raises StartError."""
    try:
        text = (root / f"node{node}" / "cpulist").read_text(encoding="ascii").strip()
    except OSError:
        raise StartError(
            f"--numa-node {node} is no node of this machine; `runtime check doctor` counts them"
        ) from None
    spans = [part.split("-") for part in text.split(",") if part]
    cores = {
        core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)
    } & os.sched_getaffinity(0)
    if not cores:
        raise StartError(
            f"--numa-node {node}: this process may run on none of its cores ({text or 'it has none'}); "
            "choose another"
        )
    return cores
