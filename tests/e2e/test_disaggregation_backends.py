"""Pages that one server reads in the memory of another: tokens are those of transformers, no page is sent."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.audit import findings
from runtime.errors import LinkError, StartError
from runtime.messages.transfer import Transfer
from runtime.transfer import engines
from runtime.transfer.mapped import MappedReading
from runtime.transfer.wire import Wire
from tests.e2e.conftest import Generate
from tests.e2e.disaggregated import COUNT, FULL, KEY, PROMPT, TWO, both, counts, key_options, server
from tests.transfer.engines import AGENTS, Double
from tests.transfer.engines import ENGINES as DOUBLES
from tests.transfer.test_engines import MODULES, double

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return key_options(tmp_path, KEY)


async def never(*_: Any) -> None:
    raise AssertionError("bytes were sent")


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("llama", {}, {"hicache_mem_layout": "page_first"}),
        ("qwen3", {"pipeline_parallel_size": 2}, TWO),
        ("deepseek_v3", TWO, {}),
        ("jamba", {}, {}),
    ],
)
async def test_shared_memory(
    family: str,
    first: dict[str, Any],
    second: dict[str, Any],
    checkpoint: Checkpoint,
    reference: Generate,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Wire, "receive_pages", never)
    options["disaggregation_transfer_backend"] = "shm"
    async with server("prefill", checkpoint(family), **options | first) as prefill:
        async with server("decode", checkpoint(family), **options | second) as (engine, decode):
            for room, prompt in enumerate([PROMPT, PROMPT[::-1]], 1):
                assert await both(prefill, decode, prompt, room) == (reference(family, prompt, COUNT), FULL)
            assert counts(engine).pages == 2 * FULL // 16 and not counts(engine).failures


@pytest.mark.parametrize("backend", list(MODULES))
async def test_libraries(
    backend: str,
    checkpoint: Checkpoint,
    reference: Generate,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With doubles of the libraries; two ranks read what one has, through a buffer."""
    monkeypatch.setattr(Wire, "receive_pages", never)
    monkeypatch.setitem(sys.modules, MODULES[backend], double(backend))
    monkeypatch.setitem(sys.modules, MODULES[backend].partition(".")[0], double(backend))
    monkeypatch.setenv(engines.STORE, "tcp://127.0.0.1:9")
    monkeypatch.setattr(Double, "calls", [])
    options["disaggregation_transfer_backend"] = backend
    async with server("prefill", checkpoint("llama"), **options) as prefill:
        async with server("decode", checkpoint("llama"), **options | TWO) as (engine, decode):
            assert await both(prefill, decode, PROMPT) == (reference("llama", PROMPT, COUNT), FULL)
            assert not counts(engine).failures
        async with server("decode", checkpoint("llama"), **options) as (engine, decode):
            assert await both(prefill, decode, PROMPT[::-1], 2) == (
                reference("llama", PROMPT[::-1], COUNT),
                FULL,
            )
            assert not counts(engine).failures
    DOUBLES.clear()
    AGENTS.clear()


@pytest.mark.parametrize(("first", "second"), [("tcp", "shm"), ("shm", "tcp")])
async def test_servers_of_different_backends_send_bytes(
    first: str, second: str, checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]
) -> None:
    async with server(
        "prefill", checkpoint("llama"), **options | {"disaggregation_transfer_backend": first}
    ) as prefill:
        async with server(
            "decode", checkpoint("llama"), **options | {"disaggregation_transfer_backend": second}
        ) as (engine, decode):
            assert await both(prefill, decode, PROMPT) == (reference("llama", PROMPT, COUNT), FULL)
            assert not counts(engine).failures


async def test_memory_that_cannot_be_read_is_computed(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise LinkError("its memory ends before the page does")

    monkeypatch.setattr(MappedReading, "read", fail)
    options["disaggregation_transfer_backend"] = "shm"
    async with server("prefill", checkpoint("llama"), **options) as prefill:
        async with server("decode", checkpoint("llama"), **options) as (engine, decode):
            assert await both(prefill, decode, PROMPT) == (reference("llama", PROMPT, COUNT), 0)
            assert counts(engine).failures == 1
            load = engine.load()
            assert load.running == load.waiting == 0
        scheduler = prefill[0]._core.replicas[0].scheduler
        assert scheduler is not None
        found = findings(scheduler.cache)
        assert found.is_clean and not found.busy


async def test_a_missing_package_is_refused_at_start(
    checkpoint: Checkpoint, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    options["disaggregation_transfer_backend"] = "mooncake"
    with pytest.raises(StartError, match="pip install mooncake-transfer-engine"):
        async with server("decode", checkpoint("llama"), **options):
            pass


async def test_pages_that_are_made_up(checkpoint: Checkpoint, options: dict[str, Any]) -> None:
    """For benchmarks of one side: answers mean nothing, and nothing is asked for."""
    options |= {"disaggregation_transfer_backend": "fake", "disaggregation_decode_enable_fake_auto": True}
    async with server("decode", checkpoint("llama"), **options) as (engine, decode):
        for transfer in (None, Transfer(1, "127.0.0.1:1")):
            tokens, cached = await decode([*PROMPT, int(transfer is None)], transfer)
            assert len(tokens) == COUNT and cached == FULL
        assert not counts(engine).fetches


async def test_short_prompts_are_computed_where_they_are_answered(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]
) -> None:
    options["disaggregation_local_prompt_tokens"] = 65
    async with server("decode", checkpoint("llama"), **options) as (engine, decode):
        short = PROMPT[:50]
        answer = await decode(short, Transfer(1, "127.0.0.1:1"))
        assert answer == (reference("llama", short, COUNT), 0) and not counts(engine).fetches
        # of a prompt whose beginning is cached, what is not there counts
        answer = await decode([*short, *PROMPT[:60]], Transfer(2, "127.0.0.1:1"))
        assert answer == (reference("llama", [*short, *PROMPT[:60]], COUNT), 48)
        assert not counts(engine).fetches
        await decode(PROMPT[::-1], Transfer(3, "127.0.0.1:1"))
        assert counts(engine).fetches == 1
