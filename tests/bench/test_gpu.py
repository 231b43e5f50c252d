"""What the benches of a card make of what they see."""

import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.gpu_idle import BUSY, idle_share
from bench.gpu_report import latest, table
from bench.gpu_run import PART_S, Section, groups, parts, run
from bench.lines import Figures, Lines
from bench.picture import draw


def test_idle_is_what_no_kernel_covers() -> None:
    events = [
        {"cat": "kernel", "ts": 10.0, "dur": 10.0},
        {"cat": "kernel", "ts": 15.0, "dur": 2.0},
        {"cat": "gpu_memcpy", "ts": 18.0, "dur": 4.0},
        {"cat": "cpu_op", "ts": 0.0, "dur": 99.0},
        {"cat": "kernel", "ts": 26.0, "dur": 4.0},
        {"cat": "kernel"},
    ]
    assert idle_share(events, BUSY) == pytest.approx(4 / 20)
    with pytest.raises(RuntimeError, match="recorded nothing"):
        idle_share(events[3:4], BUSY)


def test_the_picture(tmp_path: Path) -> None:
    path = draw(
        "A card & its limits",
        [("decode", 0.5, 0.85), ("prefill <8k>", 0.9, 0.65), ("beside", 1.7, None)],
        tmp_path / "x.svg",
    )
    tree = ElementTree.parse(path)
    widths = [float(one.get("width", 0)) for one in tree.iter("{http://www.w3.org/2000/svg}rect")]
    fills = [one.get("fill") for one in tree.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[2::2] == [200.0, 360.0, 400.0] and fills[2::2] == ["#c8553d", "#3a7d44", "#3a7d44"]


def is_alive(stat: Path) -> bool:
    """Whether the process of a /proc/PID/stat has not ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_sections_cost_each_other_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, one that is cut off together with what it has started, one without time: the others
    end, and each has a line."""
    pid_file = tmp_path / "pid"
    (tmp_path / "starts_another.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(other.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    sections = [
        Section("fails", ("no_such_module",), 0, 60),
        Section("works", ("this",), 0, 60),
        Section("hangs", ("starts_another",), 0, 6),
        Section("fails beside it", ("no_such_module",), 0, 60, joins=True),
        Section("has no time", ("this",), 10_000, 20_000),
    ]
    lines = Lines(tmp_path / "out" / "gpu.jsonl")
    bad = run(sections, lines, tmp_path, 600.0, is_dry=False)
    assert bad == ["fails", "hangs", "fails beside it", "has no time"]
    found = latest((tmp_path / "out" / "gpu.jsonl").read_text())["run"]
    assert found["fails"].startswith("failed with exit code 1 in")
    assert found["works"].startswith("done in")
    assert found["hangs"] == "cut off after 6 s" and found["has no time"].startswith("skipped: ")
    assert "no_such_module" in (tmp_path / "fails_beside_it.txt").read_text()
    other = Path(f"/proc/{pid_file.read_text()}/stat")
    until_s = time.monotonic() + 10  # it was killed, and ends when it gets a core
    while is_alive(other) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not is_alive(other)


def test_lines_are_there_at_once_and_become_a_table(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    figures = Figures("attention", Lines(path))
    figures["decode"] = {"ours": {"us": 2.5, "of_bandwidth": 0.5}}
    assert latest(path.read_text()) == {"attention": {"decode": figures["decode"]}}
    figures["decode"] = {"us": 3.5}
    figures["start_s"] = 1
    with path.open("a") as file:
        file.write('{"section": "attention", "na')  # the process was killed
    assert table(path.read_text()).splitlines()[2:] == [
        "| attention | decode | us 3.5 |",
        "| attention | start_s | 1 |",
    ]


def test_parts_fit_into_their_time() -> None:
    for name, sections in parts().items():
        assert sum(max(one.least_s for one in group) for group in groups(sections)) <= PART_S, name
        assert all(one.least_s <= one.most_s <= PART_S for one in sections), name


@pytest.mark.parametrize("part", ["B", "C", "D", "E"])
def test_every_line_runs_without_a_gpu(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_run", part, "--dry", "--seconds", "900"]
    environment = os.environ | {"OUT": str(tmp_path), "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = latest("\n".join(line for line in ran.stdout.splitlines() if line.startswith("{")))
    assert all(figure.startswith("done") for figure in found["run"].values())
    assert len(found) > 1 and list(tmp_path.iterdir()) == [], "nothing is recorded"
