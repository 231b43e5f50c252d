"""The rank processes of one generation, seen from the event loop: starting, plans, results, death and end.

                     plans (broadcast ring)
    Ranks.submit  ──────────────────────────►  rank 0, 1, ...   one subprocess each (ranks/worker.py)
    Ranks.results ◄──────────────────────────
                     results (a ring per rank)

Ranks of other nodes (actors/replica_nodes.py) get the same plans through the links to their nodes, and send
through them.

All waiting is for descriptors on the loop: rings by their eventfds, processes by pidfds. So there are no
threads, no SIGCHLD and no signal handlers, and it works in the loop of any application. Nothing that it opens
has a name in a file system. The kernel kills the ranks when the thread that started them ends: start and stop
them on one loop.

A rank that died is not started again here: a new generation is a new Ranks (actors/supervisor.py).
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf

import anyio
from msgspec import structs

from runtime.actors.fork_server import ForkServer
from runtime.actors.rank_process import Rank, RankProcess, Replies, cause_of_death
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.replica_nodes import ReplicaNodes
from runtime.errors import RankDied, RingError, SpawnError, StartError
from runtime.messages.codec import Wire
from runtime.messages.media import Encode
from runtime.messages.memory import ChangeMemory, UpdateWeights
from runtime.messages.ranks import (
    LoadProgress,
    RankCommand,
    RankFailed,
    RankReady,
    StartRank,
    StopRank,
    ToRank,
)
from runtime.messages.steps import StepResult
from runtime.ranks import ring

STOP_S = 5.0  # for a rank to end after StopRank, before SIGTERM
TERM_S = 2.0  # after SIGTERM, before SIGKILL
HURRY_S = 0.5  # for each of them when there is no more time
DUMP_S = 2.0  # after DUMP_SIGNAL, for a rank that hangs to write its stack and end
DUMP_SIGNAL = signal.SIGUSR1  # see ranks/worker.py
PEEK_SIGNAL = signal.SIGUSR2  # the same without an end
NODE_LOST_S = 0.5  # after a rank failed, for the loss of a node that made it fail to be noticed
KILL_S = 10.0  # after SIGKILL: a process that a device driver holds cannot be waited for


class Ranks:
    """The ranks of one generation. Use it on one event loop; only `start` and `stop` wait."""

    def __init__(
        self,
        setup: StartRank,
        *,
        generation: int = 1,
        ring_bytes: int = ring.DEFAULT_BYTES,
        processes: RankProcesses | None = None,
        forks: ForkServer | None = None,
        nodes: ReplicaNodes | None = None,
    ) -> None:
        """`setup.rendezvous` is set here. Rank i inherits `setup.host_fds[i]`; the descriptors stay the
        caller's. `generation` is at least 1: fresh memory is of generation 0. `ring_bytes`: size of each
        ring, a multiple of 32; longer messages travel in parts. `processes`: those of this generation that
        have been started; None: they are started here, with the fork server `forks`, if there is one.
        `nodes`: the other nodes, if there are any.
        """
        self.generation = generation
        # the first rank that ended while it was needed, once all were ready
        self.died: RankDied | None = None
        self._replies = Replies(setup.num_ranks) if processes is None else processes.replies
        self.captured = self._replies.captured  # results of captures; the reader removes them
        self.saved = self._replies.saved  # layers of pages; the reader removes them
        self.adapters = self._replies.adapters
        self.placed = self._replies.placed
        self.grammars = self._replies.grammars
        self.counts = self._replies.counts  # of rank 0 alone
        self.memory_reports = self._replies.memory_reports
        self.encoded = self._replies.encoded  # of the rank that reports
        self.num_changes = 0  # changes of memory, after which steps must be captured again
        self._setup = setup
        self._ring_bytes = ring_bytes
        self._to_ranks = Wire[ToRank](ToRank)
        self._processes = processes
        self._forks = forks
        self._nodes = nodes
        self._ranks: list[Rank] = [] if processes is None else [*processes.ranks]
        self._resources = ExitStack()
        self._plans: ring.Writer | None = None  # when open, if this node has any of the ranks
        self._is_open = False  # the loop watches the processes
        self._results: list[StepResult] = []
        self._wake: Callable[[], None] | None = None
        self._changed = asyncio.Event()  # while starting: a message has come, or a rank has ended
        self._is_standby = False
        self._is_started = False
        self._is_ready = False
        self._is_stopping = False
        self._stopped = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether the ranks take steps and commands: all are ready and alive, and are not being stopped."""
        return self._is_ready and not self._is_stopping and self.died is None

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks of this node, in their order."""
        return [rank.process.pid for rank in self._ranks if isinstance(rank, RankProcess)]

    @property
    def is_standing_by(self) -> bool:
        """Whether these are standby ranks that have imported all libraries, live, and were not started."""
        return (
            not self._is_started
            and not self._is_stopping
            and bool(self._ranks)
            and all(rank.is_standing_by and rank.process.poll() is None for rank in self._ranks)
        )

    async def stand_by(self, on_ready: Callable[[], None]) -> RankDied | None:
        """Starts the processes as standby ranks: they import libraries at low priority, and load
        nothing. `on_ready` is called when all have done so. Returns when `start` or `stop` was called (None),
        or with the death of a process before that. Raises SpawnError."""
        self._is_standby = True
        self._open()
        is_reported = False
        while not self._is_started and not self._is_stopping:
            self._changed.clear()
            if (died := cause_of_death(self._ranks)) is not None:
                return died
            if self.is_standing_by and not is_reported:
                is_reported = True
                on_ready()
            await self._changed.wait()
        return None

    async def start(
        self, on_progress: Callable[[LoadProgress], None], setup: StartRank | None = None
    ) -> list[RankReady]:
        """Starts the processes, unless they stand by, and waits until all are ready. When one fails, or this
        is cancelled, it stops them all. `setup` is what standby ranks load; its device, number of ranks,
        environment and host memory are those that they were made with.

        `on_progress` is called with what the ranks report, and with "process" before and "ready" after it.

        Raises StartError with a rank's one-line remedy, RankDied when a rank ended in any other way, NodeGone
        when another node does not come.
        """
        assert not self._is_started and not self._is_stopping, "ranks start once"
        self._is_started = True
        self._setup = setup or self._setup
        for index in range(self._setup.num_ranks):
            on_progress(LoadProgress(index, "process"))
        try:
            if self._nodes is not None:
                await self._nodes.gather()
            if not self._is_open:
                self._open()
            self._changed.set()  # `stand_by` ends
            self._send_start()
            while True:
                self._changed.clear()
                for rank in self._ranks:
                    while rank.progress:
                        on_progress(rank.progress.pop(0))
                await self._raise_failure()
                ready = [rank.ready for rank in self._ranks if rank.ready is not None]
                if len(ready) == len(self._ranks):
                    self._is_ready = True
                    if self._nodes is not None:
                        self._nodes.note_ready()
                    for each in ready:
                        on_progress(LoadProgress(each.rank, "ready"))
                    return ready
                await self._changed.wait()
        except BaseException:
            await self.stop()
            raise

    def submit(self, plan: RankCommand) -> bool:
        """Sends a step or a command to all ranks. False: the rings are full; try again at the next wake.
        There will be one, because a full ring holds steps whose results are still to come, or a long
        message. Raises RankDied after a death."""
        assert self._is_ready and not self._is_stopping, "ranks take plans between start and stop"
        if self.died is not None:
            raise self.died
        self.num_changes += isinstance(plan, ChangeMemory | UpdateWeights)
        if isinstance(plan, Encode) and self._nodes is None and self._plans is not None:
            # pixels are many megabytes: they are copied as the ring has room, and not before
            return self._plans.try_publish_parts(self._to_ranks.encode_parts(plan))
        return self._publish(self._to_ranks.encode(plan))

    def results(self) -> list[StepResult]:
        """Results that have come since the last call, in order of their steps; the caller owns their
        arrays."""
        results, self._results = self._results, []
        return results

    def set_wake(self, wake: Callable[[], None] | None) -> None:
        """`wake` is called on the loop when results have come, and once when `died` is set. It must not
        raise."""
        self._wake = wake

    def dump_stacks(self) -> None:
        """Each rank writes the stacks of its threads to the log and goes on."""
        for rank in self._ranks:
            rank.process.send_signal(PEEK_SIGNAL)

    async def abandon(self, reason: str) -> None:
        """Ends ranks that hang: each writes its stack to the log; `died` has the reason."""
        with anyio.CancelScope(shield=True):
            for rank in self._ranks:
                if rank.failed is None:
                    rank.failed = RankFailed(rank.index, reason, False)
                rank.process.send_signal(DUMP_SIGNAL)
            await _wait_exits(self._ranks, DUMP_S)
            for rank in self._ranks:
                rank.process.kill()

    async def stop(self, within_s: float = inf) -> None:
        """Ends all ranks, by StopRank first, then by signals, and closes every descriptor. May be called at
        any time and more than once.

        Takes at most STOP_S + TERM_S + KILL_S, and ranks that have not ended after about `within_s` are
        killed (after HURRY_S, if that is more); a process that outlives SIGKILL, held by a device driver, is
        left to the kernel.
        """
        if self._is_stopping:
            await self._stopped.wait()
            return
        self._is_stopping = True
        self._changed.set()
        with anyio.CancelScope(shield=True):
            if self._is_ready and self.died is None and self._publish(self._to_ranks.encode(StopRank())):
                await _wait_exits(self._ranks, min(STOP_S, max(within_s, HURRY_S)))
            term_s = min(TERM_S, max(within_s, HURRY_S))
            for number, timeout_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, KILL_S)):
                for rank in self._ranks:
                    rank.process.send_signal(number)  # does nothing to a process that has ended
                await _wait_exits(self._ranks, timeout_s)
        if self._nodes is not None and self._is_open:
            self._nodes.end()
        self._resources.close()
        self._stopped.set()

    # ── starting ────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        """Starts the processes, unless that was done, and watches them. Raises SpawnError."""
        nodes = self._nodes
        if nodes is None or nodes.has_node_0:
            self._open_processes([] if nodes is None else [self._open_rendezvous(nodes)])
        self._is_open = True
        if nodes is not None:
            self._ranks += nodes.begin(
                self.generation, self._setup, self._replies, self._take_results, self._end_rank
            )

    def _open_processes(self, shared: list[int]) -> None:
        """The part of `_open` that is about this node. `shared`: descriptors that the ranks inherit."""
        loop, processes = asyncio.get_running_loop(), self._processes
        if processes is None:
            processes = self._processes = RankProcesses(
                self._setup,
                self.generation,
                self._replies,
                ring_bytes=self._ring_bytes,
                is_standby=self._is_standby,
                forks=self._forks,
                indices=range(self._setup.ranks_on_node),
                shared=shared,
            )
        self._ranks, self._plans = [*processes.ranks], processes.plans
        self._resources.callback(processes.close)
        watched: list[tuple[int, Callable[..., None], list[RankProcess]]] = [
            (credit, partial(self._on_credit, processes.plans), []) for credit in processes.credits
        ]
        for rank in processes.ranks:
            watched += [(rank.pidfd, self._on_exit, [rank]), (rank.reader.fileno(), self._on_data, [rank])]
        for fd, callback, arguments in watched:
            loop.add_reader(fd, callback, *arguments)
            self._resources.callback(loop.remove_reader, fd)

    def _open_rendezvous(self, nodes: ReplicaNodes) -> int:
        """Opens the place where the ranks of all nodes meet. -> the descriptor that rank 0 inherits. Raises
        SpawnError."""
        try:
            listener, rendezvous = nodes.open_rendezvous()
        except OSError as error:
            raise SpawnError(f"the ranks have no place to meet: {error.strerror}") from None
        self._resources.callback(listener.close)
        self._setup = structs.replace(self._setup, rendezvous=rendezvous)
        return listener.fileno()

    def _publish(self, body: bytes) -> bool:
        """Sends a record to the ranks of all nodes, or to none."""
        plans, nodes = self._plans, self._nodes
        if nodes is not None and not nodes.has_room:
            return False
        if plans is not None and not plans.try_publish(body):
            return False
        if nodes is not None:
            nodes.publish(body)
        return True

    def _send_start(self) -> None:
        """Sends what the ranks of this node are to load, unless they know it."""
        if self._processes is not None and not self._processes.has_start:
            self._processes.send(self._setup)

    async def _raise_failure(self) -> None:
        for rank in self._ranks:  # the cause first: other ranks may fail because of it
            if rank.failed is not None and rank.failed.is_start_error:
                raise StartError(rank.failed.message)
        if (died := cause_of_death(self._ranks)) is not None:
            if self._waits_for_cause(died):
                await anyio.sleep(NODE_LOST_S)
            raise cause_of_death(self._ranks) or died

    def _waits_for_cause(self, died: RankDied) -> bool:
        """Whether a rank may have failed because another node is gone, which is noticed a little later."""
        return self._nodes is not None and not died.is_kill

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────────────────

    def _on_data(self, rank: RankProcess) -> None:
        self._take_results(rank.receive())

    def _take_results(self, results: Sequence[StepResult]) -> None:
        """Messages of a rank have come, these results among them."""
        self._changed.set()
        self._results += results
        if results or self.captured or self.saved:
            if self._wake is not None:
                self._wake()

    def _on_credit(self, plans: ring.Writer) -> None:
        try:
            had_rest = plans.has_rest
            plans.collect()
            plans.flush()
            if had_rest and self._wake is not None:
                self._wake()  # a step may wait behind a long message
        except RingError as error:
            for rank in self._ranks:
                rank.give_up(error)

    def _on_exit(self, rank: RankProcess) -> None:
        """Called once for each rank of this node: takes its last messages, then notes its death."""
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        self._on_data(rank)
        rank.process.wait()
        self._end_rank(rank)

    def _end_rank(self, rank: Rank) -> None:
        """A rank has ended, and its messages have been taken."""
        rank.exited.set()
        self._changed.set()
        self._replies.end()
        if self._is_ready:
            if self._waits_for_cause(rank.death()):
                later = asyncio.get_running_loop().call_later(NODE_LOST_S, self._note_death, rank)
                self._resources.callback(later.cancel)
            else:
                self._note_death(rank)

    def _note_death(self, rank: Rank) -> None:
        if not self._is_stopping and self.died is None:
            self.died = cause_of_death(self._ranks) or rank.death()
            if self._wake is not None:
                self._wake()


async def _wait_exits(ranks: Sequence[Rank], timeout_s: float) -> None:
    with anyio.move_on_after(timeout_s):
        for rank in ranks:
            await rank.exited.wait()
