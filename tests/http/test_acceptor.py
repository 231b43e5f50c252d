"""Connections that come together are accepted together."""

import asyncio
import socket

import pytest

from runtime.http.acceptor import Acceptor, ConnectionLimit

pytestmark = pytest.mark.anyio
COUNT = 50


class Opened(asyncio.Protocol):
    """Counts connections."""

    num_open = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).num_open += 1


async def test_a_burst_takes_few_turns_of_the_loop() -> None:
    """With a turn or more for each, the last of many would wait for as many steps of those that run."""
    Opened.num_open = 0
    with socket.create_server(("127.0.0.1", 0), backlog=COUNT) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(COUNT)]
        async with asyncio.TaskGroup() as tasks:
            limit = ConnectionLimit(COUNT)
            acceptor = Acceptor(
                limit,
                None,
                lambda _: Opened(),  # type: ignore[arg-type,return-value]
                tasks,
                set(),
            )
            accepting = tasks.create_task(acceptor.run(listener))
            turns = 0
            while Opened.num_open < COUNT:
                turns += 1
                assert turns < COUNT
                await asyncio.sleep(0)
            accepting.cancel()
        for client in clients:
            client.close()
