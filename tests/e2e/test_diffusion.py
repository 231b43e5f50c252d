"""Diffusion models answer as transformers' modules do by a mask, token for token: alone, in company, with
what is in the prefix cache, when sequences give way and when ranks die."""

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.errors import InvalidRequest
from runtime.messages.sampling import Limits, SamplingParams, check
from tests.e2e.greedy import greedy, greedy_at_once
from tests.metrics.read import sample
from tests.models.make_diffusion import SIZES, BlockReference, make_diffusion

pytestmark = pytest.mark.anyio

COUNT = 21
SHARED = list(range(10, 58))
PROMPTS = [SHARED + [60, 61], SHARED + [70], list(range(100, 104)), SHARED[:19] + [7, 8, 9], [5]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "dllm_algorithm": "LowConfidence",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "page size of a block, chunks of two": {"page_size": 8, "chunked_prefill_size": 17},
    "no prefix cache": {"disable_radix_cache": True},
    "torch alone": {},
    "few pages: sequences give way": {
        "page_size": 8,
        "max_total_tokens": 96,
        "schedule_conservativeness": 0.0,
    },
}

Diffusion = Callable[[str], tuple[Path, BlockReference]]


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Diffusion:
    """kind -> a checkpoint and its reference"""

    @cache
    def make(kind: str) -> tuple[Path, BlockReference]:
        folder = make_diffusion(kind, tmp_path_factory.mktemp(kind))
        return folder, BlockReference(folder, SIZES[kind])

    return make


def settings_file(folder: Path, **settings: object) -> str:
    path = folder / "algorithm.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    return str(path)


@pytest.mark.parametrize(("kind", "threshold"), [*((kind, 0.5) for kind in SIZES), ("sdar", None)])
async def test_low_confidence(
    kind: str, threshold: float | None, diffusion: Diffusion, tmp_path: Path
) -> None:
    """None: by default, which fills one place in a step of these unsure models."""
    folder, reference = diffusion(kind)
    config = None if threshold is None else settings_file(tmp_path, threshold=threshold)
    expected = [reference.low_confidence(prompt, COUNT, threshold or 0.95) for prompt in PROMPTS]
    async with Engine(model_path=str(folder), dllm_algorithm_config=config, **OPTIONS) as engine:
        assert [await greedy(engine, prompt, COUNT) for prompt in PROMPTS] == expected, "alone"
        assert await greedy_at_once(engine, PROMPTS, COUNT) == expected, "in company, out of the cache"


async def test_a_threshold_changes_answers(diffusion: Diffusion) -> None:
    _, reference = diffusion("sdar")
    one, other = (reference.low_confidence(PROMPTS[0], COUNT, threshold) for threshold in (0.5, 0.95))
    assert one != other, "else the tests here say little"


@pytest.mark.parametrize("setting", SETTINGS)
async def test_settings(
    setting: str, diffusion: Diffusion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting == "torch alone":  # which has no attention to blocks, and packs what travels to a device
        monkeypatch.setenv("RUNTIME_CPU_KERNELS", "none")
    folder, reference = diffusion("sdar")
    expected = [reference.low_confidence(prompt, COUNT, 0.5) for prompt in PROMPTS]
    options = OPTIONS | {"dllm_algorithm_config": settings_file(tmp_path, threshold=0.5)} | SETTINGS[setting]
    async with Engine(model_path=str(folder), **options) as engine:
        for _ in range(2):
            assert await greedy_at_once(engine, PROMPTS, COUNT) == expected
        if "give way" in setting:
            assert sample(engine.metrics(), "runtime_preemptions_total") > 0
        load = engine.load()
        assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages


@pytest.mark.parametrize("kind", ["sdar", "llada2"])
async def test_joint_threshold(kind: str, diffusion: Diffusion, tmp_path: Path) -> None:
    """With blocks of another size than the model's, edits that end by their number, and a penalty."""
    folder, _ = diffusion(kind)
    reference = BlockReference(folder, 16)
    numbers = {"threshold": 0.4, "edit_threshold": 0.3, "max_post_edit_steps": 3, "penalty_lambda": 2.5}
    config = settings_file(tmp_path, block_size=16, **numbers)
    expected = [reference.joint(prompt, COUNT, *numbers.values()) for prompt in PROMPTS]
    options = OPTIONS | {"dllm_algorithm": "JointThreshold", "dllm_algorithm_config": config}
    async with Engine(model_path=str(folder), **options) as engine:
        assert await greedy_at_once(engine, PROMPTS, COUNT) == expected
    plain = [reference.low_confidence(prompt, COUNT, numbers["threshold"]) for prompt in PROMPTS]
    assert plain != expected, "edits and the penalty change something"


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_kills_change_no_answer(tp_size: int, diffusion: Diffusion, tmp_path: Path) -> None:
    folder, _ = diffusion("sdar")
    config = settings_file(tmp_path, threshold=0.3)
    random = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
    params = [{"temperature": 0}, random, {"temperature": 1, "top_k": 7}]
    options = OPTIONS | {"dllm_algorithm_config": config, "tensor_parallel_size": tp_size}
    async with Engine(model_path=str(folder), **options) as engine:

        async def answers(kill_at: int) -> list[list[int]]:
            found: list[list[int]] = [[] for _ in range(6)]

            async def ask(i: int) -> None:
                own = {"seed": i} | params[i % 3] | {"max_new_tokens": 40, "ignore_eos": True}
                async for delta in engine.stream([i, *range(10, 20 + 3 * i)], **own):
                    found[i] += delta.token_ids
                    if i == 0 and delta.token_ids and len(found[0]) // 4 == kill_at:
                        os.kill(engine._core.replicas[0].supervisor.ranks.pids[-1], signal.SIGKILL)

            async with anyio.create_task_group() as tasks:
                for i in range(len(found)):
                    tasks.start_soon(ask, i)
            return found

        expected = await answers(-1)
        assert len({tuple(one) for one in expected}) == 6
        assert await answers(3) == expected
        assert sample(engine.metrics(), "runtime_rank_restarts_total") == 1


async def test_answers_end_where_they_should(diffusion: Diffusion) -> None:
    folder, reference = diffusion("sdar")
    prompt = PROMPTS[1]
    expected = reference.low_confidence(prompt, 40, 0.95)
    async with Engine(model_path=str(folder), **OPTIONS) as engine:
        own = {"temperature": 0, "ignore_eos": True}
        for count in (1, 2, 3, 4, 17):
            answer = await engine.generate(prompt, **own, max_new_tokens=count)
            assert answer.token_ids == expected[:count]
            assert answer.finish is not None and answer.finish.reason == "length"
        at = expected.index(expected[9])
        answer = await engine.generate(prompt, **own, stop_token_ids=[expected[9]], max_new_tokens=40)
        assert answer.finish is not None and answer.finish.reason == "stop"
        assert answer.token_ids == expected[: at + 1]
        whole = await engine.generate(prompt, **own, max_new_tokens=40)
        stop = whole.text[5:8]
        answer = await engine.generate(prompt, **own, stop=(stop,), max_new_tokens=40)
        assert answer.text == whole.text[: whole.text.index(stop)] and answer.finish is not None
        assert answer.finish.reason == "stop"
        deltas = [delta async for delta in engine.stream(prompt, **own, max_new_tokens=16)]
        sizes = [len(delta.token_ids) for delta in deltas if delta.token_ids]
        first = 4 - len(prompt) % 4
        assert sizes[0] == first and set(sizes[1:-1]) == {4}, "a delta has a block"
        random = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12, "ignore_eos": True}
        two = await engine.generate_n(prompt, n=2, **random)
        assert two[0].token_ids == (await engine.generate(prompt, **random)).token_ids != two[1].token_ids
        assert two[0].token_ids != expected[:12]


@pytest.mark.parametrize(
    ("name", "value"),
    [("logprobs", True), ("repetition_penalty", 1.1), ("min_new_tokens", 3), ("logit_bias", {5: 1.0})],
)
async def test_what_needs_an_order_is_refused(name: str, value: Any, diffusion: Diffusion) -> None:
    limits = Limits(vocab_size=259, context_len=64, pool_tokens=64, fills_blocks=True)
    with pytest.raises(InvalidRequest, match=f"{name} is not supported by this model, a diffusion model"):
        check(SamplingParams(**{name: value}), [1, 2], limits)
    check(SamplingParams(temperature=0.5, top_k=3, stop=("x",)), [1, 2], limits)
