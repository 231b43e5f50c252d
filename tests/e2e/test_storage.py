"""Prefixes outlive the server: what one engine computed, the next one reads from files, and its tokens are
those of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import runtime
from runtime.errors import OptionsError, StartError

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]
Generate = Callable[[str, list[int], int], list[int]]
PROMPT = [(7 * i + i * i // 3) % 250 for i in range(100)]  # six full pages and four tokens
FULL = 96


def options(folder: Path, model: Path, policy: str = "wait_complete", **more: Any) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "num_threads": 1,
        "context_length": 256,
        "max_total_tokens": 1024,
        "dtype": "float32",
        "page_size": 16,
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first",
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": policy,
        "hicache_storage_backend_extra_config": {"dir": str(folder), "prefetch_threshold": 16},
        **more,
    }


async def ask(engine: runtime.Engine, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """-> greedy tokens, and how many of the prompt were cached"""
    answer = await engine.generate(prompt, temperature=0, max_new_tokens=6, ignore_eos=True)
    assert answer.finish is not None
    return answer.token_ids, answer.finish.cached_tokens


async def files(folder: Path, count: int) -> list[Path]:
    """Waits until so many pages are there."""
    with anyio.fail_after(30):
        while len(found := sorted(folder.rglob("*.page"))) < count:
            await anyio.sleep(0.01)
    return found


def metric(engine: runtime.Engine, name: str) -> float:
    lines = engine._core.metrics().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    "more", [{}, {"hicache_mem_layout": "layer_first", "tensor_parallel_size": 2}], ids=["", "two ranks"]
)
async def test_a_prefix_outlives_the_server(
    checkpoint: Checkpoint, reference: Generate, tmp_path: Path, more: dict[str, Any]
) -> None:
    expected = reference("llama", PROMPT, 6)
    given = options(tmp_path, checkpoint("llama"), **more)
    async with runtime.Engine(**given) as first:
        assert await ask(first) == (expected, 0)
        await files(tmp_path, 6)
    async with runtime.Engine(**given) as second:
        assert await ask(second) == (expected, FULL)
        assert metric(second, 'runtime_storage_pages_total{event="read"}') == 6
        assert metric(second, "runtime_storage_fetched_tokens_total") == FULL
        assert await second._core.control.clear_storage() == 6 and not list(tmp_path.rglob("*.page"))


def states_in(folder: Path) -> list[Path]:
    """Files of states, which are of another size than those of pages."""
    found = sorted(folder.rglob("*.page"), key=lambda path: path.stat().st_mtime_ns)
    folders = {path.parents[1]: len({*path.parents[1].rglob("*.page")}) for path in found}
    fewest = min(folders, key=lambda one: folders[one])
    return [path for path in found if len(folders) == 2 and path.parents[1] == fewest]


HYBRID = {"max_mamba_cache_size": 4, "mamba_track_interval": 16}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("bamba", {}),
        ("qwen3_next", {"hicache_mem_layout": "layer_first", "tensor_parallel_size": 2}),
        ("lfm2", {"hicache_storage_prefetch_policy": "timeout"}),
    ],
)
async def test_states_outlive_the_server(
    family: str, more: dict[str, Any], checkpoint: Checkpoint, reference: Generate, tmp_path: Path
) -> None:
    """Recurrent layers go on from the state that was stored with the pages."""
    expected, longer = reference(family, PROMPT, 6), [*PROMPT[:FULL], *range(40)]
    given = options(tmp_path, checkpoint(family), **HYBRID, **more)
    async with runtime.Engine(**given) as first:
        assert await ask(first) == (expected, 0)
        await files(tmp_path, 7)
    async with runtime.Engine(**given) as second:
        assert await ask(second) == (expected, FULL)
        assert await ask(second, longer) == (reference(family, longer, 6), FULL)
        assert metric(second, 'runtime_storage_pages_total{event="read"}') == 6
        assert metric(second, 'runtime_storage_states_total{event="read"}') == 1
    async with runtime.Engine(**given, mamba_ssm_dtype="bfloat16") as other:
        assert (await ask(other))[1] == 0, "pages and states of another dtype"


async def test_what_has_no_state_is_a_miss_up_to_the_last_one(
    checkpoint: Checkpoint, reference: Generate, tmp_path: Path
) -> None:
    begin, family = PROMPT[:40], "bamba"
    expected = reference(family, PROMPT, 6)
    given = options(tmp_path, checkpoint(family), **HYBRID)
    async with runtime.Engine(**given) as first:
        await ask(first, begin)  # a state behind 32 tokens
        await files(tmp_path, 3)
        assert await ask(first) == (expected, 32)
        await files(tmp_path, 8)
    shallow, deep = states_in(tmp_path)
    record = bytearray(deep.read_bytes())
    record[-1] ^= 1
    deep.write_bytes(record)
    async with runtime.Engine(**given) as damaged:
        assert await ask(damaged) == (expected, 32)
        assert metric(damaged, 'runtime_storage_states_total{event="corrupt"}') == 1
        await files(tmp_path, 8)  # written again
    for path in states_in(tmp_path):
        path.unlink()
    async with runtime.Engine(**given) as without_states:
        assert await ask(without_states) == (expected, 0)
        assert metric(without_states, 'runtime_storage_pages_total{event="read"}') == 0
        await files(tmp_path, 7)
    (kept,) = states_in(tmp_path)
    for path in set(tmp_path.rglob("*.page")) - {kept}:
        path.unlink()
    async with runtime.Engine(**given) as without_pages:
        assert await ask(without_pages) == (expected, 0)


async def test_damaged_files_are_misses(checkpoint: Checkpoint, reference: Generate, tmp_path: Path) -> None:
    expected = reference("llama", PROMPT, 6)
    given = options(tmp_path, checkpoint("llama"))
    async with runtime.Engine(**given) as first:
        await ask(first)
        pages = await files(tmp_path, 6)
    for number, page in enumerate(pages):
        record = bytearray(page.read_bytes())
        record[64 + 100 * number] ^= 16
        page.write_bytes(record if number % 2 else record[:-1])
    async with runtime.Engine(**given) as second:
        assert await ask(second) == (expected, 0)
        assert metric(second, 'runtime_storage_pages_total{event="corrupt"}') >= 1


async def test_tokens_are_right_whatever_came_in_time(
    checkpoint: Checkpoint, reference: Generate, tmp_path: Path
) -> None:
    expected = reference("llama", PROMPT, 6)
    async with runtime.Engine(**options(tmp_path, checkpoint("llama"), "best_effort")) as first:
        await ask(first)
        await files(tmp_path, 6)
    async with runtime.Engine(**options(tmp_path, checkpoint("llama"), "best_effort")) as second:
        tokens, cached = await ask(second)
        assert tokens == expected and cached % 16 == 0
    async with runtime.Engine(**options(tmp_path, checkpoint("llama"), "timeout")) as third:
        assert await ask(third) == (expected, FULL)
    async with runtime.Engine(**options(tmp_path, checkpoint("llama"), dtype="bfloat16")) as other:
        assert (await ask(other))[1] == 0, "pages of another dtype"


async def test_what_cannot_work_is_refused_at_the_start(checkpoint: Checkpoint, tmp_path: Path) -> None:
    given = options(tmp_path, checkpoint("llama"))
    with pytest.raises(OptionsError, match="hicache_storage_backend tape is not possible"):
        runtime.Engine(**given | {"hicache_storage_backend": "tape"})
    with pytest.raises(OptionsError, match="--enable-hierarchical-cache"):
        runtime.Engine(**given | {"enable_hierarchical_cache": False})
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match='"dir"'):
        async with runtime.Engine(
            **given | {"hicache_storage_backend_extra_config": {"dir": str(tmp_path / "file")}}
        ):
            pass
