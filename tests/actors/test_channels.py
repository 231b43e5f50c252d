"""Channels: order, bounds, draining, the end."""

import math

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from runtime.actors.channels import Channel, ChannelStatistics

pytestmark = pytest.mark.anyio


async def test_drain_takes_all_that_waits_in_order() -> None:
    channel = Channel[int](10)
    for i in range(3):
        channel.send_nowait(i)
    assert await channel.drain() == [0, 1, 2]
    channel.send_nowait(3)
    assert await channel.drain() == [3]
    channel.discard()


async def test_drain_waits_for_the_first() -> None:
    channel = Channel[str](10)
    batches: list[list[str]] = []

    async def receive() -> None:
        batches.append(await channel.drain())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await wait_all_tasks_blocked()
        assert batches == []
        channel.send_nowait("a")
        channel.send_nowait("b")
    assert batches == [["a", "b"]]
    channel.discard()


async def test_a_full_channel_refuses_or_waits() -> None:
    channel = Channel[int](2)
    channel.send_nowait(1)
    channel.send_nowait(2)
    with pytest.raises(anyio.WouldBlock):
        channel.send_nowait(3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.send, 4)
        await wait_all_tasks_blocked()
        assert channel.statistics == ChannelStatistics(sent=2, waiting=2, peak=2)
        assert await channel.drain() == [1, 2, 4]
    assert channel.statistics == ChannelStatistics(sent=3, waiting=0, peak=2)
    channel.discard()


async def test_control_channels_have_no_bound() -> None:
    channel = Channel[int](math.inf)
    for i in range(10_000):
        channel.send_nowait(i)
    assert channel.statistics == ChannelStatistics(10_000, 10_000, 10_000)
    assert await channel.drain() == list(range(10_000))
    channel.discard()


async def test_what_waits_is_received_after_close() -> None:
    channel = Channel[int](4)
    channel.send_nowait(1)
    channel.close()
    channel.close()
    with pytest.raises(anyio.ClosedResourceError):
        channel.send_nowait(2)
    assert [batch async for batch in channel] == [[1]]
    with pytest.raises(anyio.EndOfStream):
        await channel.drain()
    channel.discard()


async def test_close_ends_a_waiting_receiver() -> None:
    channel = Channel[int](4)
    batches: list[list[int]] = []

    async def receive() -> None:
        async for batch in channel:
            batches.append(batch)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await wait_all_tasks_blocked()
        channel.send_nowait(1)
        await wait_all_tasks_blocked()
        channel.close()
    assert batches == [[1]]
    channel.discard()


async def test_a_cancelled_receiver_loses_nothing() -> None:
    channel = Channel[int](4)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await channel.drain()
    channel.send_nowait(1)
    await checkpoint()
    assert await channel.drain() == [1]
    channel.discard()


@pytest.mark.parametrize("capacity", [0, -1, 1.5, math.nan])
async def test_capacity_is_checked(capacity: float) -> None:
    with pytest.raises(ValueError, match="positive integer"):
        Channel[int](capacity)
