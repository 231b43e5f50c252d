"""Two nodes: tokens of one, deaths of ranks and nodes, refusals, and bounds of what is kept between them."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.ranks import Ranks
from runtime.errors import NodeGone, StartError, Unavailable
from runtime.messages.ranks import RankFailed
from tests.e2e.node_of import NULL, SECRET, node_of, options_of, run, running, two_nodes, until

pytestmark = pytest.mark.anyio
CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 4096,
}
PROMPTS = [[1, 2, 3], list(range(4, 40)), [7] * 11]


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RUNTIME_DIST_SECRET", SECRET.decode())
    yield


def answer(prompt: list[int], seed: int, count: int) -> list[int]:
    """What the null device says."""
    return [97 + (seed + len(prompt) + i) % 26 for i in range(count)]


async def tokens(engine: Engine, prompt: list[int], count: int, **params: Any) -> list[int]:
    answer = await engine.generate(prompt, max_new_tokens=count, ignore_eos=True, **params)
    return answer.token_ids


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        {"data_parallel_size": 2, "enable_dp_attention": True, "load_balance_method": "round_robin"},
    ],
    ids=["one stage", "two stages", "attention groups"],
)
async def test_tokens_are_those_of_transformers(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str, list[int], int], list[int]],
    sizes: dict[str, Any],
) -> None:
    """One stage over two nodes, and a stage or an attention group on each."""
    options = options_of(**CPU, **sizes, model_path=str(checkpoint("llama")), chunked_prefill_size=16)
    async with two_nodes(options) as (engine, _):
        found: dict[int, list[int]] = {}

        async def ask(i: int) -> None:
            found[i] = await tokens(engine, PROMPTS[i], 20, temperature=0)

        async with anyio.create_task_group() as tasks:
            for i in range(len(PROMPTS)):
                tasks.start_soon(ask, i)
        assert found == {i: reference("llama", prompt, 20) for i, prompt in enumerate(PROMPTS)}
        readies = engine._core.replicas[0].supervisor.readies
        assert [ready.rank for ready in readies] == [0, 1]
        assert len(engine._core.replicas[0].supervisor.ranks.pids) == 1, "rank 1 is of another node"


class Load:
    """Requests that run on the null device while something happens to a node."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.found: dict[int, list[int]] = {}
        self.num_tokens = 0

    async def ask(self, i: int) -> None:
        self.found[i] = []
        params: dict[str, Any] = {"seed": i, "max_new_tokens": 80, "ignore_eos": True}
        async for delta in self.engine.stream(list(range(1, i + 2)), **params):
            self.found[i] += delta.token_ids
            self.num_tokens += len(delta.token_ids)

    def check(self) -> None:
        assert self.found == {i: answer(list(range(i + 1)), i, 80) for i in range(8)}


@pytest.mark.parametrize("what", ["cut", "rank 1", "rank 0"])
async def test_no_stream_breaks_when_a_node_or_a_rank_dies(what: str) -> None:
    async with two_nodes(options_of(**NULL, null_step_s=0.002)) as (engine, node):
        load = Load(engine)
        supervisor = engine._core.replicas[0].supervisor
        async with anyio.create_task_group() as tasks:
            for i in range(8):
                tasks.start_soon(load.ask, i)
            for after in (100, 250, 400):
                await until(lambda after=after: load.num_tokens > after)
                generation = supervisor.generation
                if what == "cut":
                    assert node._link is not None
                    node._link.abort("a test cut it")
                elif what == "rank 1":
                    assert node._ranks is not None
                    os.kill(node._ranks._processes.ranks[0].process.pid, signal.SIGKILL)
                else:
                    os.kill(supervisor.ranks.pids[0], signal.SIGKILL)
                await until(lambda g=generation: supervisor.generation > g and not supervisor.is_recovering)
        load.check()
        assert engine._core.health().state == "ready"


async def test_requests_wait_for_a_node_that_left_and_go_on_when_another_comes() -> None:
    options = options_of(**NULL, null_step_s=0.002)
    first = node_of(options)
    async with running(first), Engine(**options) as engine:
        load = Load(engine)
        async with anyio.create_task_group() as tasks:
            for i in range(8):
                tasks.start_soon(load.ask, i)
            await until(lambda: load.num_tokens > 100)
            await first.stop()
            first._address = first._address._replace(port=1)  # it does not come back itself
            await until(lambda: engine._core.health().state == "recovering")
            async with running(node_of(options)):
                await until(lambda: len(load.found) == 8 and all(len(x) == 80 for x in load.found.values()))
        load.check()


async def test_a_node_that_does_not_come_back_ends_the_server() -> None:
    options = options_of(**NULL, dist_timeout=1)
    node = node_of(options | {"dist_timeout": 60})
    async with running(node), Engine(**options) as engine:
        node._address = node._address._replace(port=1)
        assert node._link is not None
        node._link.abort("a test cut it")
        with pytest.raises(Unavailable):
            await tokens(engine, [1, 2], 5)
        await until(lambda: engine._core.health().state == "failed")
        assert isinstance(engine._core.failure, NodeGone)
        assert "node 1 did not come within --dist-timeout 1 s" in str(engine._core.failure)


async def test_a_node_ends_where_node_0_does_not_come() -> None:
    node = node_of(options_of(**NULL, dist_timeout=1))
    with pytest.raises(NodeGone, match="did not come within --dist-timeout 1 s: Connection refused"):
        await run(node)


@pytest.mark.parametrize(
    ("secret", "changes", "number", "message"),
    [
        (b"another secret, as long as it", {}, 1, "has another secret"),
        (SECRET, {"version": "0.0"}, 1, "version of this package is .* on node 0, and 0.0 there"),
        (SECRET, {"checkpoint": "0"}, 1, "the files of --model-path are others than on node 0"),
        (SECRET, {"options": {"page_size": "8"}}, 1, "--page-size is not given on node 0, and 8 there"),
        (SECRET, {}, 2, "--node-rank 2 is none of the nodes from 1 to 1"),
    ],
)
async def test_a_node_that_does_not_agree_is_refused_by_name(
    secret: bytes, changes: dict[str, Any], number: int, message: str
) -> None:
    options = options_of(**NULL)
    async with two_nodes(options) as (engine, _):
        node = node_of(options, secret, changes)
        node._number = number
        with pytest.raises(StartError, match=message):
            await run(node)
        assert await tokens(engine, [1, 2], 5, seed=0) == answer([1, 2], 0, 5)


async def test_a_second_node_with_a_number_waits_until_the_first_is_gone() -> None:
    options = options_of(**NULL)
    second = node_of(options)
    async with two_nodes(options) as (engine, first):
        async with running(second):
            await until(lambda: second._lost_reason == "another node is here as --node-rank 1")
            assert first.is_here and not second.is_here
            first._address = first._address._replace(port=1)
            await first.stop()
            await until(lambda: second.is_here)
            assert await tokens(engine, [1, 2], 5, seed=0) == answer([1, 2], 0, 5)


async def test_a_rank_that_cannot_start_there_is_a_refusal_here() -> None:
    options = options_of(**NULL)
    node = node_of(options)
    node._own.device_options["vocab_size"] = "none"
    async with running(node):
        with pytest.raises(StartError, match="vocab_size"):
            await Engine(**options).__aenter__()


async def test_commands_and_long_plans_reach_all_nodes_through_small_rings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts whose plans are longer than the rings of both nodes."""
    for opened in (Ranks, RankProcesses):
        monkeypatch.setitem(opened.__init__.__kwdefaults__, "ring_bytes", 1024)
    options = options_of(**NULL, chunked_prefill_size=2048)
    async with two_nodes(options) as (engine, _):
        prompt = [5] * 1800
        found: list[list[int]] = []

        async def ask() -> None:
            found.append(await tokens(engine, prompt, 3, seed=1))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
        assert found == [answer(prompt, 1, 3)] * 4
        assert engine._core.replicas[0].supervisor.ranks._plans._capacity == 1024


async def test_the_end_of_node_0_ends_the_node() -> None:
    options = options_of(**NULL)
    node = node_of(options)
    codes: list[int] = []

    async def run_node() -> None:
        codes.append(await run(node))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_node)
        async with Engine(**options) as engine:
            pid = node._ranks._processes.ranks[0].process.pid if node._ranks else 0
            assert await tokens(engine, [1, 2], 5, seed=0) == answer([1, 2], 0, 5)
    assert codes == [0] and pid and not Path(f"/proc/{pid}").exists()


async def test_a_request_is_no_suspect_for_the_loss_of_nodes() -> None:
    """One that runs alone while its node is lost again and again; ranks that a request kills are another
    matter."""
    async with two_nodes(options_of(**NULL, null_step_s=0.01)) as (engine, node):
        supervisor = engine._core.replicas[0].supervisor
        found: list[int] = []

        async def ask() -> None:
            async for delta in engine.stream([1, 2, 3], seed=0, max_new_tokens=30, ignore_eos=True):
                found.extend(delta.token_ids)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            for _ in range(3):
                before = len(found)
                await until(lambda before=before: len(found) > before)
                generation = supervisor.generation
                assert node._link is not None
                node._link.abort("a test cut it")
                await until(lambda g=generation: supervisor.generation > g and not supervisor.is_recovering)
        assert found == answer([1, 2, 3], 0, 30)


async def test_a_rank_that_fails_with_its_node_is_no_failure_of_its_own() -> None:
    """Collectives fail on node 0 before the loss of the node is noticed."""
    async with two_nodes(options_of(**NULL)) as (engine, node):
        supervisor = engine._core.replicas[0].supervisor
        rank = supervisor.ranks._ranks[0]
        rank.failed = RankFailed(0, "a collective failed", False)
        os.kill(supervisor.ranks.pids[0], signal.SIGKILL)
        await rank.exited.wait()
        assert supervisor.ranks.died is None, "it waits for the cause"
        assert node._link is not None
        node._link.abort("a test cut it")
        await until(lambda: supervisor.generation > 1 and not supervisor.is_recovering)
        assert supervisor._deaths.num_failures == 0
