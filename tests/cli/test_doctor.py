"""`runtime check doctor` on machines made of files: a plain one, one with an NVIDIA driver, one with Ascend devices."""

import socket
from pathlib import Path

import pytest

from runtime.cli import doctor
from runtime.cli.doctor import Finding, examine
from runtime.options.environment import ENVIRONMENT

FILES = {
    "proc/cpuinfo": "model name\t: Example CPU\nflags\t\t: fpu avx2 avx512f amx_bf16\n",
    "proc/meminfo": "MemTotal:       4194304 kB\nMemAvailable:   2097152 kB\n",
    "proc/sys/vm/swappiness": "60\n",
    "proc/sys/kernel/numa_balancing": "0\n",
    "sys/devices/system/node/node0/cpulist": "0-1\n",
}
ASCEND = FILES | {
    "dev/davinci0": "", "dev/davinci1": "",
    "usr/local/Ascend/driver/version.info": "Version=25.0.rc1\n",
    "opt/cann/aarch64-linux/ascend_toolkit_install.info": "version=8.2.RC1\n",
    "sys/devices/system/node/node1/cpulist": "2-3\n",
}
NVIDIA = FILES | {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n"}


def seen(root: Path, files: dict[str, str], environment: dict[str, str] | None = None, port: int = 0) -> dict[str, Finding]:
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
    assert found["sysctl: vm.swappiness"] == Finding("sysctl: vm.swappiness", "60", "ok", "recommended for npu devices: 0")
    assert found["kernel: cpufreq scaling_governor"].value == "not present"
    assert "HCCL_BUFFSIZE" not in found and "cann" not in found


def test_a_machine_with_ascend_devices(tmp_path: Path) -> None:
    found = seen(tmp_path, ASCEND, {"ASCEND_HOME_PATH": "/opt/cann", "HCCL_BUFFSIZE": "200"})
    assert found["npu devices"].value == "2: davinci0 davinci1, driver 25.0.rc1"
    assert found["cann"] == Finding("cann", "8.2.RC1")
    assert found["numa nodes"].verdict == "note" and "numactl" in found["numa nodes"].advice
    assert found["sysctl: vm.swappiness"].verdict == "note" and found["sysctl: kernel.numa_balancing"].verdict == "ok"
    assert found["HCCL_BUFFSIZE"].value == "200" and "recommended 1200 or 400" in found["HCCL_BUFFSIZE"].advice
    assert found["TASK_QUEUE_ENABLE"].value == "not set"
    assert {setting.name for setting in ENVIRONMENT} <= found.keys()


def test_ascend_without_cann(tmp_path: Path) -> None:
    found = seen(tmp_path, FILES | {"dev/davinci0": ""})
    assert found["cann"].verdict == "problem" and "set_env.sh" in found["cann"].advice


def test_a_machine_with_an_nvidia_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda *command: "Example GPU, 40960 MiB")
    assert seen(tmp_path, NVIDIA)["cuda devices"].value == "driver 570.86.15: Example GPU, 40960 MiB"


def test_a_tool_that_is_missing() -> None:
    assert doctor._ask("no-such-tool-of-any-kind") == ""


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = seen(tmp_path, FILES, port=server.getsockname()[1])
    assert found["port"].verdict == "problem" and "--port" in found["port"].advice


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_package", lambda name: None)
    found = seen(tmp_path, FILES)
    assert found["torch"] == Finding("torch", "missing", "problem", "install it: pip install torch") and "torch_npu" not in found
