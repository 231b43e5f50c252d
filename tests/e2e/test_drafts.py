"""Drafts through the whole stack: with a drafter answers are what they are without one."""

import json
from random import Random
from typing import Any

import pytest

from runtime import Engine
from runtime.cache.sequence import Sequence
from runtime.messages.constraint import JsonSchema, Regex, Rule
from runtime.scheduling.drafts import Draft, Drafter

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_total_tokens": 8192,
    "model_path": "pocket",
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CASES: list[tuple[Rule | None, dict[str, Any]]] = [
    (None, {"temperature": 0.0}),
    (None, {"temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 2}),
    (None, {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.7, "stop": ["e"]}),
    (JsonSchema(json.dumps(PERSON)), {"temperature": 1.0, "seed": 5}),
    (
        JsonSchema(json.dumps(PERSON)),
        {"temperature": 1.0, "seed": 6, "logprobs": True, "presence_penalty": 0.5},
    ),
    (Regex(r"[0-9]{3}-[a-z]{2,4}"), {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2}),
]


class KnownAnswer(Drafter):
    """Proposes the tokens of an answer that was generated before, `answer`. Each is replaced by a random
    token with probability 0.2. Half of the drafts are trees, with a wrong sibling before each of the first
    two tokens."""

    def __init__(self) -> None:
        self.random = Random(1)
        self.answer: list[int] = []
        self.proposed = 0

    def propose(self, sequence: Sequence, first: int, last: int, most: int) -> Draft | None:
        random = self.random
        at = random.randint(first, last) + 1 - sequence.prompt_len
        truth = self.answer[at : at + min(most, random.randint(1, 6))]
        if not truth:
            return None
        self.proposed += len(truth)
        tokens = [token if random.random() < 0.8 else random.randrange(200) for token in truth]
        if random.random() < 0.5:
            return Draft(tokens)
        # a wrong sibling before each of the first two
        parents = list(range(len(tokens)))
        return (
            Draft([7, *tokens], [0, 0, *(parent + 1 for parent in parents[1:])])
            if most > len(tokens)
            else None
        )


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "outlines"])
async def test_answers_are_those_without_drafts(backend: str) -> None:
    drafter, answers, steps = KnownAnswer(), list[Any](), list[int]()
    async with Engine(**OPTIONS, grammar_backend=backend) as engine:
        scheduler = engine._core.replicas[0].scheduler
        for rule, params in CASES:
            for is_drafted in (False, True):
                scheduler.planner.drafts.drafter = drafter if is_drafted else None
                before = scheduler.totals.steps
                answer = await engine.generate("Say it", constraint=rule, max_new_tokens=40, **params)
                entries = [entry.token_id for entry in answer.logprobs or ()]
                assert entries in ([], answer.token_ids)
                drafter.answer = list(answer.token_ids)
                answers.append(
                    (answer.token_ids, answer.text, answer.finish.reason, answer.finish.completion_tokens)
                )
                steps.append(scheduler.totals.steps - before)
    assert answers[::2] == answers[1::2]
    assert drafter.proposed > 30 and sum(steps[1::2]) < sum(steps[::2])
