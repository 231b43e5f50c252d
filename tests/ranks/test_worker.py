"""A rank process between two rings: what it answers, and how it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.errors import StartError
from runtime.messages.codec import Wire
from runtime.messages.ranks import (
    Capture,
    Captured,
    FromRank,
    LoadProgress,
    RankFailed,
    RankReady,
    StopRank,
    ToRank,
)
from runtime.messages.steps import StepPlan, StepResult
from runtime.ranks import ring, worker
from runtime.ranks.worker import bind_to_node
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
        arguments = [
            "--rank",
            "0",
            "--generation",
            str(generation),
            "--parent",
            str(parent or os.getpid()),
            "--plans",
            str(self.fds[0]),
            "--results",
            str(self.fds[1]),
        ]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "runtime.ranks.worker", *arguments],
            stderr=subprocess.PIPE,
            pass_fds=[*self.fds[0].flat(), *self.fds[1].flat()],
        )

    def send(self, message: Any) -> None:
        assert self.writer.try_publish(self.wire.encode(message))

    def receive(self) -> FromRank:
        body = self.reader.read(PATIENCE_S)
        assert body is not None, "the rank sends nothing"
        return Wire[FromRank](FromRank).decode(body)

    def receive_ready(self) -> RankReady:
        assert self.receive() == LoadProgress(0, "device", 1, 1)
        ready = self.receive()
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
    process.send(start_null(first_token=50, num_tokens=10))
    assert process.receive_ready().num_pages > 1
    for step in range(3):
        process.send(decodes(step, rows=2))
    process.send(StopRank())
    results = [process.receive() for _ in range(3)]
    assert [(r.step, r.token_ids.tolist()) for r in results if isinstance(r, StepResult)] == [
        (n, [51 + n] * 2) for n in range(3)
    ]
    assert process.end() == (0, "")


def test_a_capture_is_answered_between_steps(process: Process) -> None:
    for message in (start_null(), decodes(0), Capture(4), decodes(1), StopRank()):
        process.send(message)
    process.receive_ready()
    received = [process.receive() for _ in range(3)]
    assert [type(message) for message in received] == [StepResult, Captured, StepResult] and received[
        1
    ] == Captured(4, 0.0, 0, "")


def test_a_start_error_is_for_the_user(process: Process) -> None:
    process.send(start_rank("", device="abacus"))
    failed = process.receive()
    assert (
        isinstance(failed, RankFailed)
        and failed.is_start_error
        and "--device abacus is unknown" in failed.message
    )
    assert process.end() == (2, "")


def test_an_exception_in_a_step_reports_the_parent_its_class_and_the_log_its_stack(process: Process) -> None:
    process.send(start_null(fail_at_step=1))
    process.receive_ready()
    process.send(decodes(1))
    assert process.receive() == RankFailed(
        0, "RuntimeError while running a step; its stack is in the log", False
    )
    code, log = process.end()
    assert code == 1 and "asked to fail at step 1" in log and "Traceback" in log


def test_a_signal_makes_a_rank_write_its_stack_and_end(process: Process) -> None:
    process.send(start_null())
    process.receive_ready()
    process.popen.send_signal(signal.SIGUSR1)
    code, log = process.end()
    assert code == -signal.SIGUSR1 and "in run" in log  # it may not yet wait for a plan


def test_what_was_launched_before_a_failure_is_reported(process: Process) -> None:
    process.send(start_null(step_s=0.05, fail_at_step=2))
    process.receive_ready()
    for step in range(3):
        process.send(decodes(step))
    received = [process.receive() for _ in range(3)]
    assert [result.step for result in received[:2] if isinstance(result, StepResult)] == [0, 1]
    assert isinstance(received[2], RankFailed) and process.end()[0] == 1


class Busy:
    """An executor whose steps are done when the next one was launched; the last fails on the device."""

    def __init__(self, last: int) -> None:
        self.launched = [Event() for _ in range(last + 1)]
        self.ready = RankReady(
            rank=0, num_pages=2, weights_bytes=0, pages_bytes=0, device_name="busy", phases_s={}
        )

    def launch(self, plan: StepPlan) -> "BusyStep":
        self.launched[plan.step].set()
        return BusyStep(self.launched[plan.step + 1 :], plan.step)

    def close(self) -> None:
        return None


class BusyStep:
    def __init__(self, later: list[Event], step: int) -> None:
        self.later = later
        self.step = step

    def is_done(self) -> bool:
        return False

    def result(self) -> StepResult:
        if not self.later:
            raise MemoryError
        assert self.later[0].wait(PATIENCE_S), (
            "the next step was not launched before this one's result was there"
        )
        return StepResult(
            self.step, np.zeros(1, np.int32), -1, *(np.empty(0, np.float32) for _ in range(3)), [], 0.0
        )


def test_steps_are_launched_while_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)

    monkeypatch.setattr(worker, "open_executor", lambda rank, start, progress, reported: Busy(3))
    monkeypatch.setattr(worker, "exit_now", end)
    plans, results = ring.create(), ring.create()
    rank = worker.RankWorker(0, 1, plans, results)
    writer, reader, wire = ring.Writer(plans, 1), ring.Reader(results, 1), Wire[Any](ToRank)
    for message in (start_null(), *(decodes(step) for step in range(4)), StopRank()):
        writer.publish(wire.encode(message))
    rank.run()  # to its end, as the exit is only noted here
    received = []
    while (body := reader.read_nowait()) is not None:
        received.append(Wire[FromRank](FromRank).decode(body))
    assert [message.step for message in received if isinstance(message, StepResult)] == [
        0,
        1,
        2,
    ] and ended == [1]
    assert isinstance(received[-1], RankFailed) and "MemoryError" in received[-1].message
    for opened in (writer, reader, plans, results):
        opened.close()


def test_a_capture_that_others_wait_for_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so first, whichever rank it is."""
    fatal = Captured(4, 0.5, 0, "OutOfMemoryError: full", "sequences", True)
    executor = Busy(0)
    executor.capture = lambda size, unit: fatal  # type: ignore[attr-defined]
    monkeypatch.setattr(worker, "open_executor", lambda rank, start, progress, reported: executor)
    plans, results = ring.create(), ring.create()
    writer, reader, wire = ring.Writer(plans, 1), ring.Reader(results, 1), Wire[Any](ToRank)
    for message in (start_null(), Capture(4)):
        writer.publish(wire.encode(message))
    assert worker.RankWorker(1, 1, plans, results).run() == 1
    received = []
    while (body := reader.read_nowait()) is not None:
        received.append(Wire[FromRank](FromRank).decode(body))
    assert isinstance(received[0], RankReady) and received[1] == fatal and isinstance(received[2], RankFailed)
    for opened in (writer, reader, plans, results):
        opened.close()


@pytest.mark.parametrize(
    "messages,reason",
    [([StopRank()], "not a StartRank"), ([start_null(), start_null()], "StepPlan or StopRank was due")],
    ids=["no start", "two starts"],
)
def test_records_out_of_order_end_it(process: Process, messages: list[Any], reason: str) -> None:
    for message in messages:
        process.send(message)
    while not isinstance(failed := process.receive(), RankFailed):
        pass
    assert failed.message.startswith("RingError while") and not failed.is_start_error
    code, log = process.end()
    assert code == 1 and reason in log


def test_a_record_of_another_generation_ends_it() -> None:
    process = Process(generation=5)
    process.send(start_null())
    code, log = process.end()
    assert code == 1 and "generation 4 in a ring of generation 5" in log
    process.close()


def test_a_rank_whose_parent_is_gone_already_ends_at_once() -> None:
    process = Process(parent=os.getpid() + 1)
    assert process.end() == (1, "")
    process.close()


def test_an_idle_rank_waits_in_the_kernel(process: Process) -> None:
    process.send(start_null())
    process.receive_ready()
    process.send(decodes(0))
    process.receive()
    while state(process.popen.pid) != "S":  # sleeping; a rank that spins never is
        assert process.popen.poll() is None


def test_a_killed_rank_leaves_a_ring_that_can_be_read(process: Process) -> None:
    process.send(start_null())
    process.receive_ready()
    process.popen.send_signal(signal.SIGKILL)
    assert process.end()[0] == -signal.SIGKILL
    assert process.reader.read_nowait() is None


@pytest.mark.parametrize(
    ("nodes", "rank", "cores"),
    [((), 1, {0, 1, 2, 5}), ((0,), 1, {0, 1}), ((0, 1), 1, {2, 5}), ((0, 1), 0, {0, 1})],
)
def test_a_rank_stays_on_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], rank: int, cores: set[int]
) -> None:
    now = {0, 1, 2, 5}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(now))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: (now.clear(), now.update(chosen)))
    for name, text in (("node0", "0-1\n"), ("node1", "2,4-6\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text)
    bind_to_node(nodes, rank, tmp_path)
    assert now == cores


@pytest.mark.parametrize(
    ("nodes", "message"), [((7,), "--numa-node 7 is no node"), ((1,), "on none of its cores")]
)
def test_a_node_that_a_rank_cannot_stay_on_is_a_start_error(
    tmp_path: Path, nodes: tuple[int, ...], message: str
) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("900-901\n")
    with pytest.raises(StartError, match=message):
        bind_to_node(nodes, 0, tmp_path)


def test_a_rank_on_a_node_that_is_not_there_does_not_start(process: Process) -> None:
    process.send(msgspec.structs.replace(start_null(), numa_nodes=(4711,)))
    while not isinstance(failed := process.receive(), RankFailed):
        pass
    assert failed.is_start_error and "--numa-node 4711 is no node of this machine" in failed.message
