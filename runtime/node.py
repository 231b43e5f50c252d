"""`runtime serve --node-rank K`, K > 0: a node that has ranks only. Requests come to node 0.

    connect to node 0 ──► agree on options and checkpoint ──► ranks of one generation after the other
          ▲                                                          │
          └──────── node 0 is gone: the ranks end, wait for it ◄─────┘

All of this happens for each replica of which the node has ranks, over a link of its own. The process ends
with node 0, by a signal, or when node 0 was gone for --dist-timeout.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf

import anyio
import uvloop
from anyio.abc import TaskGroup
from msgspec import structs

from runtime import log
from runtime.actors.channels import Channel
from runtime.actors.child_environment import raise_open_files
from runtime.actors.node_ranks import NodeRanks, localized
from runtime.admin.start_progress import StartProgress
from runtime.core import check_model
from runtime.errors import LinkError, NodeGone, RingError, SpawnError, StartError, first_fault
from runtime.http.node_health import NodeHealth, serve_health
from runtime.messages.codec import Wire
from runtime.messages.nodes import (
    Begin,
    Bye,
    End,
    Exited,
    FromNode,
    FromNode0,
    Hello,
    Identity,
    Refused,
    RendezvousOpened,
    SignalRank,
    ToNodeRanks,
    Welcome,
)
from runtime.messages.ranks import StartRank
from runtime.models.config.model_config import ModelConfig
from runtime.nodes.addresses import parse_address
from runtime.nodes.handshake import OTHER_SECRET, ClientHandshake
from runtime.nodes.identity import identity_of
from runtime.nodes.link import Link
from runtime.nodes.rendezvous import open_rendezvous
from runtime.nodes.secret import NODES_SECRET
from runtime.options.plan import Plan
from runtime.settings import start_rank
from runtime.shutdown import FORCE_S, SIGNALS, end_by_force
from runtime.start import prepare_ranks

RETRY_S = 0.5  # between two attempts to reach node 0
CONNECT_S = 10.0
ENDS = "the node ends"


class Node:
    """This node's ranks of one replica: the other end of a RemoteNode (actors/remote_node.py)."""

    def __init__(
        self, plan: Plan, own: StartRank, secret: bytes, identity: Identity, replica: int = 0
    ) -> None:
        """`own`: what the replica's ranks would be started with by the options of this node."""
        self._number = plan.parallel.node_rank
        self._replica = replica
        self._place = plan.parallel.replica_nodes(replica).index(self._number)  # among the replica's nodes
        self._timeout_s = plan.parallel.node_timeout_s
        self._address = parse_address(plan.parallel.dist_init_addr or "")
        self._own = own
        self._secret = secret
        self._identity = identity
        self._in = Wire[FromNode0](FromNode0)
        self._out = Wire[FromNode](FromNode)
        self._link: Link | None = None
        self._reply: Welcome | Refused | None = None
        self._bye: Bye | None = None
        self._lost_reason = ""
        self._changed = asyncio.Event()  # the link opened or was lost, or an answer has come
        self._ranks: NodeRanks | None = None
        self._ended = Channel[NodeRanks](inf)  # ranks that are to be stopped while others may begin
        self._log = log.get("nodes")

    @property
    def is_here(self) -> bool:
        """Whether node 0 has taken this node, and is connected."""
        return self._link is not None and self._link.is_open and isinstance(self._reply, Welcome)

    async def run(self, tasks: TaskGroup) -> int:
        """Serves node 0 until it ends. -> exit code. `tasks`: in which ranks end while others begin. Raises
        StartError where node 0 refuses this node, NodeGone when it was gone for too long."""
        tasks.start_soon(self._stop_ended)
        while True:
            link = await self._connect()
            while not link.is_lost:
                self._changed.clear()
                await self._changed.wait()
            await self._stop_ranks()
            if self._bye is not None:
                self._log.info("node 0 has ended", is_failure=self._bye.is_failure)
                return 1 if self._bye.is_failure else 0
            self._log.warning("node 0 is gone", reason=self._lost_reason, waits_s=self._timeout_s)

    async def stop(self) -> None:
        """Ends the ranks, and tells node 0."""
        await self._stop_ranks()
        if self._link is not None:
            self._link.send(self._out.encode(Bye(False)))
            self._link.close(ENDS)

    # ── the way to node 0 ───────────────────────────────────────────────────────────────────────────────────

    async def _connect(self) -> Link:
        """A link that node 0 has taken. Raises StartError, NodeGone."""
        reported = ""
        with anyio.move_on_after(self._timeout_s):
            while True:
                self._reply, self._lost_reason = None, ""
                link = await self._try_connect()
                match self._reply:
                    case Welcome() if link is not None:
                        self._log.info("node 0 is here", address=self._address.host, node=self._number)
                        return link
                    case Refused(reason, True):
                        raise StartError(f"node 0 does not take this node: {reason}")
                    case Refused(reason, False):
                        self._lost_reason = reason
                if self._lost_reason == OTHER_SECRET:
                    raise StartError(
                        f"node 0 at {self._address.host}:{self._address.port} has another secret; give all "
                        "nodes the same by --dist-secret-file"
                    )
                if self._lost_reason != reported:
                    reported = self._lost_reason
                    self._log.info("node 0 is not here yet", reason=reported)
                await anyio.sleep(RETRY_S)
        raise NodeGone(
            f"node 0 at {self._address.host}:{self._address.port} did not come within --dist-timeout "
            f"{self._timeout_s:g} s: {reported}"
        )

    async def _try_connect(self) -> Link | None:
        """-> a link whose Hello was answered; None: it was lost before"""
        link = Link(ClientHandshake(self._secret))
        link.on_open = partial(self._say_hello, link)
        link.on_message = self._receive
        link.on_lost = self._lose
        link.on_room = self._on_room
        try:
            with anyio.fail_after(CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: link, *self._address)
        except (OSError, TimeoutError) as error:
            self._lost_reason = getattr(error, "strerror", None) or str(error) or "it does not answer"
            return None
        self._link = link
        while self._reply is None and not link.is_lost:
            self._changed.clear()
            await self._changed.wait()
        return None if link.is_lost else link

    def _say_hello(self, link: Link) -> None:
        link.send(self._out.encode(Hello(self._number, self._identity, self._replica)))

    def _lose(self, reason: str) -> None:
        if not isinstance(self._reply, Refused):  # which says more
            self._lost_reason = reason
        self._changed.set()

    # ── what comes from it ──────────────────────────────────────────────────────────────────────────────────

    def _receive(self, body: bytes) -> None:
        """Takes a message. Raises LinkError for one that node 0 does not send."""
        try:
            message = self._in.decode(body)
        except RingError as error:
            raise LinkError(str(error)) from None
        ranks = self._ranks
        match message:
            case ToNodeRanks(generation, record):
                if ranks is not None and ranks.generation == generation:
                    ranks.publish(record)
            case SignalRank(generation, rank, number):
                if ranks is not None and ranks.generation == generation:
                    ranks.signal(rank, number)
            case Begin():
                self._begin(message)
            case End(generation):
                if ranks is not None and ranks.generation == generation:
                    self._end()
            case Bye():
                self._bye = message
            case Welcome() | Refused():
                self._reply = message
                self._changed.set()

    def _begin(self, begin: Begin) -> None:
        self._end()
        assert self._link is not None and isinstance(self._reply, Welcome), "node 0 has taken this node"
        start = localized(begin.start, self._own, self._reply.model_path)
        first = self._place * start.ranks_on_node
        indices = range(first, first + start.ranks_on_node)
        try:
            if begin.opens_rendezvous:
                self._ranks = self._ranks_with_rendezvous(indices, begin.generation, start, self._link)
            else:
                self._ranks = NodeRanks(indices, begin.generation, start, self._link)
        except SpawnError as error:
            for rank in indices:
                reason = f"node {self._number}: {error}"
                self._link.send(self._out.encode(Exited(begin.generation, rank, 1, reason)))

    def _ranks_with_rendezvous(
        self, indices: range, generation: int, start: StartRank, link: Link
    ) -> NodeRanks:
        """Ranks that meet those of other nodes on this one. Raises SpawnError."""
        try:
            listener, rendezvous = open_rendezvous(link.own)
        except OSError as error:
            raise SpawnError(f"the ranks have no place to meet: {error.strerror}") from None
        with ExitStack() as failed:
            failed.callback(listener.close)
            start = structs.replace(start, rendezvous=rendezvous)
            ranks = NodeRanks(indices, generation, start, link, listener)
            failed.pop_all()
        link.send(self._out.encode(RendezvousOpened(generation, rendezvous)))
        return ranks

    def _end(self) -> None:
        """Ends what is left of the current ranks, while others may begin."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            self._ended.send_nowait(ranks)

    async def _stop_ended(self) -> None:
        async for several in self._ended:
            for ranks in several:
                await ranks.stop()

    def _on_room(self) -> None:
        if self._ranks is not None:
            self._ranks.on_room()

    async def _stop_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            await ranks.stop()


def run(plan: Plan) -> int:
    """Holds this node's ranks until node 0 or a signal ends it. -> exit code. Raises StartError."""
    log.setup(plan.logs.log_level, plan.logs.log_format)
    log.take_logging()
    for notice in plan.notices:
        log.get("options").warning(notice)
    raise_open_files()
    return uvloop.run(main(plan))


async def main(plan: Plan) -> int:
    """-> exit code. Raises StartError."""
    secret = NODES_SECRET.read(plan.parallel.dist_secret_file)
    model = prepare_ranks(plan)
    try:
        async with anyio.create_task_group() as tasks:
            code = await _serve(plan, model, secret, tasks)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        match first_fault(group):
            case NodeGone() as gone:
                log.get("nodes").error(ENDS, reason=str(gone))
                return 1
            case None:
                raise
            case fault:
                raise fault from None
    return code


async def _serve(plan: Plan, model: ModelConfig, secret: bytes, tasks: TaskGroup) -> int:
    number = plan.parallel.node_rank
    progress, health = StartProgress.of_model(model), NodeHealth(number)
    tasks.start_soon(progress.run)
    if not plan.why["port"].source.startswith(("default", "derived")):
        tasks.start_soon(serve_health, health, plan.http.host, plan.http.port)
    await check_model(plan, progress)
    progress.end()
    identity = await anyio.to_thread.run_sync(identity_of, plan)
    nodes = [
        Node(plan, start_rank(plan, model, replica=replica), secret, identity, replica)
        for replica in plan.parallel.node_replicas(number)
    ]
    health.is_here = lambda: all(node.is_here for node in nodes)
    ended = anyio.Event()
    tasks.start_soon(_end_on_signals, ended)
    try:
        return await _first_of(partial(run_all, nodes, tasks), ended)
    finally:
        with anyio.CancelScope(shield=True):
            for node in nodes:
                await node.stop()


async def run_all(nodes: Sequence[Node], tasks: TaskGroup) -> int:
    """Runs this node's part of each replica until all have ended with node 0. -> the highest exit code.
    Raises what Node.run raises."""
    codes: list[int] = []

    async def run_one(node: Node) -> None:
        codes.append(await node.run(tasks))

    async with anyio.create_task_group() as running:
        for node in nodes:
            running.start_soon(run_one, node)
    return max(codes)


async def _first_of(run: Callable[[], Awaitable[int]], ended: anyio.Event) -> int:
    """Runs until it returns its exit code, or until the event is set: 0."""
    code = 0

    async def serve() -> None:
        nonlocal code
        code = await run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await ended.wait()
        tasks.cancel_scope.cancel()
    return code


async def _end_on_signals(ended: anyio.Event) -> None:
    """The first signal ends the node: node 0 decides what becomes of requests."""
    with anyio.open_signal_receiver(*SIGNALS) as signals:
        async for number in signals:
            log.get("nodes").info(ENDS, signal=number.name)
            end_by_force(FORCE_S)
            ended.set()
