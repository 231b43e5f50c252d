"""Answers with adapters are those of models with merged weights, token for token, whatever runs beside.
Through the library face."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from runtime import Engine
from runtime.errors import InvalidRequest
from runtime.options.facts import this_machine
from runtime.options.footprint import footprint, stored_weights
from tests.e2e.image_engine import GROUPS
from tests.models.make_adapter import ATTENTION, make_adapter, merge
from tests.models.reference import Reference

pytestmark = pytest.mark.anyio

COUNT = 8
SHARED = list(range(10, 50))
PROMPTS = [SHARED + [60, 61], list(range(100, 105)), SHARED[:20] + [7, 8, 9]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {  # how adapters are made -> their scales
    "x": ({"seed": 1}, {"": 2.0}),
    "y": (
        {"seed": 2, "targets": ("q_proj", "v_proj"), "rank": 2, "alpha": 4.0, "use_rslora": True},
        {"": 4 / 2**0.5},
    ),
    "z": (
        {"seed": 3, "targets": ATTENTION, "rank_pattern": {"k_proj": 8}, "alpha_pattern": {"o_proj": 4.0}},
        {"": 2.0, "k_proj": 1.0, "o_proj": 1.0},
    ),
}
Expect = Callable[[str, list[int]], list[int]]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]
) -> Callable[[str], tuple[dict[str, str], Expect]]:
    """Of a family: adapter folders by name, and what a model with one of them merged in continues a prompt
    with."""
    known: dict[str, tuple[dict[str, str], Expect]] = {}

    def make(family: str) -> tuple[dict[str, str], Expect]:
        if family in known:
            return known[family]
        base, folder = checkpoint(family), tmp_path_factory.mktemp(family)
        paths, references = {}, {"": Reference(base)}
        for name, (how, scales) in KINDS.items():
            adapter = make_adapter(base, folder / name, **how)
            references[name] = Reference(merge(base, adapter, folder / f"{name}-merged", scales))
            paths[name] = str(adapter)
        known[family] = paths, lambda name, prompt: references[name].greedy(prompt, COUNT)
        return known[family]

    return make


async def run_all(engine: Engine, requests: list[tuple[str, list[int]]]) -> list[list[int]]:
    outputs: list[list[int]] = [[]] * len(requests)

    async def one(i: int, name: str, prompt: list[int]) -> None:
        answer = await engine.generate(
            prompt, temperature=0, ignore_eos=True, max_new_tokens=COUNT, lora_path=name
        )
        outputs[i] = answer.token_ids

    async with anyio.create_task_group() as tasks:
        for i, (name, prompt) in enumerate(requests):
            tasks.start_soon(one, i, name, prompt)
    return outputs


def named(paths: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}={path}" for name, path in paths.items())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"chunked_prefill_size": 7, "page_size": 4}),
        ("qwen3", {"max_loras_per_batch": 2}),
        ("qwen3_moe", {"page_size": 4, "max_total_tokens": 180}),
        ("qwen2_moe", {}),
        ("llama", {"tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "expert_parallel_size": 2, "max_loras_per_batch": 1}),
        ("qwen2_moe", {"tensor_parallel_size": 2, "moe_a2a_backend": "deepep"}),
        ("llama", {"tensor_parallel_size": 2, "enable_two_batch_overlap": True, "chunked_prefill_size": 30}),
        ("llama", GROUPS | {"tensor_parallel_size": 4, "max_loras_per_batch": 2}),
        ("qwen2_moe", GROUPS | {"enable_two_batch_overlap": True}),
        ("qwen2_moe", GROUPS | {"moe_a2a_backend": "deepep", "enable_two_batch_overlap": True}),
    ],
)
async def test_as_merged(
    family: str,
    options: dict[str, Any],
    made: Callable[[str], tuple[dict[str, str], Expect]],
    checkpoint: Callable[[str], Path],
) -> None:
    paths, expect = made(family)
    requests = [(name, prompt) for prompt in PROMPTS for name in ("", *paths)]
    async with Engine(
        model_path=str(checkpoint(family)), lora_paths=named(paths), **(OPTIONS | options)
    ) as engine:
        expected = [expect(name, prompt) for name, prompt in requests]
        assert len({tuple(tokens) for tokens in expected}) == len(requests), (
            "adapters that change nothing would prove nothing"
        )
        assert await run_all(engine, requests) == expected
        assert await run_all(engine, requests[::-1]) == expected[::-1], (
            "with what the first round left in the prefix cache"
        )
        core, base = engine._core, stored_weights(checkpoint(family))
        assert core.adapters is not None
        found = footprint(core.plan, core.model, this_machine(), base, core.adapters.setup())
        weights = {ready.weights_bytes for ready in core.replicas[0].supervisor.readies}
        assert weights == {found.weights_bytes + found.adapters_bytes}


async def test_they_come_and_go(
    made: Callable[[str], tuple[dict[str, str], Expect]], checkpoint: Callable[[str], Path]
) -> None:
    paths, expect = made("llama")
    options = OPTIONS | {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ("all",)}
    async with Engine(model_path=str(checkpoint("llama")), **options) as engine:
        with pytest.raises(InvalidRequest, match="no adapter x is loaded; none is loaded"):
            await engine.generate(PROMPTS[0], lora_path="x")
        await engine.adapters.load("x", paths["x"])
        with pytest.raises(InvalidRequest, match="loaded already"):
            await engine.adapters.load("x", paths["y"])
        assert await run_all(engine, [("x", PROMPTS[0])]) == [expect("x", PROMPTS[0])]
        running: list[list[int]] = []

        async def run() -> None:
            running.append(
                (
                    await engine.generate(
                        PROMPTS[0], temperature=0, ignore_eos=True, max_new_tokens=40, lora_path="x"
                    )
                ).token_ids
            )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while not engine.load().running:
                await anyio.lowlevel.checkpoint()
            used = b'max_lora="8",running_lora_adapters="x",waiting_lora_adapters=""'
            assert used in engine.metrics()
            await engine.adapters.unload("x")
            assert not len(engine._core._open_requests), "it has waited for the request"
        assert running[0][:COUNT] == expect("x", PROMPTS[0])
        await engine.adapters.load("x", paths["y"])
        assert await run_all(engine, [("x", PROMPTS[0])]) == [expect("y", PROMPTS[0])], (
            "nothing is left of the old one of that name"
        )
        lines = engine._core.metrics().decode().splitlines()
        assert {
            "runtime_loaded_adapters 1",
            "runtime_adapter_loads_total 2",
            "runtime_adapter_used_slots 0",
        } <= set(lines)
        with pytest.raises(InvalidRequest, match="no adapter z is loaded; loaded are x"):
            await engine.adapters.unload("z")


async def test_new_ranks_have_them(
    made: Callable[[str], tuple[dict[str, str], Expect]], checkpoint: Callable[[str], Path]
) -> None:
    paths, expect = made("llama")
    options = OPTIONS | {"max_lora_rank": 8, "lora_target_modules": ("all",)}
    async with Engine(
        model_path=str(checkpoint("llama")), lora_paths=named({"x": paths["x"]}), **options
    ) as engine:
        await engine.adapters.load("y", paths["y"])
        answers: list[list[int]] = []

        async def run(name: str) -> None:
            answer = await engine.generate(
                PROMPTS[0], temperature=0, ignore_eos=True, max_new_tokens=60, lora_path=name
            )
            answers.append(
                answer.token_ids[:COUNT] if answer.token_ids[:COUNT] != expect(name, PROMPTS[0]) else []
            )

        async with anyio.create_task_group() as tasks:
            for name in ("x", "y", ""):
                tasks.start_soon(run, name)
            while engine.load().running < 3:
                await anyio.lowlevel.checkpoint()
            os.kill(engine._core.replicas[0].supervisor.ranks.pids[0], signal.SIGKILL)
        assert answers == [[], [], []]
        assert engine._core.replicas[0].supervisor.generation == 2
        assert await run_all(engine, [("y", PROMPTS[1])]) == [expect("y", PROMPTS[1])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_bits_do_not_depend_on_neighbours_with_adapters(
    dtype: str, made: Callable[[str], tuple[dict[str, str], Expect]], checkpoint: Callable[[str], Path]
) -> None:
    """What a sequence without an adapter gets does not depend on whether its neighbours have one."""
    paths, _ = made("qwen2")
    async with Engine(
        model_path=str(checkpoint("qwen2")), lora_paths=named(paths), **(OPTIONS | {"dtype": dtype})
    ) as engine:

        async def chances(prompt: list[int]) -> list[float]:
            answer = await engine.generate(
                prompt, temperature=0, ignore_eos=True, max_new_tokens=24, logprobs=True
            )
            return [token.logprob for token in answer.logprobs]

        alone = [await chances(prompt) for prompt in PROMPTS]
        for index, prompt in enumerate(PROMPTS):
            async with anyio.create_task_group() as tasks:
                for name in paths:
                    for other in PROMPTS:
                        tasks.start_soon(run_all, engine, [(name, other)] * 4)
                assert await chances(prompt) == alone[index]
