"""Pages travel layer by layer, while the step that computes them runs: tokens are those of transformers."""

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import CapacityLimiter
from msgspec.msgpack import Decoder

import runtime
from runtime.cache import host
from runtime.messages.steps import StepResult
from runtime.messages.transfer import Ask, Found, Parts, Section, ToDecode, Transfer
from runtime.transfer.incoming import ArrivingPages
from runtime.transfer.key import link_key
from runtime.transfer.wire import connect
from tests.e2e.conftest import Generate
from tests.e2e.disaggregated import COUNT, FULL, KEY, PROMPT, TWO, counts, key_options, server, source_of
from tests.e2e.test_disaggregation_peers import is_clean

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]
ANSWERS: Decoder[Any] = Decoder(ToDecode)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of servers whose ranks say of each layer that it is saved."""
    monkeypatch.setattr(host, "NOTICE_BYTES", 1)
    return key_options(tmp_path, KEY)


class HeldResults:
    """The results of a server's steps, which it does not see before `release`, as if their last layers took
    long."""

    def __init__(self, engine: runtime.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = engine._core.replicas[0].supervisor.ranks
        assert ranks is not None
        self._ranks, self._results, self._is_over = ranks, ranks.results, False
        monkeypatch.setattr(ranks, "results", self._take)

    def _take(self) -> list[StepResult]:
        return self._results() if self._is_over else []

    def release(self) -> None:
        self._is_over = True
        assert self._ranks._wake is not None
        self._ranks._wake()


async def until(is_true: Callable[[], Any]) -> None:
    with anyio.fail_after(10):
        while not is_true():
            await anyio.sleep(0.005)


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> list[Section]:
    """Those that have come."""
    found: list[Section] = []
    take: Callable[..., Awaitable[bool]] = ArrivingPages.take

    async def watched(pages: ArrivingPages, announced: Any) -> bool:
        found.append(announced.section)
        return await take(pages, announced)

    monkeypatch.setattr(ArrivingPages, "take", watched)
    return found


@pytest.mark.parametrize(
    ("family", "backend", "first", "second", "before"),
    [
        ("llama", "tcp", {}, {}, [Section(0, 0, 2)]),
        ("llama", "shm", TWO, {}, [Section(0, 0, 2)]),
        ("deepseek_v3", "tcp", TWO, {"hicache_mem_layout": "layer_first"}, None),
        ("deepseek_v3", "tcp", {}, TWO, None),
        ("qwen3", "shm", {"pipeline_parallel_size": 2}, TWO, None),
    ],
)
async def test_layers_come_before_the_step_is_done(
    family: str,
    backend: str,
    first: dict[str, Any],
    second: dict[str, Any],
    before: list[Section] | None,
    checkpoint: Checkpoint,
    reference: Generate,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    sections: list[Section],
) -> None:
    options["disaggregation_transfer_backend"] = backend
    async with server("prefill", checkpoint(family), **options | first) as (engine, prefill):
        async with server("decode", checkpoint(family), **options | second) as (other, decode):
            results, answers = HeldResults(engine, monkeypatch), list[Any]()

            async def ask() -> None:
                answers.append(await decode(PROMPT, Transfer(1, source_of(engine))))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                tasks.start_soon(prefill, PROMPT, Transfer(1))
                await until(lambda: sections)
                await anyio.sleep(0.05)
                assert not answers and not counts(other).pages and before in (None, sections)
                results.release()
            assert answers == [(reference(family, PROMPT, COUNT), FULL)]
            assert counts(other).pages == FULL // 16 and not counts(other).failures
            assert len(sections) > 1 and is_clean(engine) and is_clean(other)


async def test_ranks_that_die_between_layers(
    checkpoint: Checkpoint,
    reference: Generate,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    sections: list[Section],
) -> None:
    """What came is dropped, and comes again from the ranks that follow."""
    expected = reference("llama", PROMPT, COUNT)
    async with server("prefill", checkpoint("llama"), **options) as (engine, prefill):
        async with server("decode", checkpoint("llama"), **options) as (other, decode):
            HeldResults(engine, monkeypatch)
            answers = list[Any]()

            async def ask() -> None:
                answers.append(await decode(PROMPT, Transfer(1, source_of(engine))))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                tasks.start_soon(prefill, PROMPT, Transfer(1))
                await until(lambda: sections)
                ranks = engine._core.replicas[0].supervisor.ranks
                assert ranks is not None
                os.kill(ranks.pids[0], signal.SIGKILL)
            assert answers == [(expected, FULL)]
            assert counts(other).pages == FULL // 16 and not counts(other).failures
            assert is_clean(engine) and is_clean(other)


async def test_a_decode_server_that_dies_between_layers(
    checkpoint: Checkpoint, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages are unpinned."""
    monkeypatch.setattr("runtime.transfer.service.BEAT_S", 0.05)
    async with server("prefill", checkpoint("llama"), **options) as (engine, prefill):
        pages, halves = engine._core.replicas[0].pages, engine._core._halves
        scheduler = engine._core.replicas[0].scheduler
        assert pages is not None and halves is not None and scheduler is not None
        results = HeldResults(engine, monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prefill, PROMPT, Transfer(1))
            await until(lambda: any(scheduler.cache.host.saved_parts._by_step.values()))
            room = halves.rooms.find(1)
            assert room is not None
            tree, sequence, depths = scheduler.cache.tree, room.sequence, range(1, FULL // 16 + 1)
            nodes = [tree.probe(None, sequence.request.namespace, sequence.tokens, one) for one in depths]
            keys = b"".join(map(pages._connector.key, nodes))
            port = int(source_of(engine).rpartition(":")[2])
            wire = await connect("127.0.0.1", port, link_key(KEY), CapacityLimiter(2))
            await wire.send(Ask(1, pages._identity, 0, keys))
            assert isinstance(await wire.receive(ANSWERS), Found)
            assert isinstance(await wire.receive(ANSWERS), Parts)
            wire.close()
            await until(lambda: not halves.service.sent.connections)
            results.release()
        assert is_clean(engine) and not halves.service.sent.pages
