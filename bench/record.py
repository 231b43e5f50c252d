"""Writes the results of a bench with the facts of the machine they were measured on:
bench/results/<name>.json, or a file in the folder that the variable OUT names."""

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Facts of the machine that figures depend on."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "kernel": platform.release().split("-")[0],
        "is_virtual": "hypervisor" in (_field("/proc/cpuinfo", "flags") or "").split(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }


def percentiles(values: list[float], digits: int = 1) -> dict[str, float]:
    """p50, p90 and p99 of at least one value, by the nearest rank."""
    ordered = sorted(values)
    return {
        f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], digits) for p in (50, 90, 99)
    }


def results_folder() -> Path:
    """Where results are written."""
    return Path(os.environ.get("OUT") or RESULTS)


def record(name: str, results: dict[str, Any]) -> Path:
    """Replaces the bench's file and returns its path."""
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"bench": name, "machine": machine(), "results": results}, indent=2) + "\n")
    return path


def _field(file: str, name: str) -> str | None:
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", Path(file).read_text(), re.MULTILINE)
    return match[1] if match else None
