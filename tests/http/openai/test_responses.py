"""/v1/responses with the openai client and a scripted service."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from runtime.http.app import http_app
from runtime.http.openai.responses.items import items_of, messages_of
from runtime.http.openai.responses.store import ResponseStore, StoredResponse
from runtime.http.openai.responses.writer import Writer
from runtime.http.openai.stored_objects import StoredObjects
from runtime.messages.requests import Chat
from runtime.messages.tenants import DEFAULT_TENANT
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Reasoning
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": "org/fake", "input": "Tell me a story.", "max_output_tokens": 12}


@asynccontextmanager
async def client_of(
    service: FakeService | None = None, folder: Path | None = None
) -> AsyncIterator[openai.AsyncOpenAI]:
    service = service or FakeService()
    stored_objects = StoredObjects(service, folder, 2**20)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stored_objects.run)
        async with (
            serving(http_app(service, stored_objects=stored_objects)) as (host, port),
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0) as client,
        ):
            yield client
        tasks.cancel_scope.cancel()


async def test_the_stream_says_what_the_whole_says() -> None:
    async with client_of() as client:
        whole = await client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
        async with client.responses.stream(
            **ASK, include=["message.output_text.logprobs"], top_logprobs=2
        ) as stream:
            events = [event async for event in stream]
            final = events[-1].response
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert final.output_text == whole.output_text != ""
    assert [e.sequence_number for e in events if hasattr(e, "sequence_number")] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert whole.usage.output_tokens == final.usage.output_tokens == 12 and whole.usage.input_tokens > 0
    (message,) = whole.output
    assert (
        message.role == "assistant"
        and len(message.content[0].logprobs) == 12
        and len(message.content[0].logprobs[0].top_logprobs) == 2
    )
    assert final.output[0].content[0].logprobs == message.content[0].logprobs


async def test_a_conversation_goes_on_where_it_was() -> None:
    service = FakeService()
    async with client_of(service) as client:
        first = await client.responses.create(**ASK | {"instructions": "Be brief."})
        more = {
            "input": [{"role": "user", "content": "And then?"}],
            "previous_response_id": first.id,
            "instructions": "Be long.",
        }
        second = await client.responses.create(**ASK | more)
        chat = service.requests[-1].prompt
        assert isinstance(chat, Chat)
        assert [(m["role"], m["content"]) for m in chat.messages] == [
            ("system", "Be long."),
            ("user", "Tell me a story."),
            ("assistant", first.output_text),
            ("user", "And then?"),
        ]
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.content[0].text for item in items] == [
            "Tell me a story.",
            first.output_text,
            "And then?",
        ]
        assert (await client.responses.retrieve(second.id)) == second
        await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as gone:
            await client.responses.create(**ASK | {"previous_response_id": first.id})
        assert gone.value.code == "previous_response_not_found"
        assert gone.value.body["param"] == "previous_response_id"  # type: ignore[index]
        unkept = await client.responses.create(**ASK, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)
        count = await client.responses.input_tokens.count(model="org/fake", input="Tell me a story.")
        assert count.input_tokens > 0


async def test_the_background() -> None:
    service = FakeService(hold=True)
    async with client_of(service) as client:
        one = await client.responses.create(**ASK, background=True)
        other = await client.responses.create(**ASK, background=True)
        gone = await client.responses.create(**ASK, background=True)
        assert one.status == "queued"
        with anyio.fail_after(30):
            while len(service.running) < 3:
                await anyio.sleep(0.01)
        assert (await client.responses.retrieve(one.id)).status == "in_progress"
        assert (await client.responses.cancel(other.id)).status == "cancelled"
        await client.responses.delete(gone.id)
        with anyio.fail_after(30):
            while len(service.running) > 1:
                await anyio.sleep(0.01)
        service.run()
        with anyio.fail_after(30):
            while (done := await client.responses.retrieve(one.id)).status == "in_progress":
                await anyio.sleep(0.01)
        assert done.status == "incomplete" and done.output_text
        assert (await client.responses.retrieve(other.id)).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone.id)
        service.hold = False
        whole = await client.responses.create(**ASK)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(whole.id)


async def test_what_is_kept_outlives_the_server(tmp_path: Path) -> None:
    async with client_of(folder=tmp_path) as client:
        first = await client.responses.create(**ASK)
    service = FakeService(hold=True)
    async with client_of(service, tmp_path) as client:
        assert (await client.responses.retrieve(first.id)).output_text == first.output_text
        lost = await client.responses.create(**ASK, background=True)
    async with client_of(folder=tmp_path) as client:
        failed = await client.responses.retrieve(lost.id)
        assert failed.status == "failed" and "stopped before" in failed.error.message


async def test_a_failure_in_the_middle_is_an_event_of_its_own_kind() -> None:
    service = FakeService(fail_after=3, hold=True)
    async with client_of(service) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(_run_when_asked, service)
        events = [event async for event in await client.responses.create(**ASK, stream=True)]
        assert [e.delta for e in events if e.type == "response.output_text.delta"]
        service.hold = False
        assert (
            events[-1].type == "response.failed"
            and events[-1].response.error.message == "the template failed"
        )
        failed = await client.responses.create(**ASK, background=True)
        with anyio.fail_after(30):
            while (now := await client.responses.retrieve(failed.id)).status in ("queued", "in_progress"):
                await anyio.sleep(0.01)
        assert now.status == "failed" and now.error.message == "the template failed"


async def _run_when_asked(service: FakeService) -> None:
    while not service.running:
        await anyio.sleep(0.01)
    for _ in range(4):
        service.step()
        await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}, {"type": "shell", "name": "f"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"model": "other"}, "model"),
        ({"nonsense": 1}, "nonsense"),
        ({"top_logprobs": 10**6}, "top_logprobs"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    service = FakeService()
    async with serving(service) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        answer = await http.post("/v1/responses", json=ASK | fields)
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.text
        assert not service.running


async def test_tools_of_openais_servers_are_left_out() -> None:
    """Codex lists them unasked."""
    service = FakeService()
    own = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    async with client_of(service) as client:
        for kind in (
            "web_search",
            "web_search_preview_2025_03_11",
            "image_generation",
            "code_interpreter",
            "mcp",
        ):
            some: Any = [own, {"type": kind, "external_web_access": False}]
            response = await client.responses.create(
                **ASK, tools=some, extra_body={"client_metadata": {"a": "b"}}
            )
            assert [tool.type for tool in response.tools] == ["function"]
            none = await client.responses.create(**ASK, tools=some[1:])
            assert none.tools == []
            with pytest.raises(openai.BadRequestError, match="there are no tools"):
                await client.responses.create(**ASK, tools=some[1:], tool_choice="required")
    assert [request.prompt.tools and len(request.prompt.tools) for request in service.requests] == [
        1,
        None,
    ] * 5  # type: ignore[union-attr]


def test_items_become_messages() -> None:
    items = items_of(
        [
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A tool."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "w", "arguments": "{}", "status": "completed"},
            {"type": "function_call", "call_id": "c2", "name": "w", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "dry"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "wet"}],
            },
        ]
    )
    user, assistant, one, two = messages_of(None, items)
    assert (assistant.reasoning_content, assistant.content) == ("A tool.", "I look.")
    assert [call.id for call in assistant.tool_calls or ()] == ["c1", "c2"]
    assert [(m.role, m.tool_call_id, m.content) for m in (one, two)] == [
        ("tool", "c1", "dry"),
        ("tool", "c2", "wet"),
    ]
    assert user.role == "user" and all(item["id"] for item in items)


def test_the_items_of_an_answer_are_its_events_joined() -> None:
    response: dict[str, Any] = {"id": "resp_1", "output": []}
    writer = Writer(response)
    payloads = json.loads(
        json.dumps(
            writer.begin()
            + writer.add(
                [
                    Reasoning("Let me "),
                    Reasoning("see."),
                    Content("I "),
                    Content("call."),
                    CallBegin(0, "f", "id-0"),
                    Arguments(0, '{"a"'),
                    Arguments(0, ": 1}"),
                    CallEnd(0),
                    CallBegin(1, "g"),
                    CallEnd(1),
                    Content("Done."),
                ],
                [],
            )
            + writer.end(is_cut=False, usage={})
        )
    )
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert [p["sequence_number"] for p in payloads] == list(range(len(payloads)))
    for index, item in enumerate(response["output"]):
        mine = [p for p in payloads if p.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added" and mine[-1] == {
            "type": "response.output_item.done",
            "item": item,
            "output_index": index,
            "sequence_number": mine[-1]["sequence_number"],
        }
        joined = "".join(p["delta"] for p in mine if p["type"].endswith(".delta"))
        assert joined == (
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        )
        assert item["status"] == "completed"
    assert response["output"][2]["call_id"] == "id-0" and response["output"][3]["call_id"].startswith("call")
    assert payloads[-1]["type"] == "response.completed"


async def test_the_store_is_bounded() -> None:
    def record(name: str, size: int = 10) -> StoredResponse:
        response: dict[str, Any] = {"id": name, "status": "completed", "output": ["x" * size]}
        return StoredResponse(response, [], [])

    responses = ResponseStore(None, max_responses=3, max_bytes=10_000)
    for name in "abcd":
        responses.put(record(name))
    with pytest.raises(Exception, match="no response a"):
        await responses.find("a", DEFAULT_TENANT)
    responses.put(record("b", 9_800))  # grows, and pushes out what changed longest ago
    with pytest.raises(Exception, match="no response c"):
        await responses.find("c", DEFAULT_TENANT)
    assert (await responses.find("b", DEFAULT_TENANT)).response["id"] == "b"
    responses.put(record("big", 20_000))
    with pytest.raises(Exception, match="no response big"):
        await responses.find("big", DEFAULT_TENANT)
    responses.close()
