"""The other nodes of a server, seen from node 0, which has the event loop (node.py is a node's own side).

Node 0 listens at --dist-init-addr. A node connects, proves that it has the secret, and says what it is; node
0 takes it if it agrees in version, options and checkpoint. The links outlive the ranks: each generation of
ranks begins when all nodes are here, and dies when one of them is gone.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio
from anyio.abc import TaskStatus

from runtime import log
from runtime.actors.rank_process import Replies
from runtime.actors.remote_node import RemoteNode
from runtime.actors.remote_ranks import RemoteRank
from runtime.errors import LinkError, NodeGone, RingError, StartError
from runtime.messages.codec import Wire
from runtime.messages.nodes import FromNode, FromNode0, Hello, Identity, Refused, Welcome
from runtime.messages.ranks import StartRank
from runtime.messages.steps import StepResult
from runtime.nodes.addresses import Address, parse_address
from runtime.nodes.handshake import ServerHandshake
from runtime.nodes.identity import differences, identity_of
from runtime.nodes.link import Link
from runtime.nodes.secret import read_secret
from runtime.options.plan import Plan

MAX_STRANGERS = 16  # connections that have not proved the secret; the oldest is cut for the next
PREFIX_BYTES = 16
BACKLOG = 64


class Nodes:
    """All nodes but node 0. `run` is its life; the rest is for the ranks of one generation after the other
    (actors/ranks.py)."""

    def __init__(
        self, address: Address, secret: bytes, num_nodes: int, timeout_s: float, model_path: str
    ) -> None:
        """`timeout_s`: within which all nodes must be here when ranks are to start."""
        self._address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._model_path = model_path
        self._identity: Identity | None = None
        self._nodes = [RemoteNode(number, self._node_lost) for number in range(1, num_nodes)]
        self._strangers: list[Link] = []
        self._changed = anyio.Event()
        self._log = log.get("nodes")

    @property
    def missing(self) -> list[int]:
        """Numbers of the nodes that are not here."""
        return [node.number for node in self._nodes if not node.is_here]

    @property
    def has_room(self) -> bool:
        """Whether all links take more."""
        return all(node.has_room for node in self._nodes)

    async def run(self, plan: Plan, *, task_status: TaskStatus[None]) -> None:
        """Takes the nodes that come, until cancelled. Raises StartError where the address cannot be
        listened at, or the checkpoint cannot be read."""
        self._identity = await anyio.to_thread.run_sync(identity_of, plan)
        try:
            server = await asyncio.get_running_loop().create_server(
                self._accept, *self._address, reuse_address=True, backlog=BACKLOG
            )
        except OSError as error:
            raise StartError(
                f"node 0 cannot listen at --dist-init-addr {self._address.host}:{self._address.port}: "
                f"{error.strerror}; give an address of this machine"
            ) from None
        self._log.info("node 0 waits for the others", address=self._address.host, port=self._address.port)
        try:
            task_status.started()
            await anyio.sleep_forever()
        finally:
            server.close()
            for link in [*self._strangers]:
                link.abort("node 0 ends")

    async def gather(self) -> None:
        """Returns when all nodes are here. Raises NodeGone after the time limit."""
        with anyio.move_on_after(self._timeout_s):
            while self.missing:
                self._changed = anyio.Event()
                await self._changed.wait()
        if self.missing:
            numbers = ", ".join(map(str, self.missing))
            reason = f"node {numbers} did not come within --dist-timeout {self._timeout_s:g} s"
            self._log.error("the server ends", reason=reason)
            raise NodeGone(reason)

    def open_rendezvous(self) -> tuple[socket.socket, str]:
        """-> a socket on which rank 0 serves the store at which the ranks meet, on the address of node 0
        alone, and StartRank.rendezvous for all ranks. Raises OSError."""
        family, kind, _, _, target = socket.getaddrinfo(self._address.host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.bind(target)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        prefix = os.urandom(PREFIX_BYTES).hex()
        return listener, f"tcp://{host}:{listener.getsockname()[1]}/{prefix}?fd={listener.fileno()}"

    def begin(
        self,
        generation: int,
        start: StartRank,
        replies: Replies,
        on_results: Callable[[Sequence[StepResult]], None],
        on_exit: Callable[[RemoteRank], None],
    ) -> list[RemoteRank]:
        """Has all nodes start their ranks. -> these, in order. See RemoteNode.begin."""
        return [
            rank
            for node in self._nodes
            for rank in node.begin(generation, start, replies, on_results, on_exit)
        ]

    def publish(self, body: bytes) -> None:
        """Sends a record to the rings of all nodes."""
        for node in self._nodes:
            node.publish(body)

    def end(self) -> None:
        """The current generation has ended."""
        for node in self._nodes:
            node.end()

    def close(self, *, is_failure: bool) -> None:
        """Tells all nodes that the server ends. For the owner, when the ranks have ended."""
        for node in self._nodes:
            node.close(is_failure)

    # ── nodes that come and go ──────────────────────────────────────────────────────────────────────────────

    def _accept(self) -> Link:
        """The protocol of a new connection."""
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers[0].abort("too many connections that have not proved the secret")
        link = Link(ServerHandshake(self._secret))

        def forget(reason: str) -> None:
            with suppress(ValueError):
                self._strangers.remove(link)
            self._log.warning("a connection of no node was closed", address=link.peer, reason=reason)

        link.on_lost = forget
        link.on_message = lambda body: self._take_hello(link, body)
        self._strangers.append(link)
        return link

    def _take_hello(self, link: Link, body: bytes) -> None:
        try:
            hello = Wire[FromNode](FromNode).decode(body)
        except RingError as error:
            raise LinkError(str(error)) from None
        if not isinstance(hello, Hello):
            raise LinkError(f"a {type(hello).__name__} came where Hello was due")
        refused = self._why_not(hello)
        out = Wire[FromNode0](FromNode0)
        if refused is not None:
            link.send(out.encode(refused))
            link.close(f"node {hello.node} was refused: {refused.reason}")
            return
        self._strangers.remove(link)
        link.send(out.encode(Welcome(self._model_path)))
        self._nodes[hello.node - 1].attach(link)
        self._log.info("a node is here", node=hello.node, address=link.peer, missing=self.missing)
        self._changed.set()

    def _why_not(self, hello: Hello) -> Refused | None:
        assert self._identity is not None, "it listens"
        if found := differences(self._identity, hello.identity):
            return Refused(f"{'; '.join(found)}; start all nodes with the same", True)
        if not 1 <= hello.node <= len(self._nodes):
            return Refused(
                f"--node-rank {hello.node} is none of the nodes from 1 to {len(self._nodes)}", True
            )
        if self._nodes[hello.node - 1].is_here:
            return Refused(f"another node is here as --node-rank {hello.node}", False)
        return None

    def _node_lost(self, node: RemoteNode, reason: str) -> None:
        self._log.warning("a node is gone", node=node.number, reason=reason, waits_s=self._timeout_s)
        self._changed.set()


def open_nodes(plan: Plan) -> Nodes | None:
    """The other nodes; None: there are none. Raises StartError."""
    parallel = plan.parallel
    if parallel.nnodes == 1:
        return None
    if parallel.node_rank:
        raise StartError("only node 0 takes requests; start the other nodes with `runtime serve`")
    return Nodes(
        parse_address(parallel.dist_init_addr or ""),
        read_secret(parallel.dist_secret_file),
        parallel.nnodes,
        parallel.node_timeout_s,
        plan.model.model_path,
    )
