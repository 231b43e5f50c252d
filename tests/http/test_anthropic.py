"""The anthropic client against our own server, and how its requests become chats and answers become
blocks."""

import json
from typing import Any

import anthropic
import anyio
import httpx
import pytest

from runtime.errors import InvalidRequest, Overloaded
from runtime.http.anthropic.messages import MessageAnswerFormat
from runtime.http.anthropic.writer import Writer
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.settings import HttpSettings
from runtime.http.streaming.answer_format import Output
from runtime.messages.constraint import Calls
from runtime.messages.requests import Chat, Finish, FinishReason
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from tests.http.fake import FakeService
from tests.http.openai.test_tools import HERMES, SAYS
from tests.http.serving import serving, stepping

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": "org/fake", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
CALLS: list[Event] = [
    Reasoning("I "),
    Reasoning("think"),
    Content("Well, "),
    Content("so"),
    CallBegin(0, "add", "c1"),
    Arguments(0, '{"a":'),
    Arguments(0, "1}"),
    CallEnd(0),
    CallBegin(1, "now"),
    Arguments(1, "{}"),
    CallEnd(1),
]
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


def client(address: tuple[str, int], key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://{address[0]}:{address[1]}", api_key=key, max_retries=0)


async def test_a_message_streams_what_it_says_whole() -> None:
    service = FakeService(hold=True)
    async with stepping(service), serving(service) as address, client(address) as api:
        whole = await api.messages.create(**ASK)
        assert whole.content[0].type == "text" and whole.content[0].text and whole.stop_reason == "max_tokens"
        assert (whole.usage.output_tokens, whole.usage.cache_read_input_tokens) == (
            8,
            3,
        ) and whole.usage.input_tokens > 3
        assert whole.id.startswith("msg_") and whole.model == "org/fake" and whole.role == "assistant"
        async with api.messages.stream(**ASK) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert len(texts) > 1 and "".join(texts) == whole.content[0].text
        assert (final.content[0].text, final.stop_reason, final.usage) == (
            whole.content[0].text,
            whole.stop_reason,
            whole.usage,
        )


async def test_the_events_of_a_stream_come_in_anthropics_order() -> None:
    service = FakeService(hold=True)
    async with stepping(service), serving(service) as address, client(address) as api:
        kinds = [event.type async for event in await api.messages.create(**ASK, stream=True)]
        assert kinds == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 8,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        async with httpx.AsyncClient() as http:
            answer = await http.post(
                f"http://{address[0]}:{address[1]}/v1/messages", json=ASK | {"stream": True}
            )
        events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
        assert all(
            json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
            for name, data in events
        )
        assert events[2][0] == "event: ping" and answer.headers["content-type"].startswith(
            "text/event-stream"
        )


async def test_the_blocking_client() -> None:
    def talk(url: str) -> str:
        with (
            anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as api,
            api.messages.stream(**ASK) as stream,
        ):
            return stream.get_final_text()

    async with serving(FakeService()) as (host, port):
        assert await anyio.to_thread.run_sync(talk, f"http://{host}:{port}")


async def test_errors_arrive_as_the_clients_own() -> None:
    service = FakeService()
    async with (
        serving(http_app(service, HttpSettings(keys=Keys(("k",))))) as address,
        client(address, "k") as api,
        client(address, "other") as stranger,
    ):
        with pytest.raises(anthropic.NotFoundError) as missing:
            await api.messages.create(**ASK | {"model": "claude-x"})
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await stranger.models.list()
        assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"temperature": -1.0}, "temperature"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"max_token": 1}, "max_tokens"),
            ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "budget_tokens"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
            ({"tools": [{"name": "f"}]}, "input_schema"),
        ]
        for block in (
            IMAGE,
            {"type": "tool_use", "id": "x", "name": "f", "input": {}},
            {"type": "poem"},
            {"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]},
        ):
            wrongs.append(({"messages": [{"role": "user", "content": [block]}]}, "messages[0].content[0]"))
        for wrong, expected in wrongs:
            with pytest.raises(anthropic.BadRequestError) as error:
                await api.messages.create(**ASK, extra_body=wrong)
            assert (
                error.value.body["error"]["type"] == "invalid_request_error"
                and expected in error.value.message
            ), wrong
        service.refuse = Overloaded("full")
        with pytest.raises(anthropic.RateLimitError) as busy:
            await api.messages.create(**ASK)
        assert busy.value.response.headers["retry-after"] == "1"
        with pytest.raises(anthropic.AuthenticationError) as keyless:
            await api.with_options(api_key="wrong").messages.create(**ASK)
        assert (
            keyless.value.body["type"] == "error"
            and keyless.value.body["error"]["type"] == "authentication_error"
        )


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    service = FakeService(hold=True, fail_after=3, fail_with=InvalidRequest("it broke"))
    async with stepping(service), serving(service) as address, client(address) as api:
        with pytest.raises(anthropic.APIError, match="it broke"):
            async for _ in await api.messages.create(**ASK, stream=True):
                pass
    assert service.aborted == []


async def test_models_are_listed_for_this_client_too() -> None:
    async with serving(FakeService()) as address, client(address) as api:
        (model,) = [model async for model in api.models.list()]
        assert (
            model.id == model.display_name == "org/fake"
            and model.type == "model"
            and model.created_at.year == 2023
        )
        assert (model.max_input_tokens, model.max_tokens) == (99_999, 100_000)
        assert (await api.models.retrieve("org/fake")).id == "org/fake"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await api.models.retrieve("claude")
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_tokens_are_counted_of_what_would_be_sent() -> None:
    service = FakeService()
    async with serving(service) as address, client(address) as api:
        ask = {
            "system": "be kind",
            "messages": ASK["messages"],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        }
        counted = await api.messages.count_tokens(model="org/fake", **ask)
        await api.messages.create(**ASK | ask)
    assert service.controls.calls == [service.requests[0].prompt] and counted.input_tokens > 0


async def test_who_asks_for_no_reasoning_gets_none() -> None:
    service = FakeService()
    async with serving(service) as address, client(address) as api:
        await api.messages.create(**ASK)
        await api.messages.create(**ASK, thinking={"type": "adaptive"})
    first, second = (request.prompt for request in service.requests)
    assert isinstance(first, Chat) and isinstance(second, Chat)
    assert first.template_args == {"enable_thinking": False, "thinking": False} and second.template_args == {}


@pytest.mark.parametrize("sizes", [[1] * len(CALLS), [len(CALLS)], [3, 3, 3, 2]])
def test_events_and_content_say_the_same(sizes: list[int]) -> None:
    """What the client's own accumulation makes of the events is the content of an answer in one piece."""
    content: list[dict[str, Any]] = []
    writer, payloads, rest = Writer(content), [], list(CALLS)
    for size in sizes:
        payloads += writer.add(rest[:size])
        rest = rest[size:]
    payloads += writer.close()
    assert [block["type"] for block in content] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ] and writer.has_calls
    assert content[0]["thinking"] == "I think" and content[1]["text"] == "Well, so"
    assert (content[2]["id"], content[2]["name"], content[2]["input"], content[3]["input"]) == (
        "c1",
        "add",
        {"a": 1},
        {},
    )
    grown: list[dict[str, Any]] = []
    for payload in payloads:
        if payload["type"] == "content_block_start":
            assert payload["index"] == len(grown)
            grown.append(dict(payload["content_block"]) | {"json": ""})
        elif payload["type"] == "content_block_delta":
            delta = payload["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[
                delta["type"]
            ]
            grown[payload["index"]][field] += delta["partial_json" if field == "json" else field]
    for block in grown:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    assert grown == content


def test_a_call_that_was_cut_off_has_no_arguments() -> None:
    content: list[dict[str, Any]] = []
    writer = Writer(content)
    writer.add([CallBegin(0, "f"), Arguments(0, '{"a": ')])
    writer.close()
    assert content[0]["input"] == {} and not writer.has_calls and content[0]["id"].startswith("toolu_")


@pytest.mark.parametrize(
    ("reason", "matched", "expected"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, 7, ("end_turn", None)),
        (FinishReason.STOP, ".", ("stop_sequence", ".")),
        (FinishReason.STOP, "<end>", ("end_turn", None)),  # of the conversation template
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.ABORT, None, ("end_turn", None)),
    ],
)
def test_why_it_stopped(reason: FinishReason, matched: Any, expected: tuple[str, str | None]) -> None:
    output = Output()
    output.text, output.finish = "x", Finish(reason, matched, 9, 4, 5)
    message = MessageAnswerFormat("msg_1", "m", 4, stops=(".",)).body([output])
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert message["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 0},
        "service_tier": "standard",
    }
    cut = MessageAnswerFormat("msg_1", "m", 5).body([output])
    assert (cut["stop_reason"] == "model_context_window_exceeded") == (reason == "length")


async def test_what_newer_clients_send_and_look_for() -> None:
    service = FakeService(formats=HERMES, says=SAYS, has_grammars=True)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as http:
        body: dict[str, Any] = {
            "model": "default",
            "max_tokens": 60,
            "messages": [{"role": "user", "content": "hi"}],
            "diagnostics": {},
            "user_profile_id": "u",
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "tools": [{"name": "add", "input_schema": {"type": "object"}, "strict": True}],
        }
        answer = await http.post("/v1/messages", json=body, headers={"x-request-id": "mine"})
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
        assert isinstance(service.requests[-1].params.constraint, Calls)  # strict
        message = answer.json()
        assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert message["stop_details"] is None and message["usage"]["service_tier"] == "standard"
        assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        for thinking in (
            {"type": "enabled", "budget_tokens": 9, "display": "omitted"},
            {"type": "adaptive", "display": "omitted"},
        ):
            whole = (await http.post("/v1/messages", json=body | {"thinking": thinking})).json()
            assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
            stream = (
                await http.post("/v1/messages", json=body | {"thinking": thinking, "stream": True})
            ).text
            assert "thinking_delta" not in stream and "text_delta" in stream
        count = {name: body[name] for name in ("model", "messages", "tools", "thinking", "user_profile_id")}
        counted = await http.post("/v1/messages/count_tokens", json=count)
        assert counted.status_code == 200 and counted.json()["input_tokens"] > 0
        missing = await http.post(
            "/v1/messages", json={"model": "none", "max_tokens": 1, "messages": body["messages"]}
        )
        assert (
            missing.status_code == 404 and missing.headers["request-id"] and missing.json()["type"] == "error"
        )
        assert "request-id" not in (await http.get("/health")).headers
        assert (await http.head("/")).status_code == 200


async def test_the_tool_runner_goes_on_without_a_thread() -> None:
    """It begins with a thread, and sends whole conversations when the refusal says that there are none."""

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Adds."""
        return str(a + 1)

    @anthropic.beta_async_tool
    async def now() -> str:
        """Tells the time."""
        return "noon"

    service = FakeService(formats=HERMES, says=SAYS)
    async with serving(service) as address, client(address) as api:
        runner = api.beta.messages.tool_runner(**ASK | {"max_tokens": 60}, tools=[add, now], max_iterations=2)
        kinds = [[block.type for block in message.content] async for message in runner]
        assert kinds == [["thinking", "text", "tool_use", "tool_use"]] * 2
        prompts = [request.prompt for request in service.requests]
        assert [len(prompt.messages) for prompt in prompts if isinstance(prompt, Chat)] == [1, 4]
        with pytest.raises(anthropic.BadRequestError) as refused:
            await api.messages.create(**ASK, extra_body={"thread": {"type": "create"}})
    assert refused.value.body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


async def test_edits_of_the_context_are_accepted_and_none_is_reported() -> None:
    clear = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 9},
        "keep": {"type": "tool_uses", "value": 1},
        "clear_at_least": {"type": "input_tokens", "value": 5},
        "exclude_tools": ["add"],
        "clear_tool_inputs": True,
    }
    async with serving(FakeService()) as address, client(address) as api:
        ask = ASK | {"context_management": {"edits": [clear]}, "betas": ["context-management-2025-06-27"]}
        message = await api.beta.messages.create(**ask)
        assert message.context_management is not None and message.context_management.applied_edits == []
        events = [event async for event in await api.beta.messages.create(**ask, stream=True)]
        assert events[0].message.context_management.applied_edits == []
        assert events[-2].context_management.applied_edits == []
        assert (await api.beta.messages.create(**ASK)).context_management is None
