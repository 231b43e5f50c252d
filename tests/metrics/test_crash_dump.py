"""Dumps after a death: made beside the event loop, bounded, and whole."""

import io
import json
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import msgspec
import pytest

from runtime import log
from runtime.errors import RankDied
from runtime.messages.requests import Chat, Embeds, GenerateRequest, Infill, Prompt, Text, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.metrics import crash_dump
from runtime.metrics.crash_dump import MAX_DUMPS, RECORD_BYTES, CrashDump, size_of
from runtime.metrics.line_writer import append
from runtime.metrics.request_records import Record

DIED = RankDied(0, -9, "was killed")


HI = Text("hi")


def record(id: str = "a", prompt: Prompt = HI, ended_s: float | None = None) -> Record:
    request = GenerateRequest(id=id, prompt=prompt, params=SamplingParams(), arrival_s=0)
    return Record(request, ended_s=ended_s)


def ended(id: str, num_chars: int = 2) -> Record:
    return record(id, Text("x" * num_chars), ended_s=crash_dump.monotonic())


def read(folder: Path) -> list[list[dict[str, Any]]]:
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.iterdir())]


def test_a_slow_disk_delays_no_caller_and_dumps_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the disk held up, `dump` returns; what runs on meanwhile does not change what is written."""
    may_write, threads = Event(), set[int]()

    def slow(file: Path, text: str) -> None:
        threads.add(get_ident())
        assert may_write.wait(60)
        append(file, text)

    monkeypatch.setattr(crash_dump, "append", slow)
    dump, lives = CrashDump(tmp_path, 3), record("lives")
    dump.ended(ended("gone"))
    lives.texts[0] = ["before"]
    for _ in range(MAX_DUMPS + 3):
        dump.dump(DIED, [lives])
    lives.texts[0].append("after")
    lives.texts[1] = ["more"]
    lives.reasons.append("length")
    may_write.set()
    dump.close(60)
    files = read(tmp_path)
    assert len(files) == MAX_DUMPS and get_ident() not in threads
    for crash, *requests in files:
        assert crash == {"event": "crash", "rank": 0, "exit_code": -9, "reason": str(DIED.reason)}
        assert [(each["rid"], each["state"], each["output"]) for each in requests] == [
            ("gone", "ended", []),
            ("lives", "running", ["before"]),
        ]
        assert requests[1]["finish_reasons"] == []


def test_a_long_dump_is_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []
    monkeypatch.setattr(
        crash_dump, "append", lambda file, text: blocks.append(len(text)) or append(file, text)
    )
    dump, size = CrashDump(tmp_path, 3), crash_dump.BLOCK_CHARS // 4
    for number in range(40):
        dump.ended(ended(str(number), size))
    dump.dump(DIED, [])
    dump.close(60)
    assert len(blocks) > 8 and max(blocks) < 2 * crash_dump.BLOCK_CHARS
    assert [line["rid"] for line in read(tmp_path)[0][1:]] == [*map(str, range(40))]


def test_what_is_kept_is_bounded_in_bytes_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = CrashDump(tmp_path, 3, max_bytes=10 * (RECORD_BYTES + 1000))
    for number in range(100):
        dump.ended(ended(str(number), 1000))
    dump.ended(ended("large", 10**6))  # larger than all that may be kept
    for number in range(5):
        dump.ended(ended(f"last {number}", 1000))
    monkeypatch.setattr(crash_dump, "CRASH_REQUESTS", 4)
    dump.ended(ended("one more"))
    dump.dump(DIED, [])
    dump.close(60)
    assert [line["rid"] for line in read(tmp_path)[0][1:]] == ["last 2", "last 3", "last 4", "one more"]
    for _ in range(5):
        dump.ended(ended("old", 10))
    assert dump._num_bytes == sum(size for _, size in dump._recent)


@pytest.mark.parametrize(
    ("prompt", "least"),
    [
        (Text("x" * 5000), 5000),
        (Tokens([1] * 1000), 8000),
        (Infill("x" * 3000, "y" * 2000), 5000),
        (Chat([{"role": "user", "content": [{"type": "text", "text": "x" * 5000}]}]), 5000),
        (Chat([], tools=[{"x" * 5000: 1}]), 5000),
        (Embeds([msgspec.Raw(b"[1.5]" * 1000)]), 5000),
        (Embeds([[1.0] * 1000]), 5000),
    ],
)
def test_prompts_of_every_kind_weigh(prompt: Prompt, least: int) -> None:
    assert RECORD_BYTES + least <= size_of(record(prompt=prompt)) < RECORD_BYTES + 20 * least


def test_a_folder_that_is_gone_is_logged(tmp_path: Path) -> None:
    stream = io.StringIO()
    log.setup("info", "json", stream)
    try:
        dump = CrashDump(tmp_path / "gone", 3)
        dump.dump(DIED, [record()])
        dump.close(60)
    finally:
        log.silence()
    assert "the last requests could not be written" in stream.getvalue()
