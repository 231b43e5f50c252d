"""One rank: how its process is started, and the messages that it sends."""

import asyncio
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from runtime.actors import child_environment
from runtime.actors.early_process import EarlyProcess
from runtime.actors.fork_server import ForkServer
from runtime.actors.rank_replies import RankReplies
from runtime.errors import RankDied, RingError, RuntimeFault
from runtime.messages.codec import Bytes, Wire
from runtime.messages.experts import ExpertsPlaced
from runtime.messages.lora import AdapterLoaded
from runtime.messages.media import RowsEncoded
from runtime.messages.memory import MemoryReport
from runtime.messages.ranks import (
    Captured,
    ExpertCounts,
    FromRank,
    GrammarPrepared,
    LoadProgress,
    ProcessSetup,
    RankFailed,
    RankReady,
    StandingBy,
    StartRank,
)
from runtime.messages.steps import PartsSaved, StepResult
from runtime.ranks import ring


class Replies:
    """Replies of all ranks of a generation to commands."""

    def __init__(self, num_ranks: int) -> None:
        self.captured: list[Captured] = []
        self.adapters = RankReplies[AdapterLoaded](num_ranks)
        self.grammars = RankReplies[GrammarPrepared](1)
        self.counts = RankReplies[ExpertCounts](1)
        self.placed = RankReplies[ExpertsPlaced](num_ranks)
        self.memory_reports = RankReplies[MemoryReport](num_ranks)
        self.encoded = RankReplies[RowsEncoded](1)
        self.saved: list[PartsSaved] = []

    def end(self) -> None:
        """A rank has ended."""
        self.adapters.end()
        self.grammars.end()
        self.counts.end()
        self.placed.end()
        self.memory_reports.end()
        self.encoded.end()


class Process(Protocol):
    """What is needed of a process, on this node or another: as subprocess.Popen has it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """The exit code; None: it lives."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. -> exit code"""
        ...

    def send_signal(self, sig: int) -> None:
        """Sends it a signal, unless it has ended."""
        ...

    def kill(self) -> None:
        """Sends it SIGKILL, unless it has ended."""
        ...


class Rank:
    """One rank: its process, and the messages that it has sent about itself."""

    def __init__(self, index: int, process: Process, replies: Replies) -> None:
        self.index = index
        self.process = process
        self.progress: list[LoadProgress] = []
        self.is_standing_by = False
        self.ready: RankReady | None = None
        self.failed: RankFailed | None = None
        self.exited = asyncio.Event()
        self._replies = replies
        self._wire = Wire[FromRank](FromRank)

    def take(self, body: Bytes) -> StepResult | None:
        """Takes a message that the rank has sent, and keeps it. -> the result of a step instead. Raises
        RingError."""
        replies = self._replies
        match self._wire.decode(body):
            case StepResult() as result:
                return result
            case Captured() as captured:
                replies.captured.append(captured)
            case AdapterLoaded() as loaded:
                replies.adapters.add(loaded)
            case ExpertsPlaced() as placed:
                replies.placed.add(placed)
            case GrammarPrepared() as prepared:
                replies.grammars.add(prepared)
            case ExpertCounts() as counts:
                replies.counts.add(counts)
            case MemoryReport() as report:
                replies.memory_reports.add(report)
            case PartsSaved() as saved:
                replies.saved.append(saved)
            case RowsEncoded() as encoded:
                replies.encoded.add(encoded)
            case StandingBy():
                self.is_standing_by = True
            case LoadProgress() as progress:
                self.progress.append(progress)
            case RankReady() as ready:
                self.ready = ready
            case RankFailed() as failed:
                self.failed = failed
        return None

    def give_up(self, error: RuntimeFault) -> None:
        """Ends the rank, with `error` as the reason: the rest of what it sends cannot be read."""
        if self.failed is None:
            self.failed = RankFailed(self.index, str(error), False)
        self.process.kill()

    def death(self) -> RankDied:
        """The error that describes the end of the process."""
        return RankDied(self.index, self.process.returncode, self.failed.message if self.failed else "")


class RankProcess(Rank):
    """A rank of this node."""

    def __init__(
        self, index: int, process: Process, pidfd: int, reader: ring.Reader, replies: Replies
    ) -> None:
        super().__init__(index, process, replies)
        self.pidfd = pidfd
        self.reader = reader

    def receive(self) -> list[StepResult]:
        """Takes all messages that the rank has sent. -> results of steps"""
        results: list[StepResult] = []
        try:
            while (body := self.reader.read_nowait()) is not None:
                if (result := self.take(body)) is not None:
                    results.append(result)
        except RingError as error:
            self.give_up(error)
        return results


def cause_of_death(ranks: Sequence[Rank]) -> RankDied | None:
    """The death that explains why the ranks of one generation end; None: all live. A rank that was killed
    comes before those that failed, which may have failed because it was gone; its end may not have been
    reported yet."""
    killed = (rank.death() for rank in ranks if rank.process.poll() is not None)
    if (died := next((died for died in killed if died.is_kill), None)) is not None:
        return died
    return next((rank.death() for rank in ranks if rank.exited.is_set()), None)


class Launch(NamedTuple):
    """Which rank of which generation is started."""

    rank: int
    generation: int
    is_standby: bool = False
    imports: bool = False  # before it reads a StartRank, as standby ranks do


def spawn(
    launch: Launch,
    setup: ProcessSetup | StartRank,
    plans: ring.RingFds,
    results: ring.RingFds,
    shared: Sequence[int],
    reader: ring.Reader,
    replies: Replies,
    forks: ForkServer | None,
    early: EarlyProcess | None,
) -> RankProcess:
    """Starts the process of a rank, which inherits its ends of the rings, `shared` descriptors and its own of
    `setup.host_fds` and `setup.state_fds`. `reader` reads `results`. `forks`: the fork server that it is
    forked by, or makes; None: neither. `early`: the process that becomes rank 0, if it has the same
    environment. Raises OSError."""
    index = launch.rank
    own_fds = [fd for fds in (setup.host_fds, setup.state_fds) for fd in fds[index : index + 1]]
    arguments = [
        "--rank",
        str(index),
        "--generation",
        str(launch.generation),
        "--parent",
        str(os.getpid()),
        "--plans",
        str(plans),
        "--results",
        str(results),
        *(("--standby",) if launch.is_standby else ()),
    ]
    environment = child_environment.environment(setup.num_threads) | setup.environment
    fds = [*plans.flat(), *results.flat(), *shared, *own_fds]
    is_early = early is not None and index == 0 and early.device == setup.device
    process = _start(launch, setup.device, arguments, environment, fds, forks, early if is_early else None)
    return RankProcess(index, process, os.pidfd_open(process.pid), reader, replies)


def _start(
    launch: Launch,
    device: str,
    arguments: list[str],
    environment: dict[str, str],
    fds: list[int],
    forks: ForkServer | None,
    early: EarlyProcess | None,
) -> Process:
    """Forks a rank, or takes the early process for it, or starts it by exec; then the first one of a
    generation makes the fork server, if there is to be one. Raises OSError."""
    imports = ["--import", device]
    if launch.is_standby or launch.imports:
        arguments = arguments + imports
    if forks is None:
        return _execute(arguments, environment, fds, early)
    if (forked := forks.fork(arguments, environment, fds)) is not None:
        return forked
    makes_it = launch.rank == 0 and not launch.is_standby
    theirs = forks.offer(environment) if makes_it else None
    if theirs is None:
        return _execute(arguments, environment, fds, early)
    with theirs:
        end = theirs.fileno()
        arguments = [*arguments, *(() if launch.imports else imports), "--fork-server", str(end)]
        return _execute(arguments, environment, [*fds, end], early)


def _execute(
    arguments: list[str], environment: dict[str, str], fds: list[int], early: EarlyProcess | None
) -> Process:
    """A process with these arguments of ranks/worker.py. Raises OSError."""
    if early is not None and (process := early.take(arguments, environment, fds)) is not None:
        return process
    return child_environment.start_module("runtime.ranks.worker", arguments, environment, fds)
