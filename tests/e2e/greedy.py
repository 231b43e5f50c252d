"""Greedy answers of an engine, as tests compare them with transformers'."""

from collections.abc import Sequence

import anyio

from runtime import Engine


async def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    answer = await engine.generate(prompt, temperature=0, ignore_eos=True, max_new_tokens=count)
    return answer.token_ids


async def greedy_at_once(engine: Engine, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """The `count` tokens that follow each of `prompts`, all asked for at once: some prompts come in steps in
    which others decode."""
    found: list[list[int]] = [[] for _ in prompts]

    async def ask(i: int) -> None:
        found[i] = await greedy(engine, prompts[i], count)

    async with anyio.create_task_group() as tasks:
        for i in range(len(prompts)):
            tasks.start_soon(ask, i)
    return found
