"""Pipelines over gloo: every answer is that of transformers, whatever happens to a rank."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from runtime import Engine
from runtime.errors import OptionsError
from tests.e2e.conftest import Generate
from tests.e2e.greedy import greedy_at_once
from tests.e2e.serving import serve
from tests.metrics.read import sample
from tests.models.make import make_checkpoint
from tests.models.make_heads import make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.models.reference import Reference

pytestmark = pytest.mark.anyio

COUNT = 24
PROMPTS = [list(range(5, 17)), [3, 1, 4, 1, 5], list(range(40, 70)), [7] * 9, [1, 2, 3] * 4, [200, 100]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 96,
    "page_size": 4,
    "random_seed": 1,
    "max_running_requests": 6,
    "standby_ranks": 0,
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "chunked_prefill_size": 7}),
        ("deepseek_v3", {"pipeline_parallel_size": 2, "disable_overlap_schedule": True}),
        ("jamba", {"pipeline_parallel_size": 4, "pp_async_batch_depth": 1, "pp_max_micro_batch_size": 1}),
        ("llama", {"pipeline_parallel_size": 2, "speculative_algorithm": "NGRAM"}),
    ],
    ids=str,
)
async def test_answers_are_those_of_transformers(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, **({} if family == "jamba" else {"num_hidden_layers": 4}))
    reference = Reference(folder)
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:
        assert await greedy_at_once(engine, PROMPTS, COUNT) == [
            reference.greedy(prompt, COUNT) for prompt in PROMPTS
        ]
        load = engine.load()
        assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {"pipeline_parallel_size": 2}, {"speculative_algorithm": "STANDALONE"}),
        (
            "glm4_moe",
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "chunked_prefill_size": 7},
            {"speculative_algorithm": "NEXTN"},
        ),
        ("llama", {"pipeline_parallel_size": 3}, {"speculative_algorithm": "EAGLE3"}),
    ],
    ids=str,
)
async def test_draft_models_on_the_last_stage(
    family: str, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, num_hidden_layers=4)
    reference = Reference(folder)
    if options["speculative_algorithm"] == "NEXTN":
        add_next_token_layers(folder)
    elif options["speculative_algorithm"] == "EAGLE3":
        options = options | {"speculative_draft_model_path": str(make_eagle3(tmp_path / "head"))}
    else:
        options = options | {"speculative_draft_model_path": str(folder)}
    async with Engine(model_path=str(folder), **(OPTIONS | sizes | options)) as engine:
        assert await greedy_at_once(engine, PROMPTS, COUNT) == [
            reference.greedy(prompt, COUNT) for prompt in PROMPTS
        ]
        assert sample(engine.metrics(), "runtime_draft_tokens_total") > 0
        if "STANDALONE" in options.values():
            drafts, accepted = (
                sample(engine.metrics(), f"runtime_{kind}_tokens_total")
                for kind in ("draft", "accepted_draft")
            )
            assert accepted > 0.8 * drafts, "it drafts what it will sample"


async def test_a_stage_that_is_killed_changes_no_answer(
    checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    expected = [reference("llama", prompt, COUNT) for prompt in PROMPTS]
    options = OPTIONS | {"pipeline_parallel_size": 2}
    async with Engine(model_path=str(checkpoint("llama")), **options) as engine:
        for victim in (0, 1):
            async with anyio.create_task_group() as tasks:
                found: list[list[list[int]]] = []

                async def ask(found: list[list[list[int]]] = found) -> None:
                    found.append(await greedy_at_once(engine, PROMPTS, COUNT))

                tasks.start_soon(ask)
                while engine.load().running < len(PROMPTS):
                    await anyio.sleep(0.001)
                os.kill(engine._core.replicas[0].supervisor.ranks.pids[victim], signal.SIGKILL)
            assert found == [expected]
        assert sample(engine.metrics(), "runtime_rank_restarts_total") == 2


async def test_host_pages_of_all_stages(checkpoint: Callable[[str], Path], reference: Generate) -> None:
    """A cache too small for what comes back."""
    prompts = [[i, *range(10 + i, 50 + i)] for i in range(8)]
    options = OPTIONS | {
        "pipeline_parallel_size": 2,
        "context_length": 64,
        "max_total_tokens": 128,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
    }
    async with Engine(model_path=str(checkpoint("llama")), **options) as engine:
        for _ in range(2):
            for prompt in prompts:
                answer = await engine.generate(prompt, temperature=0, ignore_eos=True, max_new_tokens=6)
                assert answer.token_ids == reference("llama", prompt, 6)
        assert sample(engine.metrics(), "runtime_host_loaded_tokens_total") > 0


async def test_pages_of_all_stages_in_files(
    checkpoint: Callable[[str], Path], reference: Generate, tmp_path: Path
) -> None:
    """A second server reads the pages of a prompt, of every stage, that the first one has written."""
    options = OPTIONS | {
        "pipeline_parallel_size": 2,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": {"dir": str(tmp_path), "prefetch_threshold": 16},
    }
    prompt = list(range(10, 70))
    for is_second in (False, True):
        async with Engine(model_path=str(checkpoint("llama")), **options) as engine:
            answer = await engine.generate(prompt, temperature=0, ignore_eos=True, max_new_tokens=6)
            assert answer.token_ids == reference("llama", prompt, 6) and answer.finish is not None
            assert (answer.finish.cached_tokens > 40) is is_second
            with anyio.fail_after(60):
                while len(list(tmp_path.rglob("*.page"))) < 15:  # whole pages of 60 tokens
                    await anyio.sleep(0.01)


async def test_a_pipeline_sleeps_and_wakes(checkpoint: Callable[[str], Path], reference: Generate) -> None:
    options = OPTIONS | {"pipeline_parallel_size": 2, "enable_memory_saver": True}
    expected = [reference("llama", prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(checkpoint("llama")), **options) as engine:
        assert await greedy_at_once(engine, PROMPTS, COUNT) == expected
        await engine.release_memory_occupation()
        await engine.resume_memory_occupation()
        assert await greedy_at_once(engine, PROMPTS, COUNT) == expected


def test_grammars_and_biases_on_the_last_stage() -> None:
    """Tokens that a grammar forces are verified by both stages of a server."""
    with serve("--model-path", "pocket", "--pipeline-parallel-size", "2") as server:
        ask = {"model": "pocket", "prompt": "Who?", "temperature": 0.5, "seed": 1, "max_tokens": 60}
        for fields in (
            {"regex": "(yes|no){2} a long tail that nothing else can follow"},
            {"json_schema": '{"enum": ["one answer", "one more answer"]}'},
        ):
            for _ in range(2):
                text = httpx.post(f"{server.url}/v1/completions", json=ask | fields).json()["choices"][0][
                    "text"
                ]
                assert text.startswith(("yes", "no", '"one'))
                assert text.endswith(("can follow", 'answer"'))


async def test_what_needs_all_layers_is_refused(checkpoint: Callable[[str], Path]) -> None:
    for options, why in (
        ({"pipeline_parallel_size": 9}, "more than the model's"),
        ({"pipeline_parallel_size": 2, "cpu_offload_gb": 1}, "count the layers of the whole model"),
        ({"pp_async_batch_depth": 1}, "--pp-async-batch-depth"),
    ):
        with pytest.raises(OptionsError, match=why):
            async with Engine(model_path=str(checkpoint("llama")), **(OPTIONS | options)):
                pass
