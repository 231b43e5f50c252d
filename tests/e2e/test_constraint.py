"""Answers keep to their rules, and to the tokens that they would have alone, whatever happens around them."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest

from runtime import Engine
from runtime.errors import InvalidRequest
from runtime.messages.constraint import Choice, Ebnf, JsonObject, JsonSchema, Regex, Rule

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_total_tokens": 8192,
    "model_path": "pocket",
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["v", "next"],
        }
    },
}
LONG = {
    "type": "object",
    "properties": {
        "the first of all the names": {"enum": ["something rather long", "a thing that is longer yet"]},
        "another name that says nothing": {"const": "and always the same words behind it"},
    },
    "required": ["the first of all the names", "another name that says nothing"],
}
RULES: list[Rule] = [
    JsonSchema(json.dumps(PERSON)),
    JsonSchema(json.dumps(TREE)),
    Regex(r"[0-9]{3}-[a-z]{2,4}"),
    Choice(("yes", "no, never", "ü", "a text that is long enough to be taken at once")),
    JsonSchema(json.dumps(LONG)),
    Ebnf('root ::= "(" root ")" | [a-z]'),
]
SAMPLING: dict[str, Any] = {"max_new_tokens": 96, "temperature": 1.0, "seed": 5}

# what must not matter; the first one is what the others are held to
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one step in flight, small pages and chunks": {
        "disable_overlap_schedule": True,
        "page_size": 3,
        "chunked_prefill_size": 4,
    },
    "few pages: sequences give way": {"page_size": 4, "max_total_tokens": 200, "context_length": 160},
    "two ranks": {"tensor_parallel_size": 2},
    "token by token": {"disable_jump_forward": True},
    "token by token, one step in flight": {"disable_jump_forward": True, "disable_overlap_schedule": True},
}


async def run_all(engine: Engine, **more: Any) -> list[list[int]]:
    """Every rule and an answer without one, all at once, two sequences each."""
    outputs: dict[tuple[int, int], list[int]] = {}

    async def one(i: int, rule: Rule | None) -> None:
        async for delta in engine.stream(f"Person number {i}?", constraint=rule, n=2, **(SAMPLING | more)):
            outputs.setdefault((i, delta.index), []).extend(delta.token_ids)

    async with anyio.create_task_group() as tasks:
        for i, rule in enumerate([*RULES, None]):
            tasks.start_soon(one, i, rule)
    return [outputs[key] for key in sorted(outputs)]


@pytest.fixture(scope="module")
async def expected() -> list[list[int]]:
    async with Engine(**OPTIONS) as engine:
        return await run_all(engine)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "plain"])
async def test_settings(setting: str, expected: list[list[int]]) -> None:
    async with Engine(**(OPTIONS | SETTINGS[setting])) as engine:
        assert await run_all(engine) == expected
        if "give way" in setting:
            assert b"runtime_preemptions_total 0\n" not in engine.metrics()


async def test_a_rank_that_is_killed_changes_nothing(expected: list[list[int]]) -> None:
    async with Engine(**OPTIONS) as engine:
        seen = 0
        outputs: dict[tuple[int, int], list[int]] = {}

        async def one(i: int, rule: Rule | None) -> None:
            nonlocal seen
            async for delta in engine.stream(f"Person number {i}?", constraint=rule, n=2, **SAMPLING):
                outputs.setdefault((i, delta.index), []).extend(delta.token_ids)
                seen += 1
                if seen == 20:
                    os.kill(engine._core.replicas[0].supervisor.ranks.pids[0], signal.SIGKILL)

        async with anyio.create_task_group() as tasks:
            for i, rule in enumerate([*RULES, None]):
                tasks.start_soon(one, i, rule)
        assert [outputs[key] for key in sorted(outputs)] == expected and engine._core.replicas[
            0
        ].supervisor.generation == 2


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
async def test_forced_tokens_come_together_and_are_the_same(backend: str) -> None:
    """Also where each token's log probability is reported, and where logits depend on the tokens before."""
    answers: list[list[list[int]]] = []
    steps: list[int] = []
    for is_off in (False, True):
        async with Engine(**OPTIONS, grammar_backend=backend, disable_jump_forward=is_off) as engine:
            for more in (
                {"temperature": 0.0},
                {"logprobs": True, "temperature": 0.0},
                {"max_new_tokens": 17},
                {"stop": ["other name"]},
                {"frequency_penalty": 0.5},
                {"prompt_logprobs": 0},
                {},
            ):
                before = engine._core.replicas[0].scheduler.totals.steps
                params = SAMPLING | more
                found = [
                    await engine.generate("Say it", constraint=rule, **params)
                    for rule in (JsonSchema(json.dumps(LONG)), RULES[3])
                ]
                for answer in found:
                    assert answer.finish.completion_tokens == len(answer.token_ids)
                    assert (
                        not params.get("logprobs")
                        or [entry.token_id for entry in answer.logprobs] == answer.token_ids
                    )
                answers.append(
                    [
                        [*answer.token_ids, answer.text, answer.finish.reason, answer.finish.matched]
                        for answer in found
                    ]
                )
                steps.append(engine._core.replicas[0].scheduler.totals.steps - before)
    half = len(steps) // 2
    assert answers[:half] == answers[half:] and answers[0] == answers[1]
    assert all(steps[i] < steps[half + i] * 0.8 for i in (0, 1, 4, 5)), steps
    assert steps[3] < steps[half + 3]


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
async def test_answers_keep_to_their_schema(backend: str) -> None:
    async with Engine(
        **OPTIONS, grammar_backend=backend, constrained_json_disable_any_whitespace=True
    ) as engine:
        for schema in (PERSON, TREE):
            answer = await engine.generate(
                "Ada?", constraint=JsonSchema(json.dumps(schema)), temperature=0.3, seed=1, max_new_tokens=250
            )
            assert answer.finish.reason == "stop", answer
            jsonschema.validate(json.loads(answer.text), schema)
        answer = await engine.generate("Ada?", constraint=JsonObject(), temperature=0, max_new_tokens=250)
        assert isinstance(json.loads(answer.text), dict)


async def test_ends(checkpoint: Callable[[str], Path]) -> None:
    """Stop strings and ids, the minimum length, and text before the rule."""
    async with Engine(**OPTIONS) as engine:
        rule = Regex("[a-z]{4}(-[a-z]{4}){0,9}")
        short = await engine.generate(
            "A", constraint=Choice(("no", "no no no")), min_new_tokens=5, temperature=0
        )
        assert short.text == "no no no"
        only = await engine.generate("A", constraint=Choice(("no",)), min_new_tokens=50, temperature=0)
        assert (only.text, only.finish.reason) == ("no", "stop"), (
            "where it must end it does, whatever the minimum"
        )
        stopped = await engine.generate("A", constraint=rule, stop=["-"], temperature=0.5, seed=1)
        assert len(stopped.text) == 4 and stopped.finish.matched in ("-", stopped.token_ids[-1])
        later = await engine.generate(
            "A",
            constraint=rule,
            constraint_after="</think>",
            temperature=0,
            max_new_tokens=40,
            logit_bias={6: 1000.0},
        )
        assert later.token_ids[0] == 6 and set(later.text.removeprefix("</think>")) <= set(
            "abcdefghijklmnopqrstuvwxyz-"
        ), later
        with pytest.raises(InvalidRequest, match="ignore_eos"):
            await engine.generate("A", constraint=rule, ignore_eos=True)


@pytest.mark.parametrize("options", [{"grammar_backend": "none"}, {"device": "null"}], ids=str)
async def test_without_grammars_a_rule_is_refused(options: dict[str, Any]) -> None:
    async with Engine(**(OPTIONS | options)) as engine:
        with pytest.raises(InvalidRequest, match="--grammar-backend none"):
            await engine.generate("A", constraint=Regex("a"))
