"""The processes and rings of one generation of ranks. Nothing here needs an event loop: `runtime serve`
starts the processes of its first ranks before it has imported the server (actors/early_ranks.py).
"""

import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import msgspec

from runtime.actors.early_process import EarlyProcess
from runtime.actors.fork_server import ForkServer
from runtime.actors.rank_process import Launch, RankProcess, Replies, spawn
from runtime.errors import SpawnError
from runtime.messages.codec import Wire
from runtime.messages.ranks import ProcessSetup, StartRank, ToRank
from runtime.ranks import ring

KILL_S = 10.0  # that a process is waited for after SIGKILL


class RankProcesses:
    """Processes that have been started, and wait for a StartRank; their rings are open until `close`."""

    def __init__(
        self,
        setup: ProcessSetup | StartRank,
        generation: int,
        replies: Replies | None = None,
        *,
        ring_bytes: int = ring.DEFAULT_BYTES,
        is_standby: bool = False,
        imports: bool = False,
        indices: range | None = None,
        shared: Sequence[int] = (),
        forks: ForkServer | None = None,
        early: EarlyProcess | None = None,
    ) -> None:
        """`indices`: the ranks of this node; None: all. They inherit the descriptors `shared`, which stay the
        caller's. `imports`: ranks import the libraries of their device before they read a StartRank; standby
        ranks do so too, at low priority. `forks`: the fork server that they are forked by, or make; None:
        neither. `early`: the process that becomes rank 0, where it can. Raises SpawnError; nothing is left of
        processes and descriptors then."""
        self.generation = generation
        self.ring_bytes = ring_bytes
        self.replies = replies or Replies(setup.num_ranks)
        self.ranks: list[RankProcess] = []
        self.has_start = False  # a StartRank was sent
        self.forks = forks
        self._early = early
        self._setup = setup
        self._resources = ExitStack()
        self._indices = range(setup.num_ranks) if indices is None else indices
        self._shared = [*shared]  # descriptors that all ranks inherit
        self._rendezvous = ""  # at which ranks meet, unless their StartRank names another one
        with ExitStack() as failed:
            failed.callback(self.kill)
            try:
                self._start(is_standby, imports)
            except OSError as error:
                raise SpawnError(
                    f"cannot start the rank processes: {error.strerror}; look at the limits of this "
                    "account (ulimit -n, ulimit -u) and at free memory"
                ) from error
            failed.pop_all()

    def send(self, start: StartRank) -> None:
        """Sends all ranks what they are to load; once."""
        if not start.rendezvous:
            start = msgspec.structs.replace(start, rendezvous=self._rendezvous)
        self.plans.try_publish(Wire[ToRank](ToRank).encode(start))  # a new ring is never full
        self.has_start = True

    def kill(self) -> None:
        """Ends the processes at once, with their fork server, and closes everything. A process that outlives
        SIGKILL, held by a device driver, is left to the kernel."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired, TimeoutError):
                rank.process.wait(KILL_S)
        self.close()
        if self.forks is not None:
            self.forks.close()

    def close(self) -> None:
        """Closes every descriptor. For processes that have ended."""
        self._resources.close()

    def _start(self, is_standby: bool, imports: bool) -> None:
        fds = self._open_ring(len(self._indices))
        if len(self._indices) > 1:
            memory = os.memfd_create("rendezvous")
            self._resources.callback(os.close, memory)
            self._shared.append(memory)
            self._rendezvous = f"/proc/self/fd/{memory}"
        self.plans = ring.Writer(fds, self.generation)
        self._resources.callback(self.plans.close)
        self.credits = [wakes.credit for wakes in fds.wakes]
        for reader, rank in enumerate(self._indices):
            self._start_rank(Launch(rank, self.generation, is_standby, imports), fds.for_reader(reader))

    def _start_rank(self, launch: Launch, plans: ring.RingFds) -> None:
        results = self._open_ring(1)
        reader = ring.Reader(results, self.generation)
        self._resources.callback(reader.close)
        rank = spawn(
            launch, self._setup, plans, results, self._shared, reader, self.replies, self.forks, self._early
        )
        self._resources.callback(os.close, rank.pidfd)
        self.ranks.append(rank)

    def _open_ring(self, num_readers: int) -> ring.RingFds:
        fds = ring.create(self.ring_bytes, num_readers)
        self._resources.callback(fds.close)
        return fds
