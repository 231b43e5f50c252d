"""The ranks of a node that is not node 0, for one generation: between their rings and the link to node 0.

What comes through the link is published in the ring that the ranks read, and what they write to their rings
goes into the link. Where one side has no room, the other one is not read: nothing is kept here without bound,
and the side that sends too much waits.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import anyio
from msgspec import structs

from runtime.actors.rank_process import RankProcess
from runtime.actors.rank_processes import KILL_S, RankProcesses
from runtime.errors import RingError
from runtime.messages.codec import Wire
from runtime.messages.nodes import Exited, FromNode, FromNodeRank
from runtime.messages.ranks import FromRank, StartRank
from runtime.nodes.link import Link

LOCAL_FIELDS = (
    "environment",
    "num_threads",
    "numa_nodes",
    "device_options",
    "kept_weights",
    "reading",
    "config_file",
    "log_level",
    "log_format",
)
"""Fields of StartRank that a node has by its own options."""


def localized(start: StartRank, own: StartRank, node0_model_path: str) -> StartRank:
    """What this node's ranks are started with: node 0's `start`, with what each node has for itself from
    `own`. A folder of weights that is not the model's at the start is the same on all nodes."""
    fields = {name: getattr(own, name) for name in LOCAL_FIELDS}
    if start.model_path == node0_model_path:
        fields["model_path"] = own.model_path
    return structs.replace(start, **fields)


class NodeRanks:
    """Ranks that have been started, until `stop`."""

    def __init__(
        self,
        indices: range,
        generation: int,
        start: StartRank,
        link: Link,
        listener: socket.socket | None = None,
    ) -> None:
        """`indices`: the ranks. `listener`: on which rank 0 serves the place where ranks of several nodes
        meet; it is closed with the ranks, None: they meet elsewhere. Raises SpawnError; the listener is the
        caller's then."""
        self.generation = generation
        self._link = link
        self._out = Wire[FromNode](FromNode)
        self._waiting = deque[bytes]()  # records for which the ring has no room yet
        self._stalled: list[RankProcess] = []  # whose records the link has no room for
        self._resources = ExitStack()
        shared = [] if listener is None else [listener.fileno()]
        self._processes = RankProcesses(start, generation, indices=indices, shared=shared)
        if listener is not None:
            self._resources.callback(listener.close)
        loop = asyncio.get_running_loop()
        for credit in self._processes.credits:
            self._watch(loop, credit, self._on_credit)
        for rank in self._processes.ranks:
            self._watch(loop, rank.pidfd, partial(self._on_exit, rank))
            self._watch(loop, rank.reader.fileno(), partial(self._on_data, rank))
        self._processes.send(start)

    def publish(self, body: bytes) -> None:
        """Puts a record into the ring of the ranks. Where that is full, the link is not read until it has
        room."""
        if self._waiting or not self._processes.plans.try_publish(body):
            self._waiting.append(body)
            self._link.pause()

    def signal(self, index: int, number: int) -> None:
        """Sends a signal to a rank, unless it has ended."""
        for rank in self._processes.ranks:
            if rank.index == index:
                rank.process.send_signal(number)

    def on_room(self) -> None:
        """The link has room again."""
        stalled, self._stalled = self._stalled, []
        for rank in stalled:
            asyncio.get_running_loop().add_reader(rank.reader.fileno(), self._on_data, rank)
            self._on_data(rank)

    async def stop(self) -> None:
        """Ends what is left of the ranks; returns when they have ended. May be called more than once. A
        process that outlives SIGKILL, held by a device driver, is left to the kernel."""
        if self._waiting:
            self._waiting.clear()
            self._link.resume()
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_S):
            for rank in self._processes.ranks:
                if not rank.exited.is_set():
                    rank.process.kill()
            for rank in self._processes.ranks:
                await rank.exited.wait()
        self._resources.close()
        self._processes.close()

    def _watch(self, loop: asyncio.AbstractEventLoop, fd: int, callback: Callable[[], None]) -> None:
        loop.add_reader(fd, callback)
        self._resources.callback(loop.remove_reader, fd)

    def _on_data(self, rank: RankProcess) -> None:
        try:
            while self._link.has_room:
                if (body := rank.reader.read_nowait()) is None:
                    return
                self._send(FromNodeRank(self.generation, rank.index, body))
        except RingError as error:
            self._give_up(rank, error)
            return
        if rank not in self._stalled:
            self._stalled.append(rank)
            asyncio.get_running_loop().remove_reader(rank.reader.fileno())

    def _on_credit(self) -> None:
        plans = self._processes.plans
        try:
            plans.collect()
            plans.flush()
            while self._waiting and plans.try_publish(self._waiting[0]):
                self._waiting.popleft()
        except RingError as error:
            for rank in self._processes.ranks:
                self._give_up(rank, error)
        if not self._waiting:
            self._link.resume()

    def _on_exit(self, rank: RankProcess) -> None:
        """Called once for each rank: sends its last messages, then its exit code."""
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        try:
            while (body := rank.reader.read_nowait()) is not None:
                self._send(FromNodeRank(self.generation, rank.index, body))
        except RingError as error:
            self._give_up(rank, error)
        self._send(Exited(self.generation, rank.index, rank.process.wait()))
        rank.exited.set()

    def _give_up(self, rank: RankProcess, error: RingError) -> None:
        rank.give_up(error)
        if rank.failed is not None:
            body = bytearray(Wire[FromRank](FromRank).encode(rank.failed))
            self._send(FromNodeRank(self.generation, rank.index, body))

    def _send(self, message: FromNode) -> None:
        self._link.send(self._out.encode(message))
