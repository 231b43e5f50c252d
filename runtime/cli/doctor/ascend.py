"""Ascend devices: driver, CANN, torch_npu and what belongs together, interfaces, rank table, huge pages,
cores.

Versions that belong together: the table of torch_npu's makers (Ascend/pytorch, COMPATIBILITY). Directories of
CANN: what torch_npu's loader asks for.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from runtime.cli.doctor import probe as look
from runtime.cli.doctor.probe import Finding, read

# the oldest CANN; older torch is too old for this runtime
CANN_OF_TORCH = {"2.11": (9, 1), "2.12": (9, 1), "2.13": (9, 1)}
LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libopapi.so",
    "libnnopbase.so",
    "libge_runner.so",
    "libgraph.so",
)
INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
USUAL_HOME = "/usr/local/Ascend/ascend-toolkit/latest"


def examine(root: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that is particular to Ascend; one line where there are no devices and nothing was installed
    for them."""
    devices = sorted(
        (path.name for path in (root / "dev").glob("davinci[0-9]*")), key=lambda name: int(name[7:])
    )
    torch_npu = look.package("torch_npu")
    if not devices:
        yield Finding(
            "npu devices",
            "none",
            "problem" if torch_npu else "ok",
            "torch_npu is installed and finds no device: load the driver, or give the container "
            "/dev/davinci*, "
            "/dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc"
            if torch_npu
            else "",
        )
        if torch_npu is None:
            return
    else:
        yield from _devices(root, devices, environment)
    cann = _cann_version(root, environment)
    yield from _cann(root, environment, cann)
    yield from _packages(torch_npu, cann)
    yield from _memory()
    yield from _interfaces(root, environment)
    yield from _rank_table(root, environment)
    yield from _host(root, environment, len(devices))


def _devices(root: Path, devices: list[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    driver = re.search(r"Version=(\S+)", read(root / "usr/local/Ascend/driver/version.info"))
    yield Finding("npu devices", f"{len(devices)}: {' '.join(devices)}")
    yield Finding(
        "npu driver",
        driver[1] if driver else "unknown",
        "ok" if driver else "problem",
        ""
        if driver
        else "install the driver that goes with CANN, or mount /usr/local/Ascend/driver into the container",
    )
    missing = [
        name for name in ("davinci_manager", "devmm_svm", "hisi_hdc") if not (root / "dev" / name).exists()
    ]
    if missing:
        yield Finding(
            "npu control devices",
            f"no {', '.join(missing)}",
            "problem",
            "give the container " + " ".join(f"--device /dev/{name}" for name in missing),
        )
    chosen = environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if chosen is not None:
        numbers = [number.strip() for number in chosen.split(",") if number.strip()]
        unknown = [number for number in numbers if f"davinci{number}" not in devices]
        yield Finding(
            "ASCEND_RT_VISIBLE_DEVICES",
            chosen,
            "problem" if unknown else "ok",
            f"there is no device {', '.join(unknown)}; unset it or name devices that are there"
            if unknown
            else "",
        )


def _memory() -> Iterator[Finding]:
    """Two lines a device in the table of npu-smi: name and health, then bus and memory."""
    heads = re.findall(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\w+)\s*\|", table := look.ask("npu-smi", "info"), re.M)
    used = re.findall(r"(\d+)\s*/\s*(\d+)\s*\|\s*$", table, re.M)[1::2]
    for (number, name, health), (taken, size) in zip(heads, used, strict=False):
        is_well, is_empty = health == "OK", int(taken) * 10 < int(size)
        advice = (
            "reset it or leave it out with ASCEND_RT_VISIBLE_DEVICES; npu-smi info -t health says more"
            if not is_well
            else "another process holds memory; npu-smi info names it"
            if not is_empty
            else ""
        )
        yield Finding(
            f"npu {number}",
            f"{name}, {health}, {taken} of {size} MB in use",
            "problem" if not is_well else "ok" if is_empty else "note",
            advice,
        )


def _home(root: Path, environment: Mapping[str, str]) -> Path:
    return root / environment.get("ASCEND_HOME_PATH", USUAL_HOME).lstrip("/")


def _cann_version(root: Path, environment: Mapping[str, str]) -> str | None:
    found = next((path for path in _home(root, environment).glob("*/ascend_toolkit_install.info")), None)
    toolkit = re.search(r"version=(\S+)", read(found)) if found else None
    return toolkit[1] if toolkit else None


def _cann(root: Path, environment: Mapping[str, str], version: str | None) -> Iterator[Finding]:
    yield Finding(
        "cann",
        version or "not found",
        "ok" if version else "problem",
        "" if version else "install CANN and source its set_env.sh, which sets ASCEND_HOME_PATH",
    )
    home = _home(root, environment)
    if "ASCEND_HOME_PATH" not in environment:
        yield Finding(
            "ASCEND_HOME_PATH",
            "not set",
            "problem",
            "source set_env.sh of CANN in the shell that starts the server",
        )
    else:
        lost = [name for name in ("runtime", "compiler") if not (home / name).is_dir()]
        yield Finding(
            "ASCEND_HOME_PATH",
            environment["ASCEND_HOME_PATH"],
            "problem" if lost else "ok",
            f"it has no {' and no '.join(lost)}: name the toolkit's own folder, as its set_env.sh does"
            if lost
            else "",
        )
        opp = environment.get("ASCEND_OPP_PATH")
        is_there = opp is not None and (root / opp.lstrip("/")).is_dir()
        yield Finding(
            "ASCEND_OPP_PATH",
            opp or "not set",
            "ok" if is_there else "problem",
            "" if is_there else "operators are not found without it; source set_env.sh of CANN",
        )
    folders = [
        home / "lib64",
        *(root / path.lstrip("/") for path in environment.get("LD_LIBRARY_PATH", "").split(":") if path),
    ]
    missing = [name for name in LIBRARIES if not any((folder / name).exists() for folder in folders)]
    if version and missing:
        yield Finding(
            "cann libraries",
            f"no {', '.join(missing)}",
            "problem",
            "they are neither in lib64 of CANN nor on LD_LIBRARY_PATH; install the kernels package of CANN "
            "and source set_env.sh",
        )


def _packages(torch_npu: str | None, cann: str | None) -> Iterator[Finding]:
    torch = look.package("torch") or ""
    if torch_npu is None:
        yield Finding(
            "torch_npu",
            "missing",
            "problem",
            f"install it: pip install torch_npu=={_base(torch) or '2.13.0'}",
        )
        return
    if _base(torch) != _base(torch_npu):
        yield Finding(
            "torch and torch_npu",
            f"{torch} and {torch_npu}",
            "problem",
            f"they belong together: pip install torch=={_base(torch_npu)} torch_npu=={_base(torch_npu)}",
        )
    elif "+cu" in torch:
        yield Finding(
            "torch and torch_npu",
            f"{torch} and {torch_npu}",
            "problem",
            "torch_npu needs torch without CUDA: install the wheel of the CPU index",
        )
    else:
        yield Finding("torch and torch_npu", f"{torch} and {torch_npu}")
    least, found = (
        CANN_OF_TORCH.get(".".join(_base(torch_npu).split(".")[:2])),
        re.match(r"(\d+)\.(\d+)", cann or ""),
    )
    if least is not None and found is not None:
        is_new = (int(found[1]), int(found[2])) >= least
        wanted = ".".join(map(str, least))
        yield Finding(
            "torch_npu and cann",
            f"{torch_npu} and {cann}",
            "ok" if is_new else "problem",
            ""
            if is_new
            else f"torch_npu {_base(torch_npu)} goes with CANN {wanted} or newer; install that, and its "
            "driver",
        )


def _base(version: str) -> str:
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else ""


def _interfaces(root: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    there = {path.name: read(path / "operstate").strip() for path in (root / "sys/class/net").glob("*")}
    for name in INTERFACES:
        if (wanted := environment.get(name)) is None:
            yield Finding(name, "not set", "ok", "several servers need it, one does not")
            continue
        plain = wanted.lstrip("=^").split(",")[0]
        matches = [state for interface, state in there.items() if interface.startswith(plain)]
        is_up = any(state in ("up", "unknown") for state in matches)
        known = ", ".join(sorted(there)) or "none"
        yield Finding(
            name,
            wanted,
            "ok" if is_up else "problem",
            "" if is_up else f"no such interface is up; there are {known}; on one server leave it out",
        )


def _rank_table(root: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    if (name := environment.get("RANK_TABLE_FILE")) is None:
        return
    problem = _rank_table_problem(read(root / name.lstrip("/")))
    yield Finding(
        "RANK_TABLE_FILE",
        name,
        "problem" if problem else "ok",
        f"{problem}; one server needs no rank table: unset it, or write it anew" if problem else "",
    )


def _rank_table_problem(text: str) -> str:
    """Nothing for a table that HCCL can read: status completed, and a device list for each server."""
    try:
        table: object = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return "it cannot be read as JSON"
    if (
        not isinstance(table, dict)
        or not isinstance(servers := table.get("server_list"), list)
        or not servers
    ):
        return "it has no server_list"
    if table.get("status") != "completed":
        return f"its status is {table.get('status')!r}, not 'completed'"
    if not all(isinstance(server, dict) and server.get("device") for server in servers):
        return "a server in it has no devices"
    ids = [
        str(device.get("rank_id"))
        for server in servers
        for device in server["device"]
        if isinstance(device, dict)
    ]
    return "" if len(set(ids)) == len(ids) else "two devices in it have the same rank_id"


def _host(root: Path, environment: Mapping[str, str], num_devices: int) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    is_enough = cores > num_devices
    yield Finding(
        "cores for npu ranks",
        f"{cores} for {num_devices} devices",
        "ok" if is_enough else "note",
        ""
        if is_enough
        else "each rank and the event loop want a core of their own: widen the affinity (taskset, cpuset of "
        "the "
        "container), or use fewer devices",
    )
    mode = re.search(r"\[(\w+)\]", read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    if mode is not None:
        is_on = mode[1] != "never"
        yield Finding(
            "huge pages",
            mode[1],
            "ok" if is_on else "note",
            ""
            if is_on
            else "pinned host memory is slow to map: echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled",
        )
    if environment.get("ASCEND_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Finding(
            "ASCEND_LAUNCH_BLOCKING",
            environment["ASCEND_LAUNCH_BLOCKING"],
            "problem",
            "every kernel is waited for, and no graph can be captured; unset it",
        )
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield Finding("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", "ok", "the ranks load torch_npu themselves")
