"""What processes hold over time: memory, descriptors and threads, and how fast they grow.

Memory of its own and memory shared with others are apart: of a host tier, pages become resident as they are
first used, in each process that maps them.
"""

import re
import time
from pathlib import Path

from msgspec import Struct


class Usage(Struct, frozen=True):
    """What a process holds at one moment."""

    at_s: float
    own_mib: float
    shared_mib: float
    descriptors: int
    threads: int


class Growth(Struct, frozen=True):
    """A line through figures by least squares: its slope, and the standard error of the slope."""

    per_hour: float
    error: float


def usage(pid: int, at_s: float) -> Usage:
    """What a process holds now. Raises FileNotFoundError or ProcessLookupError for one that has ended."""
    folder = Path(f"/proc/{pid}")
    status = dict(re.findall(r"^(Rss\w+):\s+(\d+) kB", (folder / "status").read_text(), re.MULTILINE))
    if "RssAnon" not in status:
        raise ProcessLookupError(f"{pid} has ended")
    own, shared = int(status["RssAnon"]) / 1024, int(status["RssShmem"]) / 1024
    return Usage(
        at_s, own, shared, len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))
    )


def role(pid: int) -> str:
    """What a process of the server is: server, rank, forks (of ranks), grammars, or other."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "serve" in words:
        return "server"
    if "runtime.ranks.worker" in words:  # also in forks of a rank: only their names differ
        return "forks" if Path(f"/proc/{pid}/comm").read_text().strip() == "fork-server" else "rank"
    return "grammars" if "runtime.grammar.compile_process" in words else "other"


def line(times_s: list[float], values: list[float]) -> Growth:
    """The line through at least three values."""
    count = len(values)
    mean_t, mean_v = sum(times_s) / count, sum(values) / count
    spread = sum((t - mean_t) ** 2 for t in times_s)
    slope = sum((t - mean_t) * (v - mean_v) for t, v in zip(times_s, values, strict=True)) / spread
    rest = sum((v - mean_v - slope * (t - mean_t)) ** 2 for t, v in zip(times_s, values, strict=True))
    return Growth(slope * 3600, (rest / (count - 2) / spread) ** 0.5 * 3600)


class Watch:
    """The usage of the server's processes over time, by role and process."""

    def __init__(self) -> None:
        self.begin_s = time.monotonic()
        self.usages: dict[tuple[str, int], list[Usage]] = {}

    def sample(self, pids: list[int]) -> None:
        """Notes what each process holds. Children that compile a grammar for a moment are left out, and so
        are processes that have just ended."""
        at_s = time.monotonic() - self.begin_s
        for pid in pids:
            try:
                name, now = role(pid), usage(pid, at_s)
            except (FileNotFoundError, ProcessLookupError):
                continue
            self.usages.setdefault((name, pid), []).append(now)

    def series(self) -> dict[str, list[tuple[int, float, float]]]:
        """Samples once a minute for each process that lived so long: second, MiB of its own, MiB shared."""
        return {
            f"{name} {pid}": [
                (round(one.at_s), round(one.own_mib, 1), round(one.shared_mib, 1)) for one in usages[::12]
            ]
            for (name, pid), usages in self.usages.items()
            if len(usages) > 12
        }

    def growth(self, from_s: float) -> dict[str, dict[str, float]]:
        """For each process that lived from `from_s` to the end: where it began and ended, and its growth an
        hour with the standard error."""
        end_s = max(usages[-1].at_s for usages in self.usages.values())
        report: dict[str, dict[str, float]] = {}
        for (name, pid), usages in self.usages.items():
            late = [one for one in usages if one.at_s >= from_s]
            if len(late) < 10 or late[-1].at_s < end_s - 30 or late[0].at_s > from_s + 60:
                continue
            times = [one.at_s for one in late]
            memory = line(times, [one.own_mib for one in late])
            report[f"{name} {pid}"] = {
                "minutes": round((times[-1] - times[0]) / 60, 1),
                "mib_first": round(late[0].own_mib, 1),
                "mib_last": round(late[-1].own_mib, 1),
                "shared_mib_last": round(late[-1].shared_mib, 1),
                "mib_per_hour": round(memory.per_hour, 2),
                "mib_per_hour_error": round(memory.error, 2),
                "descriptors_last": late[-1].descriptors,
                "descriptors_per_hour": round(line(times, [one.descriptors for one in late]).per_hour, 1),
                "threads_last": late[-1].threads,
                "threads_per_hour": round(line(times, [one.threads for one in late]).per_hour, 1),
            }
        return report
