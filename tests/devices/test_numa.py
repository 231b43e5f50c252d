"""Nodes of made-up machines."""

import os
from pathlib import Path

import pytest

from runtime.devices.numa import cores_of
from runtime.errors import StartError


@pytest.fixture(autouse=True)
def _cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may run on CPUs 0 to 11 and 40."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(12), 40})


def make(root: Path, nodes: dict[int, str]) -> Path:
    for node, cpus in nodes.items():
        (root / f"node{node}").mkdir()
        (root / f"node{node}/cpulist").write_text(cpus + "\n")
    return root


def test_cores_of_a_node(tmp_path: Path) -> None:
    """Ranges, single CPUs and both, as far as the process's own set goes."""
    root = make(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15", 2: "5", 3: "9,40-47"})
    assert cores_of(0, root) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert cores_of(1, root) == {4, 5, 6, 7}
    assert cores_of(2, root) == {5}
    assert cores_of(3, root) == {9, 40}


def test_a_node_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--numa-node 4 is no node of this machine"):
        cores_of(4, make(tmp_path, {0: "0-3"}))


@pytest.mark.parametrize(("cpus", "words"), [("20-23", "20-23"), ("", "it has none")])
def test_a_node_without_cores_for_this_process(cpus: str, words: str, tmp_path: Path) -> None:
    """Memory alone, or CPUs of other sets."""
    with pytest.raises(StartError, match=f"may run on none of its cores \\({words}\\)"):
        cores_of(0, make(tmp_path, {0: cpus}))
