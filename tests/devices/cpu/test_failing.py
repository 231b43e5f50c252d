"""Captures that fail on one of two ranks, or on both, over gloo in processes of their own."""

from pathlib import Path

from tests.devices.cpu.ranks import RankProcess
from tests.models.make import make_checkpoint


def test_a_failure_on_one_rank_is_reported_at_once(tmp_path: Path) -> None:
    """Where the other one has come to its end as well, both give the size up; else the one that failed says
    that it is waited for."""
    folder = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=2)
    ranks = [RankProcess("tests.devices.cpu.failing_rank") for _ in range(2)]
    try:
        for number, rank in enumerate(ranks):
            rank.ask([number, str(folder), str(tmp_path / "meeting")])
        first, second = (
            [rank.answer() for _ in range(count)] for rank, count in zip(ranks, (3, 4), strict=True)
        )
    finally:
        for rank in ranks:
            rank.close()
    full, stranded = (
        "OutOfMemoryError: no room",
        "another rank has reported nothing since and may wait for this one",
    )
    assert first == [
        [full, False, []],
        ["another rank could not (OutOfMemoryError: no room for a tape)", False, []],
        ["", False, [3]],
    ]
    assert second == [
        [full, False, []],
        ["OutOfMemoryError: no room for a tape", False, []],
        ["", False, [3]],
        [f"{full}; {stranded}", True, [3]],
    ]
