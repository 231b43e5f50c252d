"""What a chat request's messages become for the template, and its sampling fields for the runtime."""

from typing import Any

import msgspec
import pytest

from runtime.http.errors import decode
from runtime.http.fields.media import MediaParts
from runtime.http.openai.completion_request import ChatBody, CompletionBody
from runtime.http.openai.messages import chat_prompt
from runtime.http.openai.sampling import sampling_params
from runtime.messages.requests import Chat
from runtime.messages.sampling import SamplingParams, SpeculationLimit

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}}


def chat_body(**fields: Any) -> ChatBody:
    return decode(msgspec.json.encode({"messages": [USER]} | fields), msgspec.json.Decoder(ChatBody))


@pytest.mark.parametrize(
    ("sent", "rendered"),
    [
        (USER, USER),
        ({"role": "developer", "content": "be brief"}, {"role": "system", "content": "be brief"}),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b", "cache_control": {}},
                ],
            },
            {"role": "user", "content": "a\nb"},
        ),
        ({"role": "user", "content": "", "name": "Ann"}, {"role": "user", "content": "", "name": "Ann"}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}
                ],
            },
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "why"},
            {"role": "assistant", "content": "x", "reasoning_content": "why"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning": "why"},
            {"role": "assistant", "content": "x", "reasoning_content": "why"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
                ],
            },
        ),
        (
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
        ),
    ],
)
def test_messages(sent: dict[str, Any], rendered: dict[str, Any]) -> None:
    assert chat_prompt(chat_body(messages=[sent]), MediaParts()).messages == [rendered]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, Chat([USER])),
        ({"tools": []}, Chat([USER])),
        ({"tools": [TOOL], "tool_choice": "auto"}, Chat([USER], [TOOL])),
        ({"tools": [TOOL], "tool_choice": "none"}, Chat([USER])),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
            Chat([USER], None, {"enable_thinking": False, "reasoning_effort": "low"}),
        ),
        ({"add_generation_prompt": False}, Chat([USER], None, {"add_generation_prompt": False})),
        ({"add_generation_prompt": True}, Chat([USER])),
    ],
)
def test_prompts(fields: dict[str, Any], prompt: Chat) -> None:
    assert chat_prompt(chat_body(**fields), MediaParts()) == prompt


def test_a_last_message_that_goes_on() -> None:
    body = chat_body(messages=[USER, {"role": "assistant", "content": "Once"}], continue_final_message=True)
    assert chat_prompt(body, MediaParts()).continue_final


@pytest.mark.parametrize(
    ("fields", "defaults", "params"),
    [
        ({}, {}, SamplingParams()),
        (
            {},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
            SamplingParams(temperature=0.6, top_p=0.9, top_k=20),
        ),
        ({"temperature": 0}, {"temperature": 0.6, "top_p": 0.9}, SamplingParams(temperature=0.0, top_p=0.9)),
        ({"stop": "END"}, {}, SamplingParams(stop=("END",))),
        (
            {"stop": ["a", "b"], "stop_token_ids": [3]},
            {},
            SamplingParams(stop=("a", "b"), stop_token_ids=(3,)),
        ),
        ({"logit_bias": {"5": -100, "6": 1.5}}, {}, SamplingParams(logit_bias={5: -100.0, 6: 1.5})),
        (
            {"max_tokens": 7, "min_tokens": 2, "n": 3, "seed": -1},
            {},
            SamplingParams(max_new_tokens=7, min_new_tokens=2, n=3, seed=-1),
        ),
        (
            {"ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True},
            {},
            SamplingParams(ignore_eos=True, skip_special_tokens=False, include_stop=True),
        ),
        (
            {"speculation": {"enabled": False, "max_draft_tokens": 4}},
            {},
            SamplingParams(speculation=SpeculationLimit(enabled=False, max_draft_tokens=4)),
        ),
        (
            {
                "temperature": None,
                "n": None,
                "user": "me",
                "store": False,
                "metadata": {"a": "b"},
                "service_tier": "auto",
            },
            {},
            SamplingParams(),
        ),
    ],
)
def test_sampling(fields: dict[str, Any], defaults: dict[str, Any], params: SamplingParams) -> None:
    body = decode(msgspec.json.encode({"prompt": "x"} | fields), msgspec.json.Decoder(CompletionBody))
    assert sampling_params(body, defaults, {}) == params


# what the openai, langchain-openai and litellm clients put in their requests, defaults and replayed answers
# included
CLIENTS: list[dict[str, Any]] = [
    {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "temperature": 0.7,
        "parallel_tool_calls": True,
    },
    {
        "model": "m",
        "max_completion_tokens": 9,
        "reasoning_effort": "low",
        "verbosity": "low",
        "store": False,
        "modalities": ["text"],
    },
    {
        "model": "m",
        "messages": [
            USER,
            {
                "content": "ok",
                "role": "assistant",
                "tool_calls": None,
                "function_call": None,
                "refusal": None,
                "annotations": [],
                "audio": None,
            },
            USER,
        ],
    },
    # litellm's and openai's own fields in answers that are sent back
    {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": None,
                "provider_specific_fields": {},
                "parsed": None,
                "tool_calls": [
                    CALL | {"index": 0, "function": CALL["function"] | {"parsed_arguments": {"a": 1}}}
                ],
            },
            USER,
        ]
    },
    {
        "model": "m",
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "user": "u",
        "stream": False,
    },
]


@pytest.mark.parametrize("fields", CLIENTS)
def test_what_real_clients_send_is_taken(fields: dict[str, Any]) -> None:
    assert chat_prompt(chat_body(**fields), MediaParts()).messages
