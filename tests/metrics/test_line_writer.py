"""Lines that a thread writes: in order, and lost with a disk that takes nothing."""

import os
import threading
from pathlib import Path

import pytest

from runtime.metrics import line_writer
from runtime.metrics.line_writer import LineWriter


def test_lines_come_in_order_and_to_their_files(tmp_path: Path) -> None:
    writer = LineWriter()
    for number in range(1000):
        writer.put(tmp_path / f"{number % 3}", f"{number}\n")
    writer.close()
    for rest in range(3):
        path = tmp_path / f"{rest}"
        assert path.read_text().split() == [str(number) for number in range(rest, 1000, 3)]
        assert path.stat().st_mode & 0o777 == 0o600
    assert writer.num_lost == 0


def test_a_disk_that_hangs_delays_nothing_and_loses_what_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, begun = threading.Event(), threading.Event()
    append = line_writer.append

    def hang(file: Path, text: str) -> None:
        begun.set()
        assert goes_on.wait(60)
        append(file, text)

    monkeypatch.setattr(line_writer, "append", hang)
    writer = LineWriter(max_bytes=1000)
    writer.put(tmp_path / "log", "0123456789" * 10)
    assert begun.wait(60)
    for _ in range(100):
        writer.put(tmp_path / "log", "0123456789" * 10)  # returns, whatever the disk does
    assert writer.num_lost == 91
    goes_on.set()
    writer.close()
    assert (tmp_path / "log").stat().st_size == 1000


def test_a_full_disk_loses_lines_and_the_next_ones_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    is_full = True

    def full(file: int, data: memoryview) -> int:
        if is_full and len(data) < 4:
            raise OSError(28, "No space left on device")
        return write(file, data[:4] if is_full else data)

    monkeypatch.setattr(line_writer.os, "write", full)
    path = tmp_path / "log"
    writer = LineWriter()
    writer.put(path, "lost 1\n")
    writer.close()
    assert (path.read_text(), writer.num_lost) == ("", 1), "no half of a line"
    is_full = False
    writer = LineWriter()
    writer.put(path, "whole\n")
    writer.close()
    assert path.read_text() == "whole\n"
