"""Log lines: silent by default, two forms, one line a phase, and nothing of the application's logging
touched."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from runtime import log


@pytest.fixture(autouse=True)
def silent_again() -> Iterator[None]:
    yield
    log.silence()


def test_silent_until_asked(capsys: pytest.CaptureFixture[str]) -> None:
    log.get("x").critical("not written")
    assert capsys.readouterr() == ("", "")


def test_json_lines() -> None:
    stream = io.StringIO()
    logger = log.get("scheduler")  # made before setup: it follows
    log.setup("info", "json", stream)
    logger.info("ready", pages=3)
    logger.debug("too much")
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert (event["event"], event["pages"], event["part"], event["level"]) == (
        "ready",
        3,
        "scheduler",
        "info",
    )


def test_text_lines() -> None:
    stream = io.StringIO()
    log.setup("warning", "text", stream)
    log.get("x").info("quiet")
    log.get("x").warning("loud", reason="a b")
    assert (
        "loud" in stream.getvalue()
        and "reason='a b'" in stream.getvalue()
        and "quiet" not in stream.getvalue()
    )
    assert "\033" not in stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_stacks_are_logged(form: str) -> None:
    stream = io.StringIO()
    log.setup("error", form, stream)
    try:
        raise ValueError("boom")
    except ValueError:
        log.get("x").exception("failed")
    assert "ValueError: boom" in stream.getvalue()


def test_a_phase_has_one_line_with_its_time() -> None:
    stream = io.StringIO()
    log.setup("info", "json", stream)
    with log.phase("weights", bytes=7):
        assert stream.getvalue() == ""
    event = json.loads(stream.getvalue())
    assert event["event"] == "weights" and event["bytes"] == 7 and event["seconds"] >= 0


def test_a_clients_text_makes_no_lines_and_shifts_no_cursor() -> None:
    stream = io.StringIO()
    log.setup("info", "text", stream)
    log.get("x").info("asked", path="/a\n12:00:00 [info] forged", name="\x1b[2Jx", other="\u202ex")
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_libraries_log_has_the_same_form(form: str) -> None:
    stream, root = io.StringIO(), logging.getLogger()
    before = list(root.handlers)
    log.setup("info", form, stream)
    try:
        log.take_logging()
        log.take_logging()  # once is enough
        logging.getLogger("some.library").warning("a %s\nforged", "b")
        (line,) = stream.getvalue().splitlines()
        assert "some.library" in line and "forged" in line
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("some.library").exception("it failed")
        assert "ValueError: boom" in stream.getvalue()
    finally:
        root.handlers[:] = before


def test_the_applications_logging_is_its_own() -> None:
    before = (list(logging.getLogger().handlers), structlog.is_configured())
    log.setup("debug", "json", io.StringIO())
    log.get("x").info("line")
    assert (list(logging.getLogger().handlers), structlog.is_configured()) == before


def test_a_process_of_our_own_has_no_use_for_rich() -> None:
    """And hides it only while it imports structlog."""
    script = (
        "import sys; from runtime import log; log.import_structlog(); log.setup(); "
        "log.get('x').info('ready'); print('rich' in sys.modules); import rich; print(rich.__name__)"
    )
    pytest.importorskip("rich")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "rich"] and "ready" in done.stderr


def test_lines_that_cannot_be_written_are_lost_and_counted() -> None:
    class Disk(io.StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    disk = Disk()
    log.setup("info", "json", disk)
    for number in range(3):
        log.get("x").info("lost", number=number)
    disk.is_full = False
    log.get("x").info("written")
    log.get("x").info("again")
    events = [json.loads(line) for line in disk.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        "written",
        "lines were lost: they could not be written",
        "again",
    ]
    assert events[1]["lines"] == 3


def test_a_process_whose_stderr_is_full_goes_on_and_ends() -> None:
    """With stderr on a full disk, stacks are lost and `exit_now` ends the process with its code."""
    code = (
        "from runtime import log\n"
        "from runtime.ranks.own_process import exit_now\n"
        "log.setup()\n"
        "log.get('x').info('lost')\n"
        "try:\n"
        "    1 / 0\n"
        "except ZeroDivisionError:\n"
        "    log.write_stack()\n"
        "exit_now(7)\n"
    )
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full, check=False).returncode == 7
