"""Budgets of reasoning over HTTP, with the embedded model: the answer goes on when its reasoning is cut."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from tests.e2e.serving import Server, serve
from tests.e2e.test_tools import SCORE, WEATHER, parts_of, streamed

ASK: dict[str, Any] = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "temperature": 0,
    "max_completion_tokens": 200,
    "reasoning_effort": "high",
}


@pytest.fixture(
    scope="module", params=["overlapped", pytest.param("one step at a time", marks=pytest.mark.full)]
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    options = [] if request.param == "overlapped" else ["--disable-overlap-schedule"]
    with serve(
        "--model-path",
        "pocket",
        "--reasoning-parser",
        "qwen3",
        "--constrained-json-disable-any-whitespace",
        *options,
    ) as running:
        yield running


def ask(server: Server, budget: int | None, **fields: Any) -> Any:
    extra = {} if budget is None else {"thinking_token_budget": budget}
    return server.client.chat.completions.create(**ASK | fields, extra_body=extra)


def test_reasoning_ends_at_its_budget_and_the_answer_goes_on(server: Server) -> None:
    free = ask(server, None, logprobs=True)
    reasoning_tokens = free.usage.completion_tokens_details.reasoning_tokens
    assert reasoning_tokens > 8
    tokens = [token.token for token in free.choices[0].logprobs.content]
    for budget in (0, 3, 6):
        for _ in range(2):  # the second time with the prompt in the cache
            cut = ask(server, budget, logprobs=True)
            content, reasoning, _ = parts_of(cut.choices[0].message)
            assert cut.usage.completion_tokens_details.reasoning_tokens <= budget + 1 < reasoning_tokens
            assert content and cut.choices[0].finish_reason == "stop"
            assert parts_of(free.choices[0].message)[1].startswith(reasoning or "")
        assert [token.token for token in cut.choices[0].logprobs.content][:budget] == tokens[:budget]
        assert streamed(server, **ASK | {"extra_body": {"thinking_token_budget": budget}})[:2] == (
            content,
            reasoning,
        )
    for budget in (reasoning_tokens + 9, -1):
        assert ask(server, budget).choices[0].message.content == free.choices[0].message.content


def test_each_of_several_answers_has_the_budget(server: Server) -> None:
    answer = ask(server, 4, n=3, temperature=0.8, seed=5)
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 3 * 5
    assert all(parts_of(choice.message)[0] for choice in answer.choices)


def test_tools_and_schemas_hold_behind_the_forced_end(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "score", "schema": SCORE}}
    answer = ask(server, 3, response_format=form)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCORE)
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens <= 4
    never = ask(server, 0, response_format=form)
    jsonschema.validate(json.loads(never.choices[0].message.content), SCORE)
    assert never.usage.completion_tokens_details.reasoning_tokens == 0
    for fields in (
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "response_format": form},
    ):
        called = ask(server, 3, **fields)
        content, _, calls = parts_of(called.choices[0].message)
        for _, arguments in calls:
            jsonschema.validate(arguments, WEATHER["function"]["parameters"])
        assert calls or json.loads(content)
        assert 0 < called.usage.completion_tokens_details.reasoning_tokens <= 4


def test_other_apis_have_the_budget_too(server: Server) -> None:
    response = server.client.responses.create(
        model="pocket",
        input="What is the weather in Paris?",
        temperature=0,
        reasoning={"effort": "high"},
        extra_body={"reasoning": {"effort": "high", "max_tokens": 3}},
    )
    assert response.usage is not None and 0 < response.usage.output_tokens_details.reasoning_tokens <= 4
    with anthropic.Anthropic(base_url=str(server.client.base_url).removesuffix("/v1/"), api_key="x") as api:
        for budget in (3, 150):
            message = api.messages.create(
                model="pocket",
                max_tokens=200,
                extra_body={"temperature": 0},
                thinking={"type": "enabled", "budget_tokens": budget},
                messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            )
            thought = message.usage.output_tokens_details.thinking_tokens
            assert 0 < thought <= budget + 1 and message.content[-1].type == "text"
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    native = httpx.post(
        f"{str(server.client.base_url).removesuffix('/v1/')}/generate",
        json={
            "text": prompt,
            "max_thinking_tokens": 2,
            "sampling_params": {"temperature": 0, "max_new_tokens": 40, "skip_special_tokens": False},
        },
    ).json()
    text = server.client.completions.create(
        model="pocket",
        prompt=prompt,
        temperature=0,
        max_tokens=40,
        extra_body={"thinking_token_budget": 2, "skip_special_tokens": False},
    )
    assert native["text"] == text.choices[0].text and "</think>" in native["text"]
    for wrong in ({"thinking_token_budget": -2}, {"reasoning": {"max_tokens": -2}}):
        with pytest.raises(openai.BadRequestError, match="must be 0 or more"):
            server.client.chat.completions.create(**ASK, extra_body=wrong)


def test_a_server_that_knows_no_reasoning_refuses_a_budget() -> None:
    with serve("--model-path", "pocket", "--reasoning-parser", "none") as running:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(running, 5)
    assert refused.value.param == "thinking_token_budget" and "--reasoning-parser" in refused.value.message
