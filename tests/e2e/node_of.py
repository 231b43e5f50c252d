"""Nodes besides node 0, in the process of the test: their ranks are processes of their own."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
from msgspec import structs

from runtime import Engine
from runtime.errors import first_fault
from runtime.node import Node
from runtime.nodes.identity import identity_of
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.settings import model_config, start_rank

SECRET = b"a secret of all nodes of a test"
PATIENCE_S = 60.0  # only a failing test waits for so long
NULL: dict[str, Any] = {"device": "null", "max_total_tokens": 8192}


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def options_of(host: str = "127.0.0.1", **options: Any) -> dict[str, Any]:
    """Options of two nodes with a rank each."""
    address = f"{host}:{free_port(host)}"
    return {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": address, "dist_timeout": 60} | options


def parts_of(
    options: dict[str, Any], number: int = 1, secret: bytes = SECRET, changes: dict[str, Any] | None = None
) -> list[Node]:
    """A node, not running: its part of each replica that it has ranks of. `changes`: of its identity."""
    plan = plan_for(from_values(options | {"node_rank": number}))
    identity, model = structs.replace(identity_of(plan), **(changes or {})), model_config(plan)
    return [
        Node(plan, start_rank(plan, model, replica=replica), secret, identity, replica)
        for replica in plan.parallel.node_replicas(number)
    ]


def node_of(options: dict[str, Any], secret: bytes = SECRET, changes: dict[str, Any] | None = None) -> Node:
    """Node 1 with ranks of one replica, not running. `changes`: of its identity."""
    (node,) = parts_of(options, 1, secret, changes)
    return node


async def run(node: Node) -> int:
    """Runs a node to its end. -> exit code. Raises StartError, NodeGone."""
    try:
        async with anyio.create_task_group() as tasks:
            code = await node.run(tasks)
            tasks.cancel_scope.cancel()
        return code
    except BaseExceptionGroup as group:
        if (fault := first_fault(group)) is None:
            raise
        raise fault from None


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    """Runs a node until the context ends; it may end by itself with the server."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node.run, tasks)
        try:
            yield node
        finally:
            with anyio.CancelScope(shield=True):
                await node.stop()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def several_nodes(options: dict[str, Any]) -> AsyncIterator[tuple[Engine, list[list[Node]]]]:
    """The engine on node 0, and of each other node its parts."""
    nodes = [parts_of(options, number) for number in range(1, options["nnodes"])]
    async with AsyncExitStack() as stack:
        for parts in nodes:
            for part in parts:
                await stack.enter_async_context(running(part))
        yield await stack.enter_async_context(Engine(**options)), nodes


@asynccontextmanager
async def two_nodes(options: dict[str, Any]) -> AsyncIterator[tuple[Engine, Node]]:
    """The engine on node 0, and node 1 with ranks of one replica."""
    async with running(node_of(options)) as node, Engine(**options) as engine:
        yield engine, node


async def until(holds: Any) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not holds():
            await anyio.sleep(0.005)
