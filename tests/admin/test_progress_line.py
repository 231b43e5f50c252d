"""A line about what takes long: at once readable on a terminal, seldom in a log."""

import io
import json
from collections.abc import Iterator

import pytest

from runtime import log
from runtime.admin.progress_line import LOG_S, REDRAW_S, Amount, ProgressLine


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Always."""
        return True


@pytest.fixture(autouse=True)
def _silent_again() -> Iterator[None]:
    yield
    log.silence()


def test_amounts() -> None:
    assert str(Amount.measured(1_200_000_000, 15 * 10**9, 0, 1.0)) == "1.2 of 15.0 GB"
    assert str(Amount.measured(3 * 10**9, 15 * 10**9, 10**9, 4.0)) == "3.0 of 15.0 GB, 500 MB/s, 24 s left"
    assert str(Amount.measured(3 * 10**9, 15 * 10**9, 10**9, 40.0)).endswith("50 MB/s, 4 min left")


def test_a_log_has_a_line_every_few_seconds() -> None:
    out, now = io.StringIO(), 0.0
    log.setup("info", "json", out)
    line = ProgressLine("start", lambda: now)
    for step in range(25):
        now = step * LOG_S / 10
        line.show("loading weights", f"{step}")
    assert [json.loads(each)["progress"] for each in out.getvalue().splitlines()] == ["10", "20"]
    line.end()
    line.show("again", "")
    assert "again" not in out.getvalue(), "what has just begun is not worth a line"


def test_a_terminal_has_one_line_below_the_log() -> None:
    out, now = Terminal(), 0.0
    log.setup("info", "text", out)
    line = ProgressLine("start", lambda: now)
    line.show("loading weights", "0")
    assert out.getvalue() == ""
    now = REDRAW_S
    line.show("loading weights", "1")
    log.get("server").warning("a warning")
    now = 2 * REDRAW_S
    line.show("loading weights", "2")
    line.end()
    log.get("server").info("ready")
    shown = screen(out.getvalue())
    assert "a warning" in shown[0] and "ready" in shown[1] and len(shown) == 3 and not shown[2]
    assert "loading weights: 1" in out.getvalue() and "loading weights: 2" in out.getvalue()


@pytest.mark.parametrize(("level", "form"), [("warning", "text"), ("info", "json")])
def test_none_where_it_would_be_in_the_way(level: str, form: str) -> None:
    out, now = Terminal(), 0.0
    log.setup(level, form, out)
    line = ProgressLine("start", lambda: now)
    line.show("loading weights", "0")
    now = REDRAW_S
    line.show("loading weights", "1")
    assert out.getvalue() == ""


def screen(text: str) -> list[str]:
    """What a terminal shows: a carriage return with the sequence that follows it clears the line."""
    return [line.rpartition("\r\x1b[K")[2] for line in text.split("\n")]
