"""One server computes prompts, another one the answers: tokens are those of transformers, whatever the cache
holds and however ranks divide it, and whatever happens to the first server."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import runtime
from runtime.errors import InvalidRequest, Unavailable
from runtime.messages.transfer import Role, Transfer
from runtime.transfer.halves import Halves
from tests.e2e.conftest import Generate
from tests.e2e.disaggregated import (
    COUNT,
    FULL,
    KEY,
    PROMPT,
    TWO,
    both,
    counts,
    key_options,
    server,
    source_of,
)

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return key_options(tmp_path, KEY)


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("llama", {}, {}),
        ("llama", {}, TWO),
        ("llama", TWO, {"hicache_mem_layout": "page_first"}),
        ("qwen3", {"pipeline_parallel_size": 2}, TWO),
        ("deepseek_v3", {}, {}),
        ("deepseek_v3", {}, TWO),
        ("qwen3_next", {}, {}),
        ("jamba", TWO, TWO),
    ],
)
async def test_tokens(
    family: str,
    first: dict[str, Any],
    second: dict[str, Any],
    checkpoint: Checkpoint,
    reference: Generate,
    options: dict[str, Any],
) -> None:
    expected = reference(family, PROMPT, COUNT)
    async with server("prefill", checkpoint(family), **options | first) as prefill:
        async with server("decode", checkpoint(family), **options | second) as (engine, decode):
            assert await both(prefill, decode, PROMPT) == (expected, FULL)
            assert counts(engine).pages == FULL // 16 and not counts(engine).failures
            # what is there is not asked for again
            assert await both(prefill, decode, PROMPT, 2) == (expected, FULL)
            assert counts(engine).pages == FULL // 16
            longer = [*PROMPT, *range(40)]
            assert await both(prefill, decode, longer, 3) == (reference(family, longer, COUNT), 128)
            assert counts(engine).pages == 128 // 16 and not counts(engine).failures


GROUPS = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "enable_dp_attention": True,
    "load_balance_method": "round_robin",
}


async def test_attention_groups(checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]) -> None:
    """Each group offers and fetches its own pages, of prompts that the other one knows nothing of."""
    async with server("prefill", checkpoint("llama"), **options | GROUPS) as prefill:
        async with server("decode", checkpoint("llama"), **options | GROUPS) as (engine, decode):
            for room, prompt in enumerate((PROMPT, PROMPT[::-1]), 1):
                expected = reference("llama", prompt, COUNT)
                assert await both(prefill, decode, prompt, room) == (expected, FULL)
            received = [replica.pages.received for replica in engine._core.replicas if replica.pages]
            assert [each.pages for each in received] == [FULL // 16] * 2
            assert not any(each.failures for each in received)


async def test_small_pages(checkpoint: Checkpoint, options: dict[str, Any]) -> None:
    small = options | {"kv_cache_dtype": "fp8_e4m3"}
    async with server("prefill", checkpoint("llama"), **small) as prefill:
        expected, _ = await prefill[1](PROMPT, None)
        async with server("decode", checkpoint("llama"), **small | TWO) as (engine, decode):
            assert await both(prefill, decode, PROMPT) == (expected, FULL)
            assert not counts(engine).failures


async def test_a_long_prompt_comes_while_it_is_computed(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]
) -> None:
    prompt = [*PROMPT, *PROMPT[::-1], *PROMPT]
    small = options | {"chunked_prefill_size": 32}
    async with server("prefill", checkpoint("llama"), **small) as prefill:
        async with server("decode", checkpoint("llama"), **options) as (engine, decode):
            assert await both(prefill, decode, prompt) == (reference("llama", prompt, COUNT), 288)
            assert not counts(engine).failures


async def test_the_answer_comes_without_the_other_server(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]
) -> None:
    expected = reference("llama", PROMPT, COUNT)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with server("decode", checkpoint("llama"), **options) as (engine, decode):
            with socket.create_server(("127.0.0.1", 0)) as gone:
                nobody = gone.getsockname()[1]
            assert await decode(PROMPT, Transfer(1, f"127.0.0.1:{nobody}")) == (expected, 0)
            assert counts(engine).failures == 1
            other = PROMPT[::-1]
            assert await decode(other, Transfer(2, f"127.0.0.1:{port}")) == (
                reference("llama", other, COUNT),
                0,
            )
            assert counts(engine).failures == 2
            load = engine.load()
            assert load.running == load.waiting == 0


async def test_another_model_or_key_is_refused(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = reference("llama", PROMPT, COUNT)
    async with server("decode", checkpoint("llama"), **options) as (engine, decode):
        async with server("prefill", checkpoint("qwen3"), **options) as prefill:
            assert await both(prefill, decode, PROMPT) == (expected, 0)
            assert counts(engine).failures == 1
            assert prefill[0]._core._halves is not None
            assert prefill[0]._core._halves.service.sent.refused == 1
        (tmp_path / "other").write_bytes(KEY[::-1])
        others = options | {"disaggregation_key_file": str(tmp_path / "other")}
        async with server("prefill", checkpoint("llama"), **others) as prefill:
            source = source_of(prefill[0])
            assert await decode(PROMPT[::-1], Transfer(1, source)) == (
                reference("llama", PROMPT[::-1], COUNT),
                0,
            )
            assert counts(engine).failures == 2


@pytest.mark.parametrize("full", ["prefill", "decode"])
async def test_what_finds_no_room_is_computed(
    full: str, checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]
) -> None:
    """Host memory has room for fewer pages than the prompt has."""
    small = {full: {"hicache_ratio": 0.08}}
    async with server("prefill", checkpoint("llama"), **options | small.get("prefill", {})) as prefill:
        async with server("decode", checkpoint("llama"), **options | small.get("decode", {})) as (
            engine,
            decode,
        ):
            for room in range(3):
                prompt = [*range(room, room + 50), *PROMPT]
                found = await both(prefill, decode, prompt, room)
                assert found[0] == reference("llama", prompt, COUNT)
                assert found[1] < 144
            assert counts(engine).failures
            load = engine.load()
            assert load.running == load.waiting == 0


async def test_many_at_once(checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]) -> None:
    prompts = [[number, *PROMPT] for number in range(64)]
    options |= {"max_total_tokens": 8192}
    async with server("prefill", checkpoint("llama"), **options) as prefill:
        async with server("decode", checkpoint("llama"), **options) as (engine, decode):
            answers: dict[int, Any] = {}

            async def answer(room: int) -> None:
                answers[room] = await both(prefill, decode, prompts[room], room)

            async with anyio.create_task_group() as tasks:
                for room in range(len(prompts)):
                    tasks.start_soon(answer, room)
            expected = {room: (reference("llama", prompts[room], COUNT), FULL) for room in answers}
            assert answers == expected and not counts(engine).failures
            load = engine.load()
            assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages


async def change(engine: runtime.Engine, mode: Any) -> Role:
    halves = engine._core.control.halves
    assert halves is not None
    return await halves.change(mode)


async def test_roles_change(checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]) -> None:
    both_ways = options | {"disaggregation_decode_enable_offload_kvcache": True}
    async with server("prefill", checkpoint("llama"), **options) as first:
        async with server("decode", checkpoint("llama"), **both_ways) as second:
            assert await both(first, second[1], PROMPT) == (reference("llama", PROMPT, COUNT), FULL)
            with pytest.raises(Unavailable):
                await Halves("decode", "", 0, KEY, can_change=True).change("prefill")
            assert (await change(second[0], "prefill")).bootstrap_port
            assert (await change(first[0], "decode")).mode == "decode"
            other = PROMPT[::-1]
            assert await both(second, first[1], other, 2) == (reference("llama", other, COUNT), FULL)
            assert counts(first[0]).pages == FULL // 16
    async with server("decode", checkpoint("llama"), **options) as (engine, _):
        with pytest.raises(InvalidRequest, match="offload"):
            await change(engine, "prefill")
