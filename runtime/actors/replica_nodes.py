"""The nodes, other than node 0, that the ranks of one replica are on; for one generation of these ranks after
the other (actors/ranks.py).

Either node 0 has the replica's first ranks, or it has none of them: then the ranks of several nodes meet on
the first of these, which opens a place for that and says where it is.
"""

import socket
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from time import monotonic

import anyio
from msgspec import structs

from runtime import log
from runtime.actors.rank_process import Replies
from runtime.actors.remote_node import RemoteNode
from runtime.actors.remote_ranks import RemoteRank
from runtime.errors import NodeGone
from runtime.messages.ranks import StartRank
from runtime.messages.steps import StepResult
from runtime.nodes.rendezvous import open_rendezvous


class ReplicaNodes:
    """The nodes of one replica, in the order of its ranks."""

    def __init__(
        self,
        nodes: Sequence[RemoteNode],
        *,
        host: str | None,
        timeout_s: float,
        wait_change: Callable[[], Awaitable[None]],
        is_spared: Callable[[], bool],
    ) -> None:
        """`nodes`: all but node 0. `host`: the address of node 0, if it has ranks of this replica.
        `timeout_s`: within which the nodes must be here when ranks are to start. `wait_change` returns when a
        node has come or gone; `is_spared` says whether another replica has all of its nodes."""
        self._nodes = nodes
        self._host = host
        self._timeout_s = timeout_s
        self._wait_change = wait_change
        self._is_spared = is_spared
        self._has_served = False

    @property
    def has_node_0(self) -> bool:
        """Whether node 0 has ranks of this replica, its first ones."""
        return self._host is not None

    @property
    def has_others(self) -> bool:
        """Whether any other node than node 0 has ranks of this replica."""
        return bool(self._nodes)

    @property
    def missing(self) -> list[int]:
        """Numbers of the nodes that are not here."""
        return [node.number for node in self._nodes if not node.is_here]

    @property
    def has_room(self) -> bool:
        """Whether all links take more."""
        return all(node.has_room for node in self._nodes)

    def note_ready(self) -> None:
        """All ranks are ready: from now on nodes that are gone are waited for without limit, while another
        replica has all of its own."""
        self._has_served = True

    async def gather(self) -> None:
        """Returns when all nodes are here. Raises NodeGone after the time limit."""
        begin = monotonic()
        while self.missing:
            has_limit = not (self._has_served and self._is_spared())
            with anyio.move_on_after(begin + self._timeout_s - monotonic() if has_limit else inf) as waiting:
                await self._wait_change()
            if not has_limit:
                begin = monotonic()
            elif waiting.cancelled_caught and self.missing:
                numbers = ", ".join(map(str, self.missing))
                reason = f"node {numbers} did not come within --dist-timeout {self._timeout_s:g} s"
                log.get("nodes").error("the server ends", reason=reason)
                raise NodeGone(reason)

    def open_rendezvous(self) -> tuple[socket.socket, str]:
        """Opens the place on node 0 where the ranks of all nodes meet: see nodes/rendezvous.py. Raises
        OSError."""
        assert self._host is not None, "node 0 has ranks"
        return open_rendezvous(self._host)

    def begin(
        self,
        generation: int,
        start: StartRank,
        replies: Replies,
        on_results: Callable[[Sequence[StepResult]], None],
        on_exit: Callable[[RemoteRank], None],
    ) -> list[RemoteRank]:
        """Has all nodes start their ranks. -> these, in order. See RemoteNode.expect."""
        ranks = [
            rank
            for node in self._nodes
            for rank in node.expect(generation, start, replies, on_results, on_exit)
        ]
        if self.has_node_0 or len(self._nodes) == 1:
            for node in self._nodes:
                node.begin(start)
            return ranks
        first, *others = self._nodes

        def begin_others(rendezvous: str) -> None:
            for node in others:
                node.begin(structs.replace(start, rendezvous=rendezvous))

        first.begin(start, begin_others)
        return ranks

    def publish(self, body: bytes) -> None:
        """Sends a record to the rings of all nodes."""
        for node in self._nodes:
            node.publish(body)

    def end(self) -> None:
        """The current generation has ended."""
        for node in self._nodes:
            node.end()
