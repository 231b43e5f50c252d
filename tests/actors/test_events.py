"""The publisher at the other end of real sockets; messages are read as lists, as the public schema has
them."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio

from runtime.actors import events
from runtime.actors.events import EventsActor
from runtime.cache.journal import CacheEvents, Cleared, Removed
from runtime.errors import OptionsError
from runtime.metrics import Metrics
from runtime.options.groups.observe import KVEvents
from tests.cache.reader import Reader

pytestmark = pytest.mark.anyio
ANYWHERE = "tcp://127.0.0.1:*"


@asynccontextmanager
async def publishing(**more: Any) -> AsyncIterator[EventsActor]:
    config = msgspec.convert(
        {"publisher": "zmq", "endpoint": ANYWHERE, "replay_endpoint": ANYWHERE, **more}, KVEvents
    )
    actor = EventsActor(config, Metrics())
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            yield actor
            tasks.cancel_scope.cancel()
    finally:
        actor.close()


def batch(number: int) -> CacheEvents:
    return CacheEvents(number, [Removed([number], "GPU")])


async def test_a_reader_gets_batches_in_order() -> None:
    async with publishing(topic="kv") as actor, Reader(actor.endpoint, topic="kv") as reader:
        await reader.joined(lambda: actor.offer(CacheEvents(0, [Cleared()])))
        for number in (1, 2):
            actor.offer(batch(number))
        for number in (1, 2):
            topic, sequence, body = await reader.take_after(number)
            assert topic == b"kv" and sequence == number.to_bytes(8, "big")
            ts, events, rank = msgspec.msgpack.decode(body)
            assert isinstance(ts, float) and rank == 0 and events == [["BlockRemoved", [number], "GPU"]]
        assert actor._metrics.kv_event_drops.value == 0


async def test_what_was_missed_is_sent_again() -> None:
    async with publishing(buffer_steps=100) as actor:
        for number in range(200):
            actor.offer(batch(number))
        await anyio.wait_all_tasks_blocked()
        assert actor.replay_endpoint is not None
        async with Reader(actor.endpoint, replay_endpoint=actor.replay_endpoint) as reader:
            assert [number for number, _ in await reader.replay(150)] == list(range(150, 200))
            got = await reader.replay(0)
            assert [number for number, _ in got] == list(range(100, 200)), "the latest buffer_steps of them"
            assert got[0][1] == [["BlockRemoved", [100], "GPU"]]
            assert await reader.replay(200) == []
            await reader.ask([b"nonsense"])
            await reader.ask([b"", b"12"])
            assert len(await reader.replay(199)) == 1, "it is still there"


async def test_drops_are_counted_and_seen_by_the_numbers() -> None:
    config = KVEvents(publisher="zmq", endpoint=ANYWHERE, replay_endpoint=ANYWHERE, max_queue_size=2)
    actor = EventsActor(config, Metrics())
    try:
        for number in range(5):  # no task takes them: `run` has not begun
            actor.offer(batch(number))
        assert actor._metrics.kv_event_drops.value == 3
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            await anyio.wait_all_tasks_blocked()
            actor.offer(batch(5))
            await anyio.wait_all_tasks_blocked()
            assert actor.replay_endpoint is not None
            async with Reader(actor.endpoint, replay_endpoint=actor.replay_endpoint) as reader:
                assert [number for number, _ in await reader.replay(0)] == [0, 1, 5]
            tasks.cancel_scope.cancel()
    finally:
        actor.close()


async def test_a_taken_endpoint_is_a_start_error() -> None:
    async with publishing() as actor:
        port = actor.endpoint.rpartition(":")[2]
        with pytest.raises(OptionsError, match=f"tcp://\\*:{port} cannot be bound .* name another endpoint"):
            EventsActor(KVEvents(publisher="zmq", endpoint=f"tcp://*:{port}"), Metrics())
        with pytest.raises(OptionsError, match="cannot be bound"):
            EventsActor(
                KVEvents(publisher="zmq", endpoint=ANYWHERE, replay_endpoint=actor.endpoint), Metrics()
            )


async def test_the_default_is_bound_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events hold token ids, and have no keys."""
    assert events.DEFAULT_ENDPOINT.startswith("tcp://127.0.0.1:")
    monkeypatch.setattr(events, "DEFAULT_ENDPOINT", ANYWHERE)
    async with publishing(endpoint=None) as actor, Reader(actor.endpoint) as reader:
        await reader.joined(lambda: actor.offer(CacheEvents(0, [Cleared()])))
        assert actor.endpoint.startswith("tcp://127.0.0.1:")


async def test_an_address_without_wildcard_is_connected_to() -> None:
    context = zmq.asyncio.Context()
    collector = context.socket(zmq.SUB)
    collector.subscribe(b"")
    port = collector.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with publishing(endpoint=f"tcp://127.0.0.1:{port}") as actor:
            number = 0
            while not await collector.poll(20):  # until the connection stands
                actor.offer(batch(number))
                number += 1
            assert (await collector.recv_multipart())[0] == b""
    finally:
        context.destroy(linger=0)


async def test_without_pyzmq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(OptionsError, match="kv-events"):
        EventsActor(KVEvents(publisher="zmq"), Metrics())


@pytest.mark.parametrize(
    ("config", "is_on"),
    [
        ({}, False),
        ({"publisher": "zmq"}, True),
        ({"publisher": "null"}, False),
        ({"enable_kv_cache_events": True}, True),
        ({"enable_kv_cache_events": False, "publisher": "zmq"}, False),
        ({"enable_kv_cache_events": True, "publisher": "null"}, False),
    ],
)
def test_when_it_is_on(config: dict[str, Any], is_on: bool) -> None:
    assert msgspec.convert(config, KVEvents).is_on == is_on
