"""A rank process between two rings: what it answers, and how it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.devices import ring
from runtime.messages import FromRank, LoadProgress, RankFailed, RankReady, StepResult, StopRank, ToRank
from runtime.wire import Wire
from tests.devices.drive import start_rank
from tests.devices.plans import decodes, start_null

PATIENCE_S = 30.0  # only a failing test waits for so long


class Process:
    """A rank and the other ends of its rings."""

    def __init__(self, parent: int | None = None, generation: int = 4) -> None:
        self.fds = (ring.create(), ring.create())
        self.writer = ring.Writer(self.fds[0], 4)
        self.reader = ring.Reader(self.fds[1], 4)
        self.wire = Wire[Any](ToRank)
        arguments = ["--rank", "0", "--generation", str(generation), "--parent", str(parent or os.getpid()),
                     "--plans", str(self.fds[0]), "--results", str(self.fds[1])]
        self.popen = subprocess.Popen([sys.executable, "-m", "runtime.devices.worker", *arguments], stderr=subprocess.PIPE,
                                      pass_fds=[*self.fds[0].flat(), *self.fds[1].flat()])

    def say(self, message: Any) -> None:
        assert self.writer.try_publish(self.wire.encode(message))

    def hear(self) -> FromRank:
        body = self.reader.read(PATIENCE_S)
        assert body is not None, "the rank says nothing"
        return Wire[FromRank](FromRank).decode(body)

    def hear_ready(self) -> RankReady:
        assert self.hear() == LoadProgress(0, "start", 1.0)
        ready = self.hear()
        assert isinstance(ready, RankReady) and ready.device_name == "null"
        return ready

    def end(self) -> tuple[int, str]:
        """Exit code and what it logged."""
        _, log = self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode, log.decode()

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()
        for end in (self.writer, self.reader, *self.fds):
            end.close()


def state(pid: int) -> str:
    """R, S, Z ...: see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def test_a_rank_starts_steps_and_stops(process: Process) -> None:
    process.say(start_null(first_token=50, num_tokens=10))
    assert process.hear_ready().num_pages > 1
    for step in range(3):
        process.say(decodes(step, position=step, rows=2))
    process.say(StopRank())
    results = [process.hear() for _ in range(3)]
    assert [(r.step, r.token_ids.tolist()) for r in results if isinstance(r, StepResult)] == [(n, [51 + n] * 2) for n in range(3)]
    assert process.end() == (0, "")


def test_a_start_error_is_for_the_user(process: Process) -> None:
    process.say(start_rank("", device="abacus"))
    failed = process.hear()
    assert isinstance(failed, RankFailed) and failed.is_start_error and "--device abacus is unknown" in failed.message
    assert process.end() == (2, "")


def test_an_exception_in_a_step_tells_the_parent_its_class_and_the_log_its_stack(process: Process) -> None:
    process.say(start_null(fail_at_step=1))
    process.hear_ready()
    process.say(decodes(1))
    assert process.hear() == RankFailed(0, "RuntimeError while running a step; its stack is in the log", False)
    code, log = process.end()
    assert code == 1 and "asked to fail at step 1" in log and "Traceback" in log


def test_a_signal_makes_a_rank_write_its_stack_and_end(process: Process) -> None:
    process.say(start_null())
    process.hear_ready()
    process.popen.send_signal(signal.SIGUSR1)
    code, log = process.end()
    assert code == -signal.SIGUSR1 and "in run" in log  # it may not yet wait for a plan


@pytest.mark.parametrize("messages,reason", [
    ([StopRank()], "not a StartRank"), ([start_null(), start_null()], "StepPlan or StopRank was due")], ids=["no start", "two starts"])
def test_records_out_of_order_end_it(process: Process, messages: list[Any], reason: str) -> None:
    for message in messages:
        process.say(message)
    while not isinstance(failed := process.hear(), RankFailed):
        pass
    assert failed.message.startswith("RingError while") and not failed.is_start_error
    code, log = process.end()
    assert code == 1 and reason in log


def test_a_record_of_another_generation_ends_it() -> None:
    process = Process(generation=5)
    process.say(start_null())
    code, log = process.end()
    assert code == 1 and "generation 4 in a ring of generation 5" in log
    process.close()


def test_a_rank_whose_parent_is_gone_already_ends_at_once() -> None:
    process = Process(parent=os.getpid() + 1)
    assert process.end() == (1, "")
    process.close()


def test_an_idle_rank_waits_in_the_kernel(process: Process) -> None:
    process.say(start_null())
    process.hear_ready()
    process.say(decodes(0))
    process.hear()
    while state(process.popen.pid) != "S":  # sleeping; a rank that spins never is
        assert process.popen.poll() is None


def test_a_killed_rank_leaves_a_ring_that_can_be_read(process: Process) -> None:
    process.say(start_null())
    process.hear_ready()
    process.popen.send_signal(signal.SIGKILL)
    assert process.end()[0] == -signal.SIGKILL
    assert process.reader.read_nowait() is None
