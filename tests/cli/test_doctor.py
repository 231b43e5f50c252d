"""`runtime check doctor` on machines made of files: a plain one, one with an NVIDIA driver, one with Ascend
devices."""

import socket
from pathlib import Path

import pytest

from runtime.cli.doctor import ascend
from runtime.cli.doctor import probe as look
from runtime.cli.doctor.machine import examine
from runtime.cli.doctor.probe import Finding
from runtime.options.compat.environment import ENVIRONMENT

FILES = {
    "proc/cpuinfo": "model name\t: Example CPU\nflags\t\t: fpu avx2 avx512f amx_bf16\n",
    "proc/meminfo": "MemTotal:       4194304 kB\nMemAvailable:   2097152 kB\n",
    "proc/sys/vm/swappiness": "60\n",
    "proc/sys/kernel/numa_balancing": "0\n",
    "sys/devices/system/node/node0/cpulist": "0-1\n",
}
ASCEND = FILES | {
    "dev/davinci0": "",
    "dev/davinci1": "",
    "usr/local/Ascend/driver/version.info": "Version=25.0.rc1\n",
    "opt/cann/aarch64-linux/ascend_toolkit_install.info": "version=8.2.RC1\n",
    "sys/devices/system/node/node1/cpulist": "2-3\n",
}
NVIDIA = FILES | {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n"}


def seen(
    root: Path, files: dict[str, str], environment: dict[str, str] | None = None, port: int = 0
) -> dict[str, Finding]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    findings = examine(host="127.0.0.1", port=port, root=root, environment=environment or {})
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def test_a_plain_machine(tmp_path: Path) -> None:
    found = seen(tmp_path, FILES)
    assert found["processor"].value.startswith("Example CPU, ")
    assert found["instructions"].value == "amx_bf16 avx512f avx2"
    assert found["memory"].value == "2.0 of 4.0 GiB available"
    assert found["cuda devices"].value == found["npu devices"].value == "none"
    assert found["numa nodes"] == Finding("numa nodes", "1")
    assert found["sysctl: vm.swappiness"] == Finding(
        "sysctl: vm.swappiness", "60", "ok", "recommended for npu devices: 0"
    )
    assert found["kernel: cpufreq scaling_governor"].value == "not present"
    assert "HCCL_BUFFSIZE" not in found and "cann" not in found


def test_a_machine_with_ascend_devices(tmp_path: Path) -> None:
    found = seen(tmp_path, ASCEND, {"ASCEND_HOME_PATH": "/opt/cann", "HCCL_BUFFSIZE": "200"})
    assert found["npu devices"].value == "2: davinci0 davinci1" and found["npu driver"] == Finding(
        "npu driver", "25.0.rc1"
    )
    assert found["cann"] == Finding("cann", "8.2.RC1")
    assert found["numa nodes"].verdict == "note" and "numactl" in found["numa nodes"].advice
    assert (
        found["sysctl: vm.swappiness"].verdict == "note"
        and found["sysctl: kernel.numa_balancing"].verdict == "ok"
    )
    assert (
        found["HCCL_BUFFSIZE"].value == "200" and "recommended 1200 or 400" in found["HCCL_BUFFSIZE"].advice
    )
    assert found["TASK_QUEUE_ENABLE"].value == "not set"
    assert {setting.name for setting in ENVIRONMENT} <= found.keys()


def test_ascend_without_cann(tmp_path: Path) -> None:
    found = seen(tmp_path, FILES | {"dev/davinci0": ""})
    assert found["cann"].verdict == "problem" and "set_env.sh" in found["cann"].advice


def test_a_machine_with_an_nvidia_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "ask", lambda *command: "Example GPU, 40960 MiB")
    assert seen(tmp_path, NVIDIA)["cuda devices"].value == "driver 570.86.15: Example GPU, 40960 MiB"


def test_a_tool_that_is_missing() -> None:
    assert look.ask("no-such-tool-of-any-kind") == ""


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = seen(tmp_path, FILES, port=server.getsockname()[1])
    assert found["port"].verdict == "problem" and "--port" in found["port"].advice


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "package", lambda name: None)
    found = seen(tmp_path, FILES)
    assert (
        found["torch"] == Finding("torch", "missing", "problem", "install it: pip install torch")
        and "torch_npu" not in found
    )


WELL = ASCEND | {
    "opt/cann/aarch64-linux/ascend_toolkit_install.info": "version=9.1.0\n",
    **{f"opt/cann/lib64/{name}": "" for name in ascend.LIBRARIES},
    "opt/cann/runtime/x": "",
    "opt/cann/compiler/x": "",
    "opt/cann/opp/x": "",
    "dev/davinci_manager": "",
    "dev/devmm_svm": "",
    "dev/hisi_hdc": "",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth1/operstate": "down\n",
    "sys/class/net/lo/operstate": "unknown\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "table.json": '{"status": "completed", "server_list": '
    '[{"device": [{"rank_id": "0"}, {"rank_id": "1"}]}]}',
}
SET = {"ASCEND_HOME_PATH": "/opt/cann", "ASCEND_OPP_PATH": "/opt/cann/opp"}
PACKAGES = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0", "uvloop": "1", "hypercorn": "1"}
TABLE = """\
| 0     910B3               | OK            | 89.7        38                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3349 / 65536         |
| 1     910B3               | Warning       | 89.7        38                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          60000/ 65536         |
"""


def problems(found: dict[str, Finding]) -> set[str]:
    machine = {"torch", "uvloop", "hypercorn", "python", "system", "port"}
    return {name for name, finding in found.items() if finding.verdict == "problem"} - machine


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    there = dict(PACKAGES)
    monkeypatch.setattr(look, "package", there.get)
    monkeypatch.setattr(look, "ask", lambda *command: "")
    return there


def test_a_server_that_is_well(tmp_path: Path, packages: dict[str, str]) -> None:
    environment = SET | {
        "HCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK_TABLE_FILE": "/table.json",
        "ASCEND_RT_VISIBLE_DEVICES": "1",
    }
    found = seen(tmp_path, WELL, environment)
    assert problems(found) == set()
    assert found["torch_npu and cann"].value == "2.13.0 and 9.1.0" and found["huge pages"].value == "madvise"


@pytest.mark.parametrize(
    ("environment", "name", "advice"),
    [
        ({"HCCL_SOCKET_IFNAME": "eth1"}, "HCCL_SOCKET_IFNAME", "there are eth0, eth1, lo"),
        ({"GLOO_SOCKET_IFNAME": "bond"}, "GLOO_SOCKET_IFNAME", "no such interface is up"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,7"}, "ASCEND_RT_VISIBLE_DEVICES", "no device 7"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING", "unset it"),
        ({"RANK_TABLE_FILE": "/none.json"}, "RANK_TABLE_FILE", "cannot be read"),
        ({"ASCEND_OPP_PATH": "/none"}, "ASCEND_OPP_PATH", "set_env.sh"),
        ({"ASCEND_HOME_PATH": "/opt"}, "ASCEND_HOME_PATH", "no runtime and no compiler"),
    ],
)
def test_what_the_environment_gets_wrong(
    tmp_path: Path, packages: dict[str, str], environment: dict[str, str], name: str, advice: str
) -> None:
    found = seen(tmp_path, WELL, SET | environment)
    assert name in problems(found) and advice in found[name].advice


@pytest.mark.parametrize(
    ("changed", "name", "advice"),
    [
        ({"torch": "2.12.0+cpu"}, "torch and torch_npu", "pip install torch==2.13.0 torch_npu==2.13.0"),
        ({"torch": "2.13.0+cu130"}, "torch and torch_npu", "without CUDA"),
    ],
)
def test_packages_that_do_not_belong_together(
    tmp_path: Path, packages: dict[str, str], changed: dict[str, str], name: str, advice: str
) -> None:
    packages |= changed
    found = seen(tmp_path, WELL, SET)
    assert problems(found) == {name} and advice in found[name].advice


def test_torch_npu_is_missing(tmp_path: Path, packages: dict[str, str]) -> None:
    del packages["torch_npu"]
    assert seen(tmp_path, WELL, SET)["torch_npu"].advice == "install it: pip install torch_npu==2.13.0"


def test_an_old_cann(tmp_path: Path, packages: dict[str, str]) -> None:
    found = seen(
        tmp_path, WELL | {"opt/cann/aarch64-linux/ascend_toolkit_install.info": "version=8.5.0\n"}, SET
    )
    assert (
        problems(found) == {"torch_npu and cann"}
        and "CANN 9.1 or newer" in found["torch_npu and cann"].advice
    )


def test_torch_npu_without_a_device(tmp_path: Path, packages: dict[str, str]) -> None:
    found = seen(tmp_path, FILES)
    assert "npu devices" in problems(found) and "/dev/davinci_manager" in found["npu devices"].advice


def test_missing_libraries_and_control_devices(tmp_path: Path, packages: dict[str, str]) -> None:
    files = {name: text for name, text in WELL.items() if not name.endswith(("libhccl.so", "hisi_hdc"))}
    found = seen(tmp_path, files, SET)
    assert problems(found) == {"cann libraries", "npu control devices"}
    assert (
        "libhccl.so" in found["cann libraries"].value
        and "--device /dev/hisi_hdc" in found["npu control devices"].advice
    )


def test_memory_and_health_of_devices(
    tmp_path: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "ask", lambda *command: TABLE)
    found = seen(tmp_path, WELL, SET)
    assert found["npu 0"] == Finding("npu 0", "910B3, OK, 3349 of 65536 MB in use")
    assert (
        found["npu 1"].verdict == "problem"
        and found["npu 1"].value == "910B3, Warning, 60000 of 65536 MB in use"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "as JSON"),
        ("[]", "server_list"),
        ('{"server_list": [{}], "status": "completed"}', "has no devices"),
        ('{"server_list": [{"device": [{}]}], "status": "initializing"}', "not 'completed'"),
        (
            '{"server_list": [{"device": [{"rank_id": 0}, {"rank_id": "0"}]}], "status": "completed"}',
            "same rank_id",
        ),
    ],
)
def test_rank_tables(text: str, problem: str) -> None:
    assert problem in ascend._rank_table_problem(text)
