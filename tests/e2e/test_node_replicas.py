"""Replicas and attention groups over several nodes: tokens of one rank, and nodes that are lost."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.errors import NodeGone
from runtime.node import Node
from tests.e2e.node_of import NULL, SECRET, options_of, parts_of, running, several_nodes, until
from tests.metrics.read import sample

pytestmark = pytest.mark.anyio
TURNS: dict[str, Any] = {"load_balance_method": "round_robin"}
ONE_EACH: dict[str, Any] = {"tensor_parallel_size": 1, "data_parallel_size": 2, "nnodes": 2}
CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 128,
    "max_total_tokens": 2048,
    "chunked_prefill_size": 16,
}
PROMPTS = [[1, 2, 3], list(range(4, 40)), [7] * 11, [9, 8]]


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RUNTIME_DIST_SECRET", SECRET.decode())
    yield


class Load:
    """Requests that run on the null device while something happens to a node: the i-th goes to the replicas
    in turn, unless it names one."""

    def __init__(self, engine: Engine, count: int = 40) -> None:
        self.engine = engine
        self.count = count
        self.found: dict[int, list[int]] = {}

    async def ask(self, i: int) -> None:
        self.found[i] = []
        params: dict[str, Any] = {"seed": i, "max_new_tokens": self.count, "ignore_eos": True}
        async for delta in self.engine.stream([5] * (i + 1), **params):
            self.found[i] += delta.token_ids

    def check(self, count: int) -> None:
        """All answers are what the null device says."""
        assert self.found == {i: [97 + (i + i + 1 + n) % 26 for n in range(self.count)] for i in range(count)}

    def have_begun(self, count: int) -> bool:
        return len(self.found) == count and all(len(tokens) > 2 for tokens in self.found.values())


def leave(part: Node) -> None:
    """Cuts the part's link, and has it find no node 0 until `come_back`."""
    part._address = part._address._replace(port=1)
    assert part._link is not None
    part._link.abort("a test cut it")


def come_back(part: Node, options: dict[str, Any]) -> None:
    part._address = part._address._replace(port=int(options["dist_init_addr"].rpartition(":")[2]))


def recovering(engine: Engine) -> list[bool]:
    return [replica.supervisor.is_recovering for replica in engine._core.replicas]


@pytest.mark.parametrize(
    ("ranks", "replicas", "nodes", "here"),
    [(1, 2, 2, [1, 0]), (1, 4, 2, [1, 1, 0, 0]), (2, 2, 2, [2, 0]), (2, 2, 4, [1, 0]), (2, 3, 3, [2, 0, 0])],
)
async def test_each_replica_answers_wherever_its_ranks_are(
    ranks: int, replicas: int, nodes: int, here: list[int]
) -> None:
    sizes = {"tensor_parallel_size": ranks, "data_parallel_size": replicas, "nnodes": nodes}
    async with several_nodes(options_of(**NULL, **TURNS, **sizes)) as (engine, others):
        load = Load(engine)
        async with anyio.create_task_group() as tasks:
            for i in range(2 * replicas):
                tasks.start_soon(load.ask, i)
        load.check(2 * replicas)
        own = list(engine._core.replicas)
        assert [len(replica.supervisor.ranks.pids) for replica in own] == here
        assert [replica.answers for replica in own] == [(80, 2)] * replicas
        assert sum(len(parts) for parts in others) * (own[0].supervisor.setup.ranks_on_node) == (
            ranks * replicas - sum(here)
        )


@pytest.mark.parametrize(
    ("sizes", "family"),
    [
        (ONE_EACH, "llama"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "nnodes": 4}, "llama"),
        (ONE_EACH | {"tensor_parallel_size": 2, "enable_dp_attention": True}, "qwen3_moe"),
    ],
    ids=["a replica on each", "replicas of two nodes", "attention groups"],
)
async def test_tokens_are_those_of_transformers(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str, list[int], int], list[int]],
    sizes: dict[str, Any],
    family: str,
) -> None:
    """The ranks of a replica that has none on node 0 meet on its first node. A node that is lost and comes
    back changes no token."""
    options = options_of(**CPU, **TURNS, **sizes, model_path=str(checkpoint(family)))
    async with several_nodes(options) as (engine, others):
        found: dict[int, list[int]] = {}

        async def ask(i: int) -> None:
            params: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 30}
            found[i] = []
            async for delta in engine.stream(PROMPTS[i], **params):
                found[i] += delta.token_ids

        async with anyio.create_task_group() as tasks:
            for i in range(len(PROMPTS)):
                tasks.start_soon(ask, i)
            await until(lambda: len(found) == len(PROMPTS) and all(found.values()))
            link = others[-1][0]._link
            assert link is not None
            link.abort("a test cut it")
        assert found == {i: reference(family, prompt, 30) for i, prompt in enumerate(PROMPTS)}
        await until(lambda: not any(recovering(engine)))
        assert [replica.supervisor.generation for replica in engine._core.replicas][-1] == 2
        assert all(replica.num_steps for replica in engine._core.replicas)


async def test_requests_of_a_lost_node_go_to_the_living_replica_which_serves_on() -> None:
    """Longer than --dist-timeout; and the replica takes requests again when its node is back."""
    options = options_of(**NULL, **TURNS, **ONE_EACH, null_step_s=0.002) | {"dist_timeout": 1}
    async with several_nodes(options) as (engine, [[part]]):
        part._timeout_s = 60.0
        load, core = Load(engine, 100), engine._core
        async with anyio.create_task_group() as tasks:
            for i in range(4):
                tasks.start_soon(load.ask, i)
            await until(lambda: load.have_begun(4))
            leave(part)
        load.check(4)
        assert recovering(engine) == [False, True] and core.health().state == "ready"
        assert core.health().detail == "1 of 2 replicas are recovering"
        assert sample(core.metrics(), "runtime_moved_requests_total") == 2
        await anyio.sleep(1.2)
        assert core.health().state == "ready", "it waits for the node for as long as another replica serves"
        await load.ask(4)
        come_back(part, options)
        await until(lambda: not any(recovering(engine)))
        before = core.replicas[1].answers[1]
        for i in (5, 6):
            await load.ask(i)
        load.check(7)
        assert core.replicas[1].answers[1] > before


async def test_without_any_living_replica_requests_wait_and_then_the_server_ends() -> None:
    """Each replica has lost a node: the one that is whole again first takes the requests of both."""
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2, "nnodes": 4}
    options = options_of(**NULL, **TURNS, **sizes, null_step_s=0.002) | {"dist_timeout": 2}
    async with several_nodes(options) as (engine, [[first], [second], [third]]):
        for part in (first, second, third):
            part._timeout_s = 60.0
        load, core = Load(engine, 60), engine._core
        async with anyio.create_task_group() as tasks:
            for i in range(4):
                tasks.start_soon(load.ask, i)
            await until(lambda: load.have_begun(4))
            leave(first)
            leave(third)
            await until(lambda: core.health().state == "recovering")
            come_back(third, options)
        load.check(4)
        assert recovering(engine) == [True, False]
        leave(second)
        await until(lambda: core.health().state == "failed")
        assert isinstance(core.failure, NodeGone)
        assert "node 1 did not come" in str(core.failure) or "node 2 did not come" in str(core.failure)


async def test_a_killed_rank_of_another_node_is_replaced_there() -> None:
    options = options_of(**NULL, **TURNS, **ONE_EACH | {"data_parallel_size": 4}, null_step_s=0.002)
    async with several_nodes(options) as (engine, [parts]):
        load, core = Load(engine, 100), engine._core
        async with anyio.create_task_group() as tasks:
            for i in range(8):
                tasks.start_soon(load.ask, i)
            await until(lambda: load.have_begun(8))
            ranks = parts[1]._ranks
            assert ranks is not None
            os.kill(ranks._processes.ranks[0].process.pid, signal.SIGKILL)
        load.check(8)
        await until(lambda: not any(recovering(engine)))
        assert [replica.supervisor.generation for replica in core.replicas] == [1, 1, 1, 2]
        await engine.generate([1], max_new_tokens=2, ignore_eos=True)


async def test_a_part_of_a_node_that_comes_twice_waits() -> None:
    options = options_of(**NULL, **ONE_EACH | {"data_parallel_size": 4})
    twice = parts_of(options)[1]
    async with several_nodes(options) as (engine, _), running(twice):
        await until(lambda: twice._lost_reason == "another node is here as --node-rank 1")
        assert not twice.is_here and engine._core.health().state == "ready"
