"""--speculative-algorithm NGRAM through the whole stack: answers are what they are without it, whatever else
a request asks for, and what became of drafts is reported."""

import json
import os
import re
import signal
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.messages.constraint import JsonSchema, Regex

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("drafts_pay")]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_total_tokens": 4096,
    "model_path": "pocket",
}
PERSONS = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
    },
}
TEXT = "one two three one two three one two three one"
CASES: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "seed": 1, "ignore_eos": True, "n": 2},
    {"temperature": 0.5, "seed": 2, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_p": 0.01},
    {"temperature": 0.0, "stop": ["s. "], "ignore_eos": True},
    {"temperature": 0.6, "seed": 4, "bad_words": ["the", "two three"], "logit_bias": {70: 2.0}},
    {"temperature": 1.0, "seed": 5, "constraint": JsonSchema(json.dumps(PERSONS))},
    {"temperature": 0.8, "seed": 6, "constraint": Regex(r"(a|b|ab){20,40}"), "presence_penalty": -0.2},
]


async def asked(engine: Engine, prompts: list[str], *, kills: bool = False) -> list[Any]:
    """Answers to all cases at once, for each prompt: tokens, texts, ends and log probabilities."""
    found: dict[int, Any] = {}

    async def ask(number: int, prompt: str, params: dict[str, Any]) -> None:
        answers = await engine.generate_n(prompt, max_new_tokens=60, **params)
        found[number] = [
            (one.token_ids, one.text, one.finish.reason, [entry.token_id for entry in one.logprobs or ()])
            for one in answers
        ]

    async with anyio.create_task_group() as tasks:
        for number, (prompt, params) in enumerate((p, params) for p in prompts for params in CASES):
            tasks.start_soon(ask, number, prompt, params)
        if kills:
            while not engine.load().running:
                await anyio.sleep(0)
            os.kill(engine._core.replicas[0].supervisor.ranks.pids[0], signal.SIGKILL)
    return [found[number] for number in sorted(found)]


def accepted(engine: Engine) -> int:
    """Drafts that became tokens since the start."""
    found = re.search(rb"^runtime_accepted_draft_tokens_total (\d+)", engine.metrics(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("more", [{}, {"tensor_parallel_size": 2, "page_size": 4}], ids=["one rank", "two"])
async def test_answers_are_those_without_drafts(more: dict[str, Any]) -> None:
    """Asked again, answers are found in the corpus; after a death of the ranks too."""
    async with (
        Engine(**OPTIONS, **more) as plain,
        Engine(**OPTIONS, **more, speculative_algorithm="NGRAM") as ngram,
    ):
        expected = await asked(plain, [TEXT])
        assert await asked(ngram, [TEXT]) == expected
        before = accepted(ngram)
        assert await asked(ngram, [TEXT]) == expected
        assert accepted(ngram) > before > 20
        assert await asked(ngram, [TEXT], kills=True) == expected
        assert ngram._core.replicas[0].supervisor.generation == 2


async def test_what_became_of_drafts_is_reported() -> None:
    async with Engine(**OPTIONS, speculative_algorithm="NGRAM") as engine:
        params: dict[str, Any] = {"max_new_tokens": 80, "temperature": 0.0, "ignore_eos": True}
        first = await engine.generate(TEXT, **params)
        again = await engine.generate(TEXT, **params)
        drafts = again.finish.drafts
        assert first.token_ids == again.token_ids
        assert drafts is not None and drafts.accepted > 40
        assert drafts.drafted >= drafts.accepted and drafts.rows == sum(drafts.histogram)
        limited = await engine.generate(TEXT, speculation={"max_draft_tokens": 1}, **params)
        assert limited.finish.drafts is not None and len(limited.finish.drafts.histogram) == 2
        off = await engine.generate(TEXT, speculation={"enabled": False}, **params)
        assert off.finish.drafts is None and off.token_ids == limited.token_ids == first.token_ids
