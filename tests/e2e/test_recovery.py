"""kill -9 of ranks that compute a real model: every answer is the one of an undisturbed run, streamed or
whole, greedy or sampled."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.engine import Answer
from tests.metrics.read import sample

pytestmark = pytest.mark.anyio

NEW_TOKENS = 60
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 4096,
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9},
    {
        "temperature": 1.2,
        "top_k": 40,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    {"temperature": 0, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0, "repetition_penalty": 1.3, "min_new_tokens": 50, "n": 2},
]


class Run:
    """16 requests at once, half of them streamed; ranks are killed when so many deltas have come to the
    streams."""

    def __init__(self, engine: Engine, kills: list[int]) -> None:
        self.engine = engine
        self.kills = kills
        self.num_deltas = 0
        self.random = Random(0)
        self.answers: list[list[Answer]] = [[]] * 16

    async def stream(self, i: int, prompt: list[int], params: dict[str, Any]) -> None:
        answers = [Answer() for _ in range(params.get("n", 1))]
        async for delta in self.engine.stream(prompt, **params):
            answers[delta.index].add(delta)
            self.num_deltas += 1
            if self.kills and self.num_deltas >= self.kills[0]:
                self.kills.pop(0)
                os.kill(
                    self.random.choice(self.engine._core.replicas[0].supervisor.ranks.pids), signal.SIGKILL
                )
        self.answers[i] = answers

    async def whole(self, i: int, prompt: list[int], params: dict[str, Any]) -> None:
        self.answers[i] = await self.engine.generate_n(prompt, **params)

    async def all(self) -> list[list[Answer]]:
        async with anyio.create_task_group() as tasks:
            for i in range(len(self.answers)):
                params = SAMPLING[i % len(SAMPLING)] | {
                    "seed": i,
                    "max_new_tokens": NEW_TOKENS,
                    "ignore_eos": True,
                }
                tasks.start_soon(self.stream if i % 2 else self.whole, i, [i, *range(10, 20 + 3 * i)], params)
        return self.answers


def close(one: list[Any] | None, other: list[Any] | None) -> bool:
    """The same tokens with log probabilities that differ by rounding only: what was decoded once is a prompt
    the second time."""
    return (one is None) == (other is None) and all(
        a.token_id == b.token_id
        and a.logprob == pytest.approx(b.logprob, abs=1e-4)
        and [i for i, _ in a.top] == [i for i, _ in b.top]
        for a, b in zip(one or [], other or [], strict=True)
    )


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_kills_change_no_answer(tp_size: int, checkpoint: Callable[[str], Path]) -> None:
    async with Engine(model_path=str(checkpoint("qwen3")), tensor_parallel_size=tp_size, **OPTIONS) as engine:
        expected = await Run(engine, []).all()
        run = Run(engine, [100, 300])
        answers = await run.all()
        assert not run.kills and sample(engine.metrics(), "runtime_rank_restarts_total") == 2
        assert sample(engine.metrics(), "runtime_recovered_requests_total") >= 16
        assert sample(engine.metrics(), "runtime_failed_requests_total") == 0
        load = engine.load()
        assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages
    for mine, theirs in zip(answers, expected, strict=True):
        assert [(a.token_ids, a.text, a.finish and a.finish.reason) for a in mine] == [
            (a.token_ids, a.text, a.finish and a.finish.reason) for a in theirs
        ]
        assert all(
            close(a.logprobs, b.logprobs) and close(a.prompt_logprobs, b.prompt_logprobs)
            for a, b in zip(mine, theirs, strict=True)
        )
    assert len({tuple(a.token_ids) for some in answers for a in some}) > 12, "they are different answers"


async def test_a_rank_that_hangs_is_replaced(
    checkpoint: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    async with Engine(
        model_path=str(checkpoint("llama")), tensor_parallel_size=2, watchdog_timeout=3, **OPTIONS
    ) as engine:
        expected = (await engine.generate([1, 2, 3], **params)).token_ids
        got: list[int] = []
        async for delta in engine.stream([1, 2, 3], **params):
            got += delta.token_ids
            if len(got) == 20:
                # rank 0 waits for it in a collective
                os.kill(engine._core.replicas[0].supervisor.ranks.pids[1], signal.SIGSTOP)
        assert got == expected and engine._core.replicas[0].supervisor.generation == 2
    assert "collectives.py" in capfd.readouterr().err, "the stack of rank 0 tells where it waited"
