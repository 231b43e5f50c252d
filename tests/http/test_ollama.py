"""The ollama client against our own server, and how its requests become asks."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import ollama
import pytest
from msgspec import structs

from runtime import log
from runtime.errors import InvalidRequest
from runtime.http.ollama import options
from runtime.http.ollama.serve import LinesAnswerFormat, Writer
from runtime.http.streaming.answer_format import Output
from runtime.messages.requests import Chat, Delta, Finish, FinishReason, Infill, Text
from runtime.messages.weight_facts import WeightFacts
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from runtime.service import ModelCard
from tests.http.fake import FakeService
from tests.http.serving import serving, stepping

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SHORT = {"num_predict": 6}


@asynccontextmanager
async def client(address: tuple[str, int]) -> AsyncIterator[ollama.AsyncClient]:
    api = ollama.AsyncClient(host=f"http://{address[0]}:{address[1]}")
    yield api
    await api.close()


async def test_a_chat_streams_what_it_says_whole() -> None:
    service = FakeService(hold=True)
    async with stepping(service), serving(service) as address, client(address) as api:
        whole = await api.chat("org/fake", MESSAGES, options=SHORT)
        lines = [
            line async for line in await api.chat("org/fake:latest", MESSAGES, options=SHORT, stream=True)
        ]
    assert whole.message.content and whole.message.content == "".join(
        line.message.content or "" for line in lines
    )
    assert [line.done for line in lines] == [False] * 6 + [True]
    for last in (whole, lines[-1]):
        assert last.done_reason == "length" and last.eval_count == 6 and (last.prompt_eval_count or 0) > 0
        assert 0 < (last.eval_duration or 0) <= (last.total_duration or 0) and last.created_at
    assert (whole.model, lines[0].model, whole.message.role) == ("org/fake", "org/fake:latest", "assistant")


async def test_generations_go_through_the_template_unless_they_are_raw() -> None:
    service = FakeService()
    async with serving(service) as address, client(address) as api:
        plain = await api.generate("org/fake", "hi", system="be kind", options=SHORT)
        lines = [
            line async for line in await api.generate("org/fake", "hi", raw=True, options=SHORT, stream=True)
        ]
        await api.generate("org/fake", "a(", suffix="):", options=SHORT)
    assert plain.response and "".join(line.response or "" for line in lines) and lines[-1].eval_count == 6
    chat, raw, gap = (request.prompt for request in service.requests)
    assert isinstance(chat, Chat) and [m["role"] for m in chat.messages] == ["system", "user"]
    assert (raw, gap) == (Text("hi"), Infill("a(", "):"))


async def test_options_decide_how_tokens_are_chosen() -> None:
    service = FakeService()
    options = {
        "num_predict": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.1,
        "repeat_penalty": 1.2,
        "seed": 4,
        "stop": ["x"],
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "num_ctx": 4096,
        "num_gpu": 1,
        "mirostat": 0,
        "typical_p": 1.0,
    }
    async with serving(service) as address, client(address) as api:
        answer = await api.chat(
            "org/fake",
            MESSAGES,
            options=options,
            think="low",
            format={"type": "object"},
            keep_alive="5m",
            logprobs=True,
            top_logprobs=2,
        )
        await api.generate("org/fake", "hi", options={"num_predict": -1}, format="json", think=False)
    first, second = service.requests
    params = first.params
    assert (params.max_new_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (
        3,
        0.5,
        7,
        0.8,
        0.1,
    )
    assert (params.repetition_penalty, params.seed, params.stop) == (1.2, 4, ("x",))
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, 0.4)
    assert (
        type(params.constraint).__name__ == "JsonSchema"
        and type(second.params.constraint).__name__ == "JsonObject"
    )
    assert (
        isinstance(first.prompt, Chat)
        and isinstance(second.prompt, Chat)
        and second.params.max_new_tokens is None
    )
    assert first.prompt.template_args == {
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "low",
    }
    assert second.prompt.template_args == {"enable_thinking": False, "thinking": False}
    assert answer.logprobs and len(answer.logprobs) == 3 and len(answer.logprobs[0].top_logprobs or ()) == 2


async def test_a_conversation_with_calls_becomes_a_chat() -> None:
    service = FakeService()
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    async with serving(service) as address, client(address) as api:
        await api.chat(
            "org/fake",
            [
                *MESSAGES,
                {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_name": "add"},
            ],
            options=SHORT,
            tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        )
    (request,) = service.requests
    assert isinstance(request.prompt, Chat) and request.prompt.tools
    expected, result = request.prompt.messages[1:]
    assert (
        expected["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
        and expected["reasoning_content"] == "hm"
    )
    assert result == {"role": "tool", "content": "2", "name": "add"}


async def test_what_is_not_served_says_so() -> None:
    async with (
        serving(FakeService()) as address,
        httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as http,
        client(address) as api,
    ):
        with pytest.raises(ollama.ResponseError) as missing:
            await api.chat("llama3", MESSAGES)
        assert missing.value.status_code == 404 and "llama3" in missing.value.error
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"options": {"mirostat": 1}}, "mirostat"),
            ({"format": "yaml"}, "format"),
            ({"options": {"top_p": 5}}, "options.top_p"),
            ({"template": "x"}, "--chat-template"),
            ({"context": [1]}, "/api/chat"),
            ({"images": ["x"]}, "images"),
            ({"raw": True, "system": "x"}, "system"),
            ({"options": {"num_predict": 2**40}}, "options.num_predict"),
        ]
        for wrong, expected in wrongs:
            answer = await http.post("/api/generate", json={"model": "org/fake", "prompt": "hi"} | wrong)
            assert (
                answer.status_code == 400
                and list(answer.json()) == ["error"]
                and expected in answer.json()["error"]
            ), (wrong, answer.text)
        for path in ("/api/pull", "/api/push", "/api/create", "/api/copy"):
            answer = await http.post(path, json={"model": "x"})
            assert answer.status_code == 400 and path in answer.json()["error"]
        with pytest.raises(ollama.ResponseError, match="--model-path"):
            await api.delete("org/fake")


async def test_models_are_reported() -> None:
    async with serving(FakeService()) as address, client(address) as api:
        (listed,), (running,) = (await api.list()).models, (await api.ps()).models
        assert (
            listed.model == running.model == "org/fake"
            and running.context_length == 100_000
            and listed.digest
        )
        shown = await api.show("org/fake:latest")
        assert shown.capabilities and shown.modelinfo and shown.modelinfo["unknown.context_length"] == 100_000
        with pytest.raises(ollama.ResponseError, match="not found"):
            await api.show("other")
        loaded = await api.generate("org/fake")
        assert loaded.done_reason == "load" and loaded.done and (await api.chat("org/fake")).done


async def test_a_failure_in_mid_stream_is_a_line() -> None:
    service = FakeService(hold=True, fail_after=3, fail_with=InvalidRequest("it broke"))
    async with stepping(service), serving(service) as address, client(address) as api:
        with pytest.raises(ollama.ResponseError, match="it broke"):
            async for _ in await api.chat("org/fake", MESSAGES, stream=True):
                pass


def test_the_blocking_client_is_answered_in_lines() -> None:
    """Its parsing of lines is another one."""
    first: list[Event] = [
        Reasoning("hm"),
        Content("So"),
        CallBegin(0, "add", "c1"),
        Arguments(0, '{"a":'),
        Arguments(0, "1}"),
    ]
    finish = Finish(FinishReason.STOP, None, 5, 2, 0)
    answer_format = LinesAnswerFormat(FakeService(), Writer("m", 0, is_chat=True))
    lines = [
        json.loads(line)
        for line in (
            answer_format.events(0, Delta(0, "x", [1], events=first))
            + answer_format.events(0, Delta(0, "", [2], finish=finish, events=[CallEnd(0)]))
            + answer_format.tail()
        ).splitlines()
    ]
    call = {"id": "c1", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}}
    assert lines[0]["message"] == {"role": "assistant", "content": "So", "thinking": "hm"}
    assert lines[1]["message"] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (lines[2]["done"], lines[2]["done_reason"], len(lines)) == (True, "stop", 3)
    output = Output()
    output.text, output.finish, output.events = "x", finish, [*first, CallEnd(0)]
    whole = LinesAnswerFormat(FakeService(), Writer("m", 0, is_chat=True)).body([output])
    assert (
        whole["message"] == {"role": "assistant", "content": "So", "thinking": "hm", "tool_calls": [call]}
        and whole["done"]
    )
    assert ollama.ChatResponse(**whole | {"created_at": "now"}).message.tool_calls


def test_an_answer_in_one_piece_separates_prompt_and_answer() -> None:
    output = Output()
    output.add(Delta(0, "a", [1]))
    output.add(Delta(0, "b", [2], finish=Finish(FinishReason.STOP, None, 3, 2, 0)))
    line = LinesAnswerFormat(FakeService(), Writer("m", output.first_ns - 1000, is_chat=True)).body([output])
    assert (line["prompt_eval_duration"], line["message"]["content"]) == (1000, "ab")
    assert line["prompt_eval_duration"] + line["eval_duration"] == line["total_duration"]


async def test_weights_are_described_where_they_are_known() -> None:
    class Sized(FakeService):
        @property
        def card(self) -> ModelCard:
            return structs.replace(super().card, weights=WeightFacts(8_030_261_248, "Q4_K", "gguf"))

    for service, expected in ((Sized(), ("8.0B", "Q4_K", "gguf")), (FakeService(), ("", "", "safetensors"))):
        async with serving(service) as address, client(address) as api:
            tags, loaded, shown = await api.list(), await api.ps(), await api.show("org/fake")
        for details in (tags.models[0].details, loaded.models[0].details, shown.details):
            assert details is not None
            assert (details.parameter_size, details.quantization_level, details.format) == expected
        count = (shown.modelinfo or {}).get("general.parameter_count")
        assert count == (8_030_261_248 if expected[0] else None)


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        (0, "unload"),
        ("0", "unload"),
        ("0s", "unload"),
        (None, "load"),
        (-1, "load"),
        ("5m", "load"),
        ("10s", "load"),
    ],
)
async def test_no_time_to_stay_is_answered_as_an_unload(keep_alive: Any, reason: str) -> None:
    service = FakeService()
    async with serving(service) as address, client(address) as api:
        answers = [
            await api.generate("org/fake", keep_alive=keep_alive),
            await api.chat("org/fake", keep_alive=keep_alive),
        ]
        assert (await api.generate("org/fake", "hi", keep_alive=0, options=SHORT)).response, "and goes on"
    assert [answer.done_reason for answer in answers] == [reason] * 2 and len(service.requests) == 1


async def test_options_without_effect_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    options._report.cache_clear()
    log.setup()
    try:
        async with serving(FakeService()) as address, client(address) as api:
            for _ in range(2):
                await api.generate("org/fake", "hi", options=SHORT | {"num_ctx": 4096, "num_gpu": 1})
    finally:
        log.silence()
    lines = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert ["num_ctx" in line for line in lines] == [True, False] and "num_gpu" in lines[1]
