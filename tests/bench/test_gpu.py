"""What the benches of a card make of what they see."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.gpu_idle import BUSY, idle_share
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
