"""A rank's main loop: `python -m runtime.ranks.worker`, started by actors/ranks.py with two rings.

    plans    reads    StartRank, then StepPlan ..., then StopRank
    results  writes   LoadProgress ..., RankReady, then (rank 0) a StepResult for each StepPlan; RankFailed before it ends in error

A device that computes while the host goes on has several steps at once: this loop launches what comes, and a
thread waits for results. Exit codes: 0 after StopRank, 1 after an exception, 2 when the device or model
cannot be started. Between steps the rank waits in the kernel. It dies with its parent, even if that is
killed. SIGUSR1 makes it write its stack to stderr and end, even where Python code cannot run, in a collective
that never returns; so does a crash. SIGUSR2 makes it write its stack and go on.
"""

import argparse
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NoReturn

from runtime.devices.base import Executor, Pending, open_device
from runtime.errors import ModelError, RingError, StartError
from runtime.messages.codec import Wire
from runtime.messages.lora import AdapterLoaded, LoadAdapter
from runtime.messages.memory import ChangeMemory, UpdateWeights
from runtime.messages.ranks import (
    Capture,
    CountExperts,
    FromRank,
    LoadProgress,
    Prepare,
    Profile,
    RankFailed,
    StartRank,
    StopRank,
    ToRank,
)
from runtime.messages.steps import StepPlan
from runtime.ranks.ring import Reader, RingFds, Writer

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_NAME = 15


class Later:
    """A thread that waits for steps in order and has their results sent. The device needs its host for
    nothing else meanwhile."""

    def __init__(self, send: Callable[[Pending], None], fail: Callable[[Exception], None]) -> None:
        """`fail` is told the exception of a step, after which nothing is sent any more."""
        self._send = send
        self._fail = fail
        self._steps = SimpleQueue[Pending | None]()
        self._thread = Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def put(self, step: Pending) -> None:
        self._steps.put(step)

    def finish(self) -> None:
        """Returns when all results have been sent. Nothing comes later."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._send(step)
            except Exception as error:
                self._fail(error)
                return


class Rank:
    """A rank between its two rings."""

    def __init__(self, rank: int, generation: int, plans: RingFds, results: RingFds) -> None:
        self._rank = rank
        self._reader = Reader(plans, generation)
        self._writer = Writer(results, generation)
        self._plans = Wire[ToRank](ToRank)
        self._results = Wire[FromRank](FromRank)
        self._sending = Lock()
        self._later: Later | None = None  # from the first step on that was not done when it was launched
        self._last_step = 0
        self._profile_until: int | None = None  # the step after which a profile is written

    def run(self) -> int:
        """Everything from the first record to the last; returns the exit code."""
        doing = "starting"
        try:
            start = self._receive()
            if not isinstance(start, StartRank):
                raise RingError(f"the first record is a {type(start).__name__}, not a StartRank")
            stay_on_node(start.numa_nodes, self._rank)
            executor: Executor = open_device(start.device, self._rank)
            self._send(executor.start(start, self._progress))
            doing = "running a step"
            while isinstance(
                plan := self._receive(),
                StepPlan
                | Capture
                | Profile
                | Prepare
                | LoadAdapter
                | CountExperts
                | ChangeMemory
                | UpdateWeights,
            ):
                if isinstance(plan, Capture):
                    self._capture(executor, plan)
                    continue
                if isinstance(plan, Prepare):
                    executor.prepare(plan.grammar)
                    continue
                if isinstance(plan, LoadAdapter):
                    Thread(
                        target=self._load_adapter, args=(executor, plan), name="adapter", daemon=True
                    ).start()
                    continue
                if isinstance(plan, CountExperts):
                    self._deliver(executor.count_experts(plan))
                    continue
                if isinstance(plan, ChangeMemory | UpdateWeights):
                    self._settle()
                    self._send(executor.change_memory(plan))
                    continue
                if isinstance(plan, Profile):
                    self._profile(executor, plan)
                    continue
                self._launch(executor, plan)
            self._settle()
            if not isinstance(plan, StopRank):
                raise RingError(f"a {type(plan).__name__} came where a StepPlan or StopRank was due")
            executor.close()
            return 0
        except StartError as error:
            self._send(RankFailed(self._rank, str(error), True))
            return 2
        except Exception as error:
            self._settle()  # what was launched before is done, or fails as well
            return self._fail(error, doing)

    def _launch(self, executor: Executor, plan: StepPlan) -> None:
        self._deliver(executor.launch(plan))
        if self._profile_until == plan.step:
            self._profile(executor, Profile())
        self._last_step = plan.step

    def _deliver(self, step: Pending) -> None:
        """Its result is sent in its turn, as soon as it has come."""
        if self._later is None and not step.is_done():
            self._later = Later(self._report, self._end)
        if self._later is None:
            self._report(step)
        else:
            self._later.put(step)

    def _capture(self, executor: Executor, wish: Capture) -> None:
        captured = executor.capture(wish.size, wish.unit)
        if self._rank == 0 or captured.is_fatal:
            self._send(captured)
        if captured.is_fatal:
            raise RuntimeError(captured.error)

    def _load_adapter(self, executor: Executor, load: LoadAdapter) -> None:
        """An adapter that cannot be loaded harms no request: none has it yet."""
        error = ""
        try:
            executor.load_adapter(load)
        except ModelError as fault:
            error = str(fault)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            error = "it could not be read; the server's log has the details"
        self._send(AdapterLoaded(load.id, self._rank, error))

    def _report(self, step: Pending) -> None:
        if (result := step.result()) is not None:
            self._send(result)

    def _settle(self) -> None:
        """Returns when the results of all steps have been sent."""
        if self._later is not None:
            self._later.finish()
            self._later = None

    def _fail(self, error: Exception, doing: str) -> int:
        """The parent gets the class only: the text may hold what a client must not see."""
        traceback.print_exception(error, file=sys.stderr)
        self._send(
            RankFailed(self._rank, f"{type(error).__name__} while {doing}; its stack is in the log", False)
        )
        return 1

    def _end(self, error: Exception) -> None:
        """A step failed on the device, in the thread that waits for results; the main one may be anywhere."""
        exit_now(self._fail(error, "running a step"))

    def _profile(self, executor: Executor, wish: Profile) -> None:
        """A profile that cannot be made or written harms no request."""
        self._settle()
        self._profile_until = None if wish.num_steps is None else self._last_step + wish.num_steps
        try:
            executor.profile(wish)
        except Exception:
            traceback.print_exc(file=sys.stderr)

    def _receive(self) -> ToRank:
        body = self._reader.read()
        assert body is not None  # there is no time limit
        return self._plans.decode(body)

    def _send(self, message: FromRank) -> None:
        with self._sending:
            self._writer.publish(self._results.encode(message))

    def _progress(self, phase: str, fraction: float) -> None:
        self._send(LoadProgress(self._rank, phase, fraction))


def stay_on_node(nodes: tuple[int, ...], rank: int, root: Path = Path("/sys/devices/system/node")) -> None:
    """Keeps this thread, and those that it starts, on the cores of the rank's node, and so its memory. Raises
    StartError."""
    if not nodes:
        return
    node = nodes[rank] if len(nodes) > 1 else nodes[0]
    try:
        text = (root / f"node{node}" / "cpulist").read_text(encoding="ascii").strip()
    except OSError:
        raise StartError(
            f"--numa-node {node} is no node of this machine; `runtime check doctor` counts them"
        ) from None
    spans = [part.split("-") for part in text.split(",") if part]
    cores = {
        core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)
    } & os.sched_getaffinity(0)
    if not cores:
        raise StartError(
            f"--numa-node {node}: this process may run on none of its cores ({text or 'it has none'}); choose another"
        )
    os.sched_setaffinity(0, cores)


def bind_to_parent(parent_pid: int, name: str) -> bool:
    """Asks the kernel to kill this process when the parent's thread that started it ends. False: it has ended
    already."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    return os.getppid() == parent_pid


def exit_now(code: int) -> NoReturn:
    """Without unloading libraries, which take long or hang after a failure; close() has done what matters."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="runtime.ranks.worker", description="One rank; started by the runtime, not by hand."
    )
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id")
    parser.add_argument(
        "--plans", type=RingFds.parse, required=True, help="descriptors of the ring that is read"
    )
    parser.add_argument(
        "--results", type=RingFds.parse, required=True, help="descriptors of the ring that is written"
    )
    given = parser.parse_args(arguments)
    faulthandler.enable()
    # chain: then do what the signal does by itself, end the process
    faulthandler.register(signal.SIGUSR1, chain=True)
    faulthandler.register(signal.SIGUSR2)
    if not bind_to_parent(given.parent, f"rank-{given.rank}"):
        return 1
    return Rank(given.rank, given.generation, given.plans, given.results).run()


if __name__ == "__main__":
    exit_now(main())
