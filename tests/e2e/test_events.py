"""A router beside a running engine: what it believes is what the prefix tree holds, after evictions, gaps and
the death of a rank."""

import os
import signal
from random import Random
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.errors import OptionsError
from tests.cache.reader import Reader
from tests.cache.router import Router
from tests.cache.walk import held
from tests.metrics.read import sample

pytestmark = pytest.mark.anyio
OPTIONS: dict[str, Any] = {
    "device": "null",
    "page_size": 4,
    "max_total_tokens": 256,
    "context_length": 128,
    "random_seed": 1,
}
ANYWHERE = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


async def traffic(engine: Engine, random: Random, count: int) -> None:
    """Requests whose prompts share prefixes, more than the cache holds; some have a salt, some clients
    leave."""

    async def one() -> None:
        prompt = [random.randrange(2) + 5 * i for i in range(random.randrange(4, 40))]
        salt = random.choice(["", "", "pepper"])
        leaves_after = random.choice([1000, 1000, 3])
        async for delta in engine.stream(
            prompt, cache_salt=salt, max_new_tokens=random.randrange(1, 30), ignore_eos=True
        ):
            leaves_after -= len(delta.token_ids)
            if leaves_after < 0:
                break

    for _ in range(count // 8):
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one)


async def settle(engine: Engine) -> int:
    """Waits until everybody has left. -> how many batches were published"""
    while engine.load().running or engine.load().waiting:
        await anyio.sleep(0.001)
    await anyio.wait_all_tasks_blocked()
    return int(sample(engine.metrics(), "runtime_kv_event_batches_total"))


async def test_a_router_believes_what_is_so() -> None:
    random, router = Random(3), Router()
    async with Engine(**OPTIONS, kv_events_config=ANYWHERE) as engine:
        core = engine._core
        actor = core.replicas[0].events
        assert (
            actor is not None and actor.replay_endpoint is not None and core.replicas[0].scheduler is not None
        )
        async with Reader(actor.endpoint, replay_endpoint=actor.replay_endpoint) as reader:
            await traffic(engine, random, 40)
            num_published = await settle(engine)
            batches = await reader.replay(0)
            assert [number for number, _ in batches] == list(range(num_published)) and batches[0][1][0] == [
                "AllBlocksCleared"
            ]
            for _, events in batches:
                router.take(events)
            assert router.prefixes() == held(core.replicas[0].scheduler.cache.tree) and router.prefixes()
            assert router.num_removed > 50 and len({namespace for namespace, _ in router.prefixes()}) == 2

            os.kill(core.replicas[0].supervisor.ranks.pids[0], signal.SIGKILL)
            await traffic(engine, random, 40)
            last = await settle(engine) - 1
            news = await reader.news(last)
            missed = [batch for batch in await reader.replay(num_published) if batch[0] < news[0][0]]
            batches = missed + [batch for batch in news if batch[0] >= num_published]
            assert [number for number, _ in batches] == list(range(num_published, last + 1))
            for _, events in batches:
                router.take(events)
            assert router.prefixes() == held(core.replicas[0].scheduler.cache.tree) and router.prefixes()
            assert core.replicas[0].supervisor.generation == 2 and router.num_cleared == 2

            await engine.flush_cache()
            for _, events in await reader.replay(last + 1):
                router.take(events)
            assert not router.prefixes()


async def test_off_means_off() -> None:
    async with Engine(**OPTIONS, kv_events_config={"publisher": "null"}) as engine:
        await engine.generate([1, 2, 3, 4, 5, 6], max_new_tokens=4)
        assert (
            engine._core.replicas[0].scheduler is not None
            and engine._core.replicas[0].scheduler.journal is None
        )
        assert sample(engine.metrics(), "runtime_kv_event_batches_total") == 0


async def test_a_taken_endpoint_prevents_the_start() -> None:
    async with Engine(**OPTIONS, kv_events_config=ANYWHERE) as engine:
        assert engine._core.replicas[0].events is not None
        taken = engine._core.replicas[0].events.endpoint.replace("127.0.0.1", "*")
        with pytest.raises(OptionsError, match="name another endpoint"):
            async with Engine(**OPTIONS, kv_events_config={"publisher": "zmq", "endpoint": taken}):
                pass
