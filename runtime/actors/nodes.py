"""The other nodes of a server, seen from node 0, which has the event loop (node.py is a node's own side).

Node 0 listens at --dist-init-addr. A node connects, proves that it has the secret, and says what it is; node
0 takes it if it agrees in version, options and checkpoint. A node connects once for each replica of which it
has ranks, so that no replica waits behind the messages of another. The links outlive the ranks: each
generation of a replica's ranks begins when all nodes of the replica are here, and dies when one of them is
gone.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import anyio
from anyio.abc import TaskStatus

from runtime import log
from runtime.actors.remote_node import RemoteNode
from runtime.actors.replica_nodes import ReplicaNodes
from runtime.errors import LinkError, RingError, StartError
from runtime.messages.codec import Wire
from runtime.messages.nodes import FromNode, FromNode0, Hello, Identity, Refused, Welcome
from runtime.nodes.addresses import Address, parse_address
from runtime.nodes.handshake import ServerHandshake
from runtime.nodes.identity import differences, identity_of
from runtime.nodes.link import Link
from runtime.nodes.secret import NODES_SECRET
from runtime.options.plan import Plan

MAX_STRANGERS = 16  # connections that have not proved the secret; the oldest is cut for the next
BACKLOG = 64


class Nodes:
    """All nodes but node 0. `run` is its life; `of` gives what ranks need."""

    def __init__(
        self, address: Address, secret: bytes, layout: Sequence[range], timeout_s: float, model_path: str
    ) -> None:
        """`layout`: the nodes of each replica. `timeout_s`: within which those of a replica must be here when
        its ranks are to start."""
        self._address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._model_path = model_path
        self._identity: Identity | None = None
        self._num_nodes = layout[-1].stop
        self._nodes = {
            (replica, number): RemoteNode(number, replica, place, self._node_lost)
            for replica, numbers in enumerate(layout)
            for place, number in enumerate(numbers)
            if number
        }
        self._replicas = [self._replica_nodes(replica, numbers) for replica, numbers in enumerate(layout)]
        self._strangers: list[Link] = []
        self._changed = anyio.Event()
        self._log = log.get("nodes")

    @property
    def missing(self) -> list[int]:
        """Numbers of the nodes that are not here."""
        return sorted({node.number for node in self._nodes.values() if not node.is_here})

    def of(self, replica: int) -> ReplicaNodes | None:
        """The nodes of a replica; None: node 0 has all of its ranks."""
        own = self._replicas[replica]
        return own if own.has_others else None

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

    def close(self, *, is_failure: bool) -> None:
        """Tells all nodes that the server ends. For the owner, when the ranks have ended."""
        for node in self._nodes.values():
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
        node = self._nodes[hello.replica, hello.node]
        node.attach(link)
        self._log.info("a node is here", **self._named(node), address=link.peer, missing=self.missing)
        self._note_change()

    def _why_not(self, hello: Hello) -> Refused | None:
        assert self._identity is not None, "it listens"
        if found := differences(self._identity, hello.identity):
            return Refused(f"{'; '.join(found)}; start all nodes with the same", True)
        node = self._nodes.get((hello.replica, hello.node))
        if node is None:
            return Refused(
                f"--node-rank {hello.node} is none of the nodes from 1 to {self._num_nodes - 1}", True
            )
        if node.is_here:
            return Refused(f"another node is here as --node-rank {hello.node}", False)
        return None

    def _node_lost(self, node: RemoteNode, reason: str) -> None:
        self._log.warning("a node is gone", **self._named(node), reason=reason, waits_s=self._timeout_s)
        self._note_change()

    def _named(self, node: RemoteNode) -> dict[str, int]:
        """Fields of a log line that say which node, and which replica's ranks."""
        return {"node": node.number} | ({"replica": node.replica} if len(self._replicas) > 1 else {})

    # ── replicas ────────────────────────────────────────────────────────────────────────────────────────────

    def _replica_nodes(self, replica: int, numbers: range) -> ReplicaNodes:
        return ReplicaNodes(
            [self._nodes[replica, number] for number in numbers if number],
            host=None if numbers.start else self._address.host,
            timeout_s=self._timeout_s,
            wait_change=self._wait_change,
            is_spared=lambda: any(not other.missing for other in self._replicas),
        )

    def _note_change(self) -> None:
        """A node has come or gone."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _wait_change(self) -> None:
        await self._changed.wait()


def open_nodes(plan: Plan) -> Nodes | None:
    """The other nodes; None: there are none. Raises StartError."""
    parallel = plan.parallel
    if parallel.nnodes == 1:
        return None
    if parallel.node_rank:
        raise StartError("only node 0 takes requests; start the other nodes with `runtime serve`")
    return Nodes(
        parse_address(parallel.dist_init_addr or ""),
        NODES_SECRET.read(parallel.dist_secret_file),
        [parallel.replica_nodes(replica) for replica in range(parallel.num_replicas)],
        parallel.node_timeout_s,
        plan.model.model_path,
    )
