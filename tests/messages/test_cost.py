"""The cost of an answer is known from its request."""

from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.messages.cost import (
    ALTERNATIVE_BYTES,
    TokenRange,
    check_cost,
    check_sequences,
    cost_of,
    fit,
    prompt_length,
)
from runtime.messages.requests import Chat, GenerateRequest, Prompt, Text, Tokens
from runtime.messages.sampling import Limits, SamplingParams

LIMITS = Limits(
    vocab_size=32_000,
    context_len=10_000,
    pool_tokens=10_000,
    hidden_size=64,
    shows_hidden=True,
    routed_size=64,
    max_response_bytes=1000 * ALTERNATIVE_BYTES,
)


def request(prompt: Prompt, **params: Any) -> GenerateRequest:
    return GenerateRequest(id="r", prompt=prompt, params=SamplingParams(**params), arrival_s=0)


@pytest.mark.parametrize(
    "params, field",
    [
        ({"n": 128, "logprobs": True, "top_logprobs": 20, "max_new_tokens": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 20, "max_new_tokens": 51}, "top_logprobs"),
        ({"logprobs": True, "logprob_ids": range(10), "max_new_tokens": 101}, "logprob_ids"),
        ({"prompt_logprobs": 20, "max_new_tokens": 1}, "prompt_logprobs"),
        ({"n": 11, "prompt_logprobs": 1, "max_new_tokens": 1}, "prompt_logprobs"),
        ({"hidden_states": "all", "max_new_tokens": 500}, "hidden_states"),
        ({"routed_experts": 0, "max_new_tokens": 500}, "routed_experts"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_what_costs_too_much_is_refused_before_it_is_queued(params: dict[str, Any], field: str) -> None:
    if "logprob_ids" in params:
        params = params | {"logprob_ids": tuple(params["logprob_ids"])}
    with pytest.raises(InvalidRequest) as refused:
        check_cost([request(Tokens([1] * 100), **params)], LIMITS)
    assert refused.value.param == field
    assert "--max-response-bytes" in refused.value.message or "--max-logprobs" in refused.value.message


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": 128, "max_new_tokens": 9_000},
        {"n": 128, "logprobs": True, "max_new_tokens": 9_000},
        {"n": 128, "prompt_logprobs": 0},
        {"logprobs": True, "top_logprobs": 20, "max_new_tokens": 50},
        {"logprobs": True, "top_logprobs": 20},
    ],
    ids=str,
)
def test_what_is_proportional_to_the_tokens_is_not(params: dict[str, Any]) -> None:
    check_cost([request(Tokens([1] * 100), **params)], LIMITS)
    fit(SamplingParams(**params), 100, LIMITS)


def test_prompts_count_together() -> None:
    one = request(Tokens([1]), logprobs=True, top_logprobs=10, max_new_tokens=10)
    check_cost([one] * 10, LIMITS)
    with pytest.raises(InvalidRequest):
        check_cost([one] * 11, LIMITS)


def test_answers_count_together() -> None:
    check_sequences([request(Tokens([1]), n=128)] * 64)
    with pytest.raises(InvalidRequest) as refused:
        check_sequences([request(Tokens([1]), n=128)] * 65)
    assert refused.value.param == "n"


def test_events_that_repeat_what_came_before_count_each_time() -> None:
    one = request(Tokens([1]), logprobs=True, top_logprobs=1, max_new_tokens=100)
    check_cost([one], LIMITS)
    with pytest.raises(InvalidRequest, match="leave stream out"):
        check_cost([one], LIMITS, is_repeated=True)


def test_an_open_length_ends_where_the_answer_is_full() -> None:
    params = SamplingParams(n=2, logprobs=True, top_logprobs=4, prompt_logprobs=2)
    fitted = fit(params, 100, LIMITS)
    most = fitted.max_new_tokens
    assert most == (1000 - 2 * 100 * 2) // (2 * 4)
    assert cost_of(fitted, 100, most, 64).num_bytes <= LIMITS.max_response_bytes
    assert cost_of(fitted, 100, most + 1, 64).num_bytes > LIMITS.max_response_bytes


def test_a_length_that_fits_stays_open() -> None:
    params = SamplingParams(logprobs=True)
    assert fit(params, 100, LIMITS) is params


def test_a_prompt_alone_may_be_too_much() -> None:
    with pytest.raises(InvalidRequest) as refused:
        fit(SamplingParams(prompt_logprobs=10), 101, LIMITS)
    assert refused.value.param == "prompt_logprobs"


@pytest.mark.parametrize(
    "prompt, estimate, most",
    [
        (Tokens([1, 2, 3]), 3, 3),
        (Text("x" * 400), 100, 401),
        (Text("x" * 10**6), 9_999, 9_999),
        (Chat([]), 0, 9_999),
    ],
)
def test_prompts_are_estimated(prompt: Prompt, estimate: int, most: int) -> None:
    assert prompt_length(prompt, LIMITS) == TokenRange(estimate, most)
