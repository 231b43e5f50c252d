"""A rank's main loop: `python -m runtime.ranks.worker`, started by actors/ranks.py with two rings.

    plans    reads    StartRank, then RankCommand ..., then StopRank
    results  writes   LoadProgress ..., RankReady, then answers to commands; RankFailed before an end in error

With `--import DEVICE` it imports what the device needs before it reads StartRank; a standby rank
(`--standby`) does so at low priority, and writes StandingBy when it has done so. With `--fork-server FD` it
makes the fork server of its generation and later ones (ranks/forks.py) when it has imported them. With
`--early FD` it imports first, and is then given all its other arguments (ranks/early.py).

One rank (StartRank.reporter) answers each StepPlan with a StepResult. A device that computes asynchronously
has several steps in flight: the main thread launches them, and another thread waits for results. Between
steps the rank waits in the kernel. Exit codes: 0 after StopRank, 1 after an exception, 2 if the device or the
model cannot be started. The kernel kills the rank when its parent ends, even if the parent is killed.

SIGUSR1 makes the rank write its stack to stderr and end, even while Python code cannot run because a
collective never returns; so does a crash. SIGUSR2 makes it write its stack and continue.
"""

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, get_native_id

from msgspec import structs

from runtime import log
from runtime.devices.executor import Executor, Pending
from runtime.devices.numa import NODES, cores_of
from runtime.errors import ModelError, RingError, StartError
from runtime.freed_memory import return_freed_memory
from runtime.messages.codec import Wire
from runtime.messages.experts import ExpertsPlaced, MoveExperts, ReadExperts
from runtime.messages.lora import AdapterLoaded, LoadAdapter
from runtime.messages.media import AlignSound, Encode, EncodeRows
from runtime.messages.memory import ChangeMemory, UpdateWeights
from runtime.messages.ranks import (
    Capture,
    CountExperts,
    FromRank,
    GrammarPrepared,
    LoadPhase,
    LoadProgress,
    PrepareGrammar,
    Profile,
    RankCommand,
    RankFailed,
    StandingBy,
    StartRank,
    StopRank,
    ToRank,
)
from runtime.messages.steps import GroupSteps, PartsSaved, StepPlan, StepResult
from runtime.ranks.early import await_rank
from runtime.ranks.forks import fork_as_sibling, may_fork, serve_forks, take_descriptors
from runtime.ranks.open_executor import import_device, open_executor
from runtime.ranks.own_process import bind_to_parent, exit_now, set_process_name
from runtime.ranks.ring import Reader, RingFds, Writer

LOW_PRIORITY = 10  # nice value: a tenth of a processor that others use as well


class ResultThread:
    """A thread that waits for launched steps in order and has their results sent, while the main thread
    launches the next ones."""

    def __init__(self, send: Callable[[Pending], None], fail: Callable[[Exception], None]) -> None:
        """`fail` is called with the exception of a step; nothing is sent after it."""
        self._send = send
        self._fail = fail
        self._steps = SimpleQueue[Pending | None]()
        self._thread = Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def put(self, step: Pending) -> None:
        """Appends a step to those that are waited for."""
        self._steps.put(step)

    def finish(self) -> None:
        """Ends the thread; returns when all results have been sent."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._send(step)
            except Exception as error:
                self._fail(error)
                return


class RankWorker:
    """A rank between its two rings."""

    def __init__(
        self,
        rank: int,
        generation: int,
        plans: RingFds,
        results: RingFds,
        *,
        imports: str = "",
        is_standby: bool = False,
    ) -> None:
        """`imports`: the device whose libraries are imported before a StartRank is read; empty: none."""
        self._rank = rank
        self._imports = imports
        self._is_standby = is_standby
        self._reader = Reader(plans, generation)
        self._writer = Writer(results, generation)
        self._plans = Wire[ToRank](ToRank)
        self._results = Wire[FromRank](FromRank)
        self._reports = False  # it answers for all ranks
        self._group = 0  # its attention group
        self._sending = Lock()
        self._result_thread: ResultThread | None = None  # from the first step on that took time after launch
        self._last_step = 0
        self._profile_until: int | None = None  # the step after which a profile is written

    def run(self) -> int:
        """Serves all records of the ring; returns the exit code."""
        doing = "starting"
        if self._is_standby:
            Thread(target=self._stand_by, name="standby", daemon=True).start()
        try:
            if self._imports and not self._is_standby:
                import_device(self._imports)
            start = self._receive()
            if not isinstance(start, StartRank):
                raise RingError(f"the first record is a {type(start).__name__}, not a StartRank")
            if self._is_standby:
                set_process_name(f"rank-{self._rank}")
            if start.log_level in log.LEVELS:
                log.setup(start.log_level, start.log_format)
            bind_to_node(start.numa_nodes, start.index_on_node(self._rank))
            self._reports = self._rank == start.reporter
            layout, (stage, place) = start.attention_layout, divmod(self._rank, start.tp_size)
            self._group = layout.group_of(place)
            own = self._group, stage * layout.group_size + place % layout.group_size
            executor = open_executor(
                self._rank, start, self._progress, lambda *saved: self._send(PartsSaved(*own, *saved))
            )
            self._send(executor.ready)
            return_freed_memory()
            doing = "running a step"
            while not isinstance(command := self._receive(), StopRank | StartRank):
                self._execute(executor, command)
            self._drain()
            if not isinstance(command, StopRank):
                raise RingError(f"a {type(command).__name__} came where a StepPlan or StopRank was due")
            executor.close()
            return 0
        except StartError as error:
            self._send(RankFailed(self._rank, str(error), True))
            return 2
        except Exception as error:
            self._drain()  # steps that were launched before are reported, or fail as well
            return self._fail(error, doing)

    def _stand_by(self) -> None:
        """Imports what the device needs, in a thread of low priority: other ranks compute meanwhile.
        Ends the process when that fails: a start would fail as well."""
        os.setpriority(os.PRIO_PROCESS, get_native_id(), LOW_PRIORITY)
        try:
            import_device(self._imports)
        except Exception:
            log.write_stack()
            exit_now(1)
        self._send(StandingBy(self._rank))

    def _execute(self, executor: Executor, command: RankCommand) -> None:
        match command:
            case StepPlan():
                self._deliver(executor.launch(command))
                if self._profile_until == command.step:
                    self._profile(executor, Profile())
                self._last_step = command.step
            case GroupSteps():
                self._deliver(executor.launch_group(command))
                if self._profile_until == command.step:
                    self._profile(executor, Profile())
                self._last_step = command.step
            case Encode():
                executor.encode(command)
            case EncodeRows() | AlignSound():
                encoded = executor.encode_rows(command)
                if self._reports:
                    self._send(encoded)
            case Capture():
                self._capture(executor, command)
            case PrepareGrammar():
                executor.prepare_grammar(command.grammar, partial(self._prepared, command.id))
            case LoadAdapter():
                Thread(
                    target=self._load_adapter, args=(executor, command), name="adapter", daemon=True
                ).start()
            case CountExperts():
                self._deliver(executor.count_experts(command))
            case ReadExperts():
                read = executor.read_experts(command)
                place = partial(placed, command.id, self._rank, read)
                Thread(target=lambda: self._send(place()), name="experts", daemon=True).start()
            case MoveExperts():
                self._send(placed(command.id, self._rank, executor.move_experts))
            case ChangeMemory():
                self._drain()
                self._send(executor.change_memory(command))
            case UpdateWeights():
                self._drain()
                self._send(executor.update_weights(command))
            case Profile():
                self._profile(executor, command)

    def _deliver(self, step: Pending) -> None:
        """Sends the step's result when it is done, in the order of launches."""
        if self._result_thread is None and not step.is_done():
            self._result_thread = ResultThread(self._report, self._end)
        if self._result_thread is None:
            self._report(step)
        else:
            self._result_thread.put(step)

    def _capture(self, executor: Executor, command: Capture) -> None:
        captured = executor.capture(command.size, command.unit)
        if self._reports or captured.is_fatal:
            self._send(captured)
        if captured.is_fatal:
            raise RuntimeError(captured.error)

    def _load_adapter(self, executor: Executor, command: LoadAdapter) -> None:
        """A failure is reported and harms no request: none uses the adapter yet."""
        error = ""
        try:
            executor.load_adapter(command)
        except ModelError as fault:
            error = str(fault)
        except Exception:
            log.write_stack()
            error = "it could not be read; the server's log has the details"
        self._send(AdapterLoaded(command.id, self._rank, error))

    def _prepared(self, id: int) -> None:
        if self._reports:
            self._send(GrammarPrepared(id))

    def _report(self, step: Pending) -> None:
        if (result := step.result()) is not None:
            if self._group and isinstance(result, StepResult):
                result = structs.replace(result, group=self._group)
            self._send(result)

    def _drain(self) -> None:
        """Returns when the results of all steps have been sent."""
        if self._result_thread is not None:
            self._result_thread.finish()
            self._result_thread = None

    def _fail(self, error: Exception, doing: str) -> int:
        """Reports the class of an error only: its text may hold what clients must not see."""
        log.write_stack(error)
        self._send(
            RankFailed(self._rank, f"{type(error).__name__} while {doing}; its stack is in the log", False)
        )
        return 1

    def _end(self, error: Exception) -> None:
        """Ends the process when a step failed on the device; called in the result thread."""
        exit_now(self._fail(error, "running a step"))

    def _profile(self, executor: Executor, command: Profile) -> None:
        """A profile that cannot be made or written harms no request."""
        self._drain()
        self._profile_until = None if command.num_steps is None else self._last_step + command.num_steps
        try:
            executor.profile(command)
        except Exception:
            log.write_stack()

    def _receive(self) -> ToRank:
        body = self._reader.read()
        assert body is not None  # read() has no time limit here
        return self._plans.decode(body)

    def _send(self, message: FromRank) -> None:
        with self._sending:
            self._writer.publish(self._results.encode(message))

    def _progress(self, phase: LoadPhase, done: int, total: int) -> None:
        self._send(LoadProgress(self._rank, phase, done, total))


def placed(id: int, rank: int, place: Callable[[], None]) -> ExpertsPlaced:
    """Reads or moves experts. A failure that is foreseen is reported and harms nothing: they stay where they
    are."""
    try:
        place()
    except (ModelError, OSError, MemoryError) as fault:
        return ExpertsPlaced(id, rank, str(fault) or type(fault).__name__)
    return ExpertsPlaced(id, rank)


def bind_to_node(nodes: tuple[int, ...], rank: int, root: Path = NODES) -> None:
    """Binds this thread, and threads that it starts, to the cores of the rank's NUMA node, and so its memory.
    Raises StartError."""
    if not nodes:
        return
    os.sched_setaffinity(0, cores_of(nodes[rank] if len(nodes) > 1 else nodes[0], root))


def make_fork_server(device: str, channel: int, parent_pid: int) -> list[str] | None:
    """Imports what the device needs, and forks the fork server, which answers on the socket `channel`.
    -> in each of its forks, the arguments of `main`; None in this process, also if none could be made"""
    try:
        import_device(device)
        is_parent = not may_fork() or fork_as_sibling() > 0
    except (StartError, ImportError, OSError):
        is_parent = True  # what is missing is reported when the rank starts
    if is_parent:
        os.close(channel)
        return None
    os.setpgid(0, 0)
    end = take_descriptors(channel)
    arguments = serve_forks(end) if bind_to_parent(parent_pid, "fork-server") else None
    return exit_now(0) if arguments is None else arguments


def main(arguments: list[str] | None = None) -> int:
    """Runs one rank to its end; returns the exit code."""
    log.import_structlog()
    words = sys.argv[1:] if arguments is None else arguments
    if "--early" in words:
        given = await_rank(words)
        return 0 if given is None else main(given)
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
    parser.add_argument("--import", default="", dest="imports", metavar="DEVICE", help="device to import")
    parser.add_argument("--standby", action="store_true", help="import it at low priority")
    parser.add_argument("--fork-server", type=int, metavar="FD", help="socket of a fork server to be made")
    args = parser.parse_args(words)
    faulthandler.enable()
    # chain: afterwards the signal ends the process, as it does by default
    faulthandler.register(signal.SIGUSR1, chain=True)
    faulthandler.register(signal.SIGUSR2)
    name = f"standby-{args.rank}" if args.standby else f"rank-{args.rank}"
    if not bind_to_parent(args.parent, name):
        return 1
    if args.fork_server is not None:
        forked = make_fork_server(args.imports, args.fork_server, args.parent)
        if forked is not None:
            return main(forked)
    worker = RankWorker(
        args.rank, args.generation, args.plans, args.results, imports=args.imports, is_standby=args.standby
    )
    return worker.run()


if __name__ == "__main__":
    exit_now(main())
