"""What is said while a server starts: the rank that is furthest behind, its rate, and nothing afterwards."""

import io
import json
from collections.abc import Iterator

import anyio
import pytest

from runtime import log
from runtime.admin import progress_line, start_progress
from runtime.admin.start_progress import StartProgress
from runtime.messages.ranks import LoadProgress
from runtime.service import Health

GB = 10**9


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_rank_that_is_furthest_behind_counts(clock: Clock) -> None:
    start = StartProgress(clock=clock)
    for replica, rank in ((0, 0), (0, 1), (1, 0)):
        start.rank(replica, LoadProgress(rank, "process"))
    assert start.health("loading") == Health("loading", "starting ranks", "process", 0.0)
    start.rank(0, LoadProgress(0, "pages"))
    start.rank(0, LoadProgress(1, "weights", 3 * GB, 4 * GB))
    start.rank(1, LoadProgress(0, "weights", 1 * GB, 4 * GB))
    assert start.health("recovering").fraction == 0.25
    start.rank(1, LoadProgress(0, "weights", 4 * GB, 4 * GB))
    assert start.health("recovering") == Health(
        "recovering", "loading weights: 3.0 of 4.0 GB", "weights", 0.75
    )
    for replica, rank in ((0, 0), (0, 1), (1, 0)):
        start.rank(replica, LoadProgress(rank, "ready"))
    assert start.health("loading") == Health("loading") and start.stage is None


def test_rate_and_time_left_count_from_the_first_bytes_of_this_start(clock: Clock) -> None:
    """What was downloaded by an earlier start is no speed of this one."""
    start = StartProgress(clock=clock)
    start.update("download")
    clock.now_s += 60  # the hub answers
    start.update("download", 10 * GB, 20 * GB)
    clock.now_s += 1
    start.update("download", 11 * GB, 20 * GB)
    assert start.detail == "downloading the model: 11.0 of 20.0 GB"
    clock.now_s += 9
    start.update("download", 12 * GB, 20 * GB)
    assert start.detail == "downloading the model: 12.0 of 20.0 GB, 200 MB/s, 40 s left"
    start.end()
    assert start.detail == ""


def test_parts_and_seconds_where_there_are_no_bytes(clock: Clock) -> None:
    start = StartProgress(is_quantizing=True, clock=clock)
    start.rank(0, LoadProgress(0, "weights"))
    clock.now_s += 200
    assert start.detail == "loading and quantizing weights: 3 min"
    start.rank(0, LoadProgress(0, "packing", 7, 28))
    assert start.detail == "packing weights: 7 of 28"


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    log.setup("info", "json", stream)
    yield stream
    log.silence()


@pytest.mark.anyio
async def test_log_lines_come_while_nothing_is_reported(
    output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase that reports nothing for long is mentioned all the same, again and again, and not when it is
    over; a second start is shown as the first was."""
    monkeypatch.setattr(progress_line, "LOG_S", 0.0)
    monkeypatch.setattr(start_progress, "REDRAW_S", 0.001)
    start = StartProgress()

    async def shown(event: str, count: int) -> None:
        with anyio.fail_after(60):
            while output.getvalue().count(f'"{event}"') < count:
                await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start.run)
        for _ in range(2):
            start.rank(0, LoadProgress(0, "profile"))
            await shown("profile run", output.getvalue().count('"profile run"') + 3)
            start.rank(0, LoadProgress(0, "ready"))
            await anyio.sleep(0.02)
            length = len(output.getvalue())
            await anyio.sleep(0.02)
            assert len(output.getvalue()) == length
        tasks.cancel_scope.cancel()
    assert all(json.loads(line)["part"] == "start" for line in output.getvalue().splitlines())
