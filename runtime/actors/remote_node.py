"""Another node, seen from node 0: its link, while it is there, and its ranks of the current generation of one
replica."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from signal import SIGKILL

from runtime.actors.rank_process import Replies
from runtime.actors.remote_ranks import RemoteProcess, RemoteRank
from runtime.errors import LinkError, RingError
from runtime.messages.codec import Wire
from runtime.messages.nodes import (
    Begin,
    Bye,
    End,
    Exited,
    FromNode,
    FromNode0,
    FromNodeRank,
    Hello,
    RendezvousOpened,
    SignalRank,
    ToNodeRanks,
)
from runtime.messages.ranks import StartRank
from runtime.messages.steps import StepResult
from runtime.nodes.link import Link

ENDED = "it was ended"


class RemoteNode:
    """One of the nodes from 1 on, for the ranks of one replica."""

    def __init__(
        self, number: int, replica: int, place: int, on_lost: Callable[["RemoteNode", str], None]
    ) -> None:
        """`place`: which of the nodes of its replica it is, from 0. `on_lost` is called when the node is
        gone, with the reason."""
        self.number = number
        self.replica = replica
        self._place = place
        self._on_lost = on_lost
        self._link: Link | None = None
        self._in = Wire[FromNode](FromNode)
        self._out = Wire[FromNode0](FromNode0)
        self._generation = 0
        self._ranks: dict[int, RemoteRank] = {}
        self._on_results: Callable[[Sequence[StepResult]], None] = lambda results: None
        self._on_exit: Callable[[RemoteRank], None] = lambda rank: None
        self._on_rendezvous: Callable[[str], None] | None = None  # while it is due

    @property
    def is_here(self) -> bool:
        """Whether it is connected, and agrees with node 0."""
        return self._link is not None

    @property
    def has_room(self) -> bool:
        """Whether it takes more messages now. A node that is gone does: they go nowhere."""
        return self._link is None or self._link.has_room

    def attach(self, link: Link) -> None:
        """The node is here, at the other end of the link."""
        self._link = link
        link.on_message, link.on_lost = self._receive, self._lose

    def expect(
        self,
        generation: int,
        start: StartRank,
        replies: Replies,
        on_results: Callable[[Sequence[StepResult]], None],
        on_exit: Callable[[RemoteRank], None],
    ) -> list[RemoteRank]:
        """-> the ranks of a generation that `begin` will have the node start. `on_results` is called when
        anything has come from them, with the results of steps, `on_exit` once for each."""
        self._generation, self._on_results, self._on_exit = generation, on_results, on_exit
        first = self._place * start.ranks_on_node
        self._ranks = {
            rank: RemoteRank(rank, RemoteProcess(partial(self._signal, rank)), replies)
            for rank in range(first, first + start.ranks_on_node)
        }
        ranks = list(self._ranks.values())
        if self._link is None:  # it has left since all nodes were here
            asyncio.get_running_loop().call_soon(self._end_ranks, f"node {self.number} is gone")
        return ranks

    def begin(self, start: StartRank, on_rendezvous: Callable[[str], None] | None = None) -> None:
        """Has the node start these ranks. `on_rendezvous`: the ranks of several nodes meet on this one, and
        it is called with the place."""
        self._on_rendezvous = on_rendezvous
        self.send(Begin(self._generation, start, on_rendezvous is not None))

    def publish(self, body: bytes) -> None:
        """Sends a record to the ring of the node's ranks."""
        self.send(ToNodeRanks(self._generation, body))

    def end(self) -> None:
        """The ranks of this generation have ended, or are not waited for."""
        self._ranks, self._on_rendezvous = {}, None
        self.send(End(self._generation))

    def send(self, message: FromNode0) -> None:
        """Sends a message, if the node is here."""
        if self._link is not None:
            self._link.send(self._out.encode(message))

    def close(self, is_failure: bool) -> None:
        """Node 0 ends."""
        self.send(Bye(is_failure))
        link, self._link = self._link, None
        if link is not None:
            link.on_lost = lambda reason: None
            link.close(ENDED)

    def _signal(self, rank: int, number: int) -> None:
        self.send(SignalRank(self._generation, rank, number))

    def _receive(self, body: bytes) -> None:
        """Takes a message. Raises LinkError for one that no node sends."""
        try:
            message = self._in.decode(body)
            match message:
                case FromNodeRank(generation, index, record):
                    if generation == self._generation and (rank := self._ranks.get(index)) is not None:
                        result = rank.take(record)
                        self._on_results(() if result is None else (result,))
                case Exited(generation, index, code, reason):
                    if generation == self._generation and (rank := self._ranks.pop(index, None)) is not None:
                        rank.end(code, reason)
                        self._on_exit(rank)
                case RendezvousOpened(generation, rendezvous):
                    if generation == self._generation and self._on_rendezvous is not None:
                        self._on_rendezvous(rendezvous)
                case Bye():
                    if self._link is not None:
                        self._link.close(ENDED)
                case Hello():
                    raise LinkError("a second Hello came")
        except RingError as error:
            raise LinkError(str(error)) from None

    def _lose(self, reason: str) -> None:
        self._link = None
        self._on_lost(self, reason)
        self._end_ranks(f"node {self.number} is gone: {reason}")

    def _end_ranks(self, reason: str) -> None:
        ranks, self._ranks = self._ranks, {}
        for rank in ranks.values():
            rank.end(-SIGKILL, reason)
        for rank in ranks.values():
            self._on_exit(rank)
