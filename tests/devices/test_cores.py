"""Threads of one core count once, and quotas of control groups count."""

from pathlib import Path

import pytest

from runtime.devices.cores import usable_cores
from tests.devices.test_cgroup import V1, V2, make

SMT = {
    f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
    for cpu in range(8)
}
GROUP = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/app.slice/unit\n"}
GROUP_V1 = {"proc/self/mountinfo": V1, "proc/self/cgroup": "3:cpu,cpuacct:/box\n4:memory:/box\n"}


@pytest.mark.parametrize(
    "files, cpus, cores",
    [
        pytest.param({}, set(range(8)), 8, id="nothing known"),
        pytest.param(SMT, set(range(8)), 4, id="two threads a core"),
        pytest.param(SMT, {0, 4, 1}, 2, id="a set of CPUs"),
        pytest.param(
            GROUP | {"sys/fs/cgroup/app.slice/unit/cpu.max": "max 100000"}, {0, 1, 2}, 3, id="no limit"
        ),
        pytest.param(
            GROUP | {"sys/fs/cgroup/app.slice/cpu.max": "250000 100000"}, {0, 1, 2}, 2, id="2.5 CPUs"
        ),
        pytest.param(
            GROUP | {"sys/fs/cgroup/app.slice/unit/cpu.max": "50000 100000"}, {0, 1}, 1, id="half a CPU"
        ),
        pytest.param(
            GROUP_V1
            | {
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            {0, 1, 2},
            2,
            id="version 1",
        ),
        pytest.param(
            GROUP_V1
            | {
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            {0, 1, 2},
            3,
            id="version 1 without a limit",
        ),
    ],
)
def test_usable_cores(files: dict[str, str], cpus: set[int], cores: int, tmp_path: Path) -> None:
    assert usable_cores(cpus, make(tmp_path, files)) == cores
