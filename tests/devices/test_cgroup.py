"""Limits of control groups as files of both versions give them, in all the ways in which they are mounted."""

from pathlib import Path

import pytest

from runtime.devices.cgroup import MemoryLimit, available_bytes, memory_limit, num_oom_kills

MEMINFO = "MemTotal:  2000 kB\nMemAvailable:  1000 kB\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
DOCKER_V1 = "31 23 0:27 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
NO_LIMIT = str((1 << 63) - 4096)  # as v1 writes it


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    "files, name, left",
    [
        pytest.param({}, None, 0, id="none"),
        pytest.param(
            {
                "proc/self/mountinfo": V2,
                "proc/self/cgroup": "0::/app.slice/unit\n",
                "sys/fs/cgroup/app.slice/memory.max": "700000",
                "sys/fs/cgroup/app.slice/memory.current": "300000",
                "sys/fs/cgroup/app.slice/unit/memory.max": "max",
                "sys/fs/cgroup/app.slice/unit/memory.current": "200000",
            },
            "memory.max",
            400000,
            id="v2, a group around this one",
        ),
        pytest.param(
            {
                "proc/self/mountinfo": V2,
                "proc/self/cgroup": "0::/unit\n",
                "sys/fs/cgroup/unit/memory.max": "700000",
                "sys/fs/cgroup/unit/memory.high": "600000",
                "sys/fs/cgroup/unit/memory.current": "500000",
                "sys/fs/cgroup/unit/memory.stat": "anon 200000\ninactive_file 250000\n",
            },
            "memory.high",
            350000,
            id="v2, file cache is no use, high is below max",
        ),
        pytest.param(
            {
                "proc/self/mountinfo": V1,
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/unit\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "900000",
                "sys/fs/cgroup/memory/unit/memory.limit_in_bytes": "300000",
                "sys/fs/cgroup/memory/unit/memory.usage_in_bytes": "200000",
                "sys/fs/cgroup/memory/unit/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
            },
            "memory.limit_in_bytes",
            150000,
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/mountinfo": DOCKER_V1,
                "proc/self/cgroup": "4:memory:/docker/ab\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "400000",
            },
            "memory.limit_in_bytes",
            0,
            id="v1 in a container",
        ),
        pytest.param(
            {
                "proc/self/mountinfo": V2,
                "proc/self/cgroup": "0::/../../elsewhere\n",
                "sys/fs/cgroup/memory.max": "300000",
                "sys/fs/cgroup/memory.current": "100000",
            },
            "memory.max",
            200000,
            id="v2, outside of what is mounted",
        ),
    ],
)
def test_the_limit_that_leaves_least(
    files: dict[str, str], name: str | None, left: int, tmp_path: Path
) -> None:
    root = make(tmp_path, files)
    limit = memory_limit(root)
    assert (limit and (limit.name, limit.left_bytes)) == (name and (name, left))
    assert available_bytes(root) == (1000 * 1024 if name is None else left)


def test_a_limit_above_what_is_there_changes_nothing(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "9000000000", "sys/fs/cgroup/memory.current": "0"}
    root = make(tmp_path, files)
    assert memory_limit(root) == MemoryLimit("memory.max", 9000000000, 0)
    assert available_bytes(root) == 1000 * 1024


@pytest.mark.parametrize(
    "files, count",
    [
        ({}, 0),
        (
            {
                "proc/self/mountinfo": V2,
                "proc/self/cgroup": "0::/unit\n",
                "sys/fs/cgroup/unit/memory.events": "low 0\noom 3\noom_kill 2\n",
                "sys/fs/cgroup/memory.events": "oom_kill 70\n",
            },
            2,
        ),
        (
            {
                "proc/self/mountinfo": V1,
                "proc/self/cgroup": "4:memory:/unit\n",
                "sys/fs/cgroup/memory/unit/memory.oom_control": "under_oom 0\noom_kill 5\n",
            },
            5,
        ),
    ],
)
def test_kills_for_want_of_memory_are_those_of_this_group(
    files: dict[str, str], count: int, tmp_path: Path
) -> None:
    assert num_oom_kills(make(tmp_path, files)) == count


def test_this_machine() -> None:
    assert available_bytes() > 0 and num_oom_kills() >= 0
