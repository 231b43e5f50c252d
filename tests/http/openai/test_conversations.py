"""/v1/conversations, and responses that belong to one, with the openai client and a scripted service."""

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from runtime.errors import InternalFault
from runtime.http.openai.conversations import store
from runtime.messages.requests import Chat
from tests.http.fake import FakeService
from tests.http.openai.test_responses import client_of

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": "org/fake", "max_output_tokens": 3}
HELLO: Any = {"role": "user", "content": "Hello!"}
Client = openai.AsyncOpenAI


async def texts(client: Client, conversation_id: str) -> list[str]:
    """The text of each item, the oldest first."""
    page: Any = client.conversations.items.list(conversation_id, order="asc", limit=3)
    return ["".join(part.text for part in item.content) async for item in page]


async def until(client: Client, response_id: str, status: str) -> Any:
    with anyio.fail_after(10):
        while (response := await client.responses.retrieve(response_id)).status != status:
            await anyio.sleep(0.01)
    return response


async def leave(client: Client, *, is_stream: bool, **ask: Any) -> None:
    """Asks, and leaves before the answer is complete."""
    with anyio.move_on_after(0.2):
        answer = await client.responses.create(**ask, stream=is_stream)
        await answer.close()


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_what_clients_keep_in_a_conversation(is_on_disk: bool, tmp_path: Path) -> None:
    folder = tmp_path if is_on_disk else None
    async with client_of(folder=folder) as client:
        made = await client.conversations.create(items=[HELLO], metadata={"topic": "demo"})
        assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
        assert await client.conversations.retrieve(made.id) == made
        changed = await client.conversations.update(made.id, metadata={"topic": "other"})
        assert changed.metadata == {"topic": "other"} and changed.id == made.id
        call: Any = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
        output: Any = {"type": "function_call_output", "call_id": "c", "output": "3"}
        added = await client.conversations.items.create(made.id, items=[call, output])
        assert [item.type for item in added.data] == ["function_call", "function_call_output"]
        assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[1].id, False)
        listed = [item async for item in client.conversations.items.list(made.id, limit=2)]
        assert [item.type for item in listed] == ["function_call_output", "function_call", "message"]
        hello: Any = listed[-1]
        assert (hello.status, hello.content[0].text) == ("completed", "Hello!")
        one: Any = await client.conversations.items.retrieve(listed[1].id, conversation_id=made.id)
        assert one == listed[1]
        assert (await client.conversations.items.delete(one.id, conversation_id=made.id)).id == made.id
        with pytest.raises(openai.NotFoundError, match="no item"):
            await client.conversations.items.retrieve(one.id, conversation_id=made.id)
    if not is_on_disk:
        return
    async with client_of(folder=folder) as client:  # another server with the same folder
        assert await client.conversations.retrieve(made.id) == changed
        rest = [item.id async for item in client.conversations.items.list(made.id)]
        assert rest == [listed[0].id, listed[2].id]
        gone = await client.conversations.delete(made.id)
        assert (gone.deleted, gone.object, gone.id) == (True, "conversation.deleted", made.id)
        for call in (client.conversations.retrieve(made.id), client.conversations.delete(made.id)):
            with pytest.raises(openai.NotFoundError, match="no conversation"):
                await call
    async with client_of(folder=folder) as client:
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            await client.conversations.retrieve(made.id)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_response_sees_its_conversation_and_joins_it_once(is_stored: bool) -> None:
    """In one piece, as a stream and in the background; by its id and as an object."""
    service = FakeService()
    async with client_of(service) as client:
        made = await client.conversations.create(items=[HELLO])
        first = await client.responses.create(
            **ASK, input="One?", instructions="Be brief.", conversation=made.id, store=is_stored
        )
        assert first.conversation is not None and first.conversation.id == made.id
        async with client.responses.stream(**ASK, input="Two?", conversation={"id": made.id}) as stream:
            second = [event async for event in stream][-1].response
        third = await client.responses.create(
            **ASK, input="Three?", conversation=made.id, background=True, stream=not is_stored
        )
        if isinstance(third, openai.AsyncStream):
            third = [event async for event in third][-1].response
        third = await until(client, third.id, "incomplete")
        expected = [
            *("Hello!", "One?", first.output_text, "Two?", second.output_text, "Three?", third.output_text)
        ]
        assert await texts(client, made.id) == expected
    prompts = [request.prompt for request in service.requests]
    asked = [[m["content"] for m in p.messages] for p in prompts if isinstance(p, Chat)]
    assert asked == [["Be brief.", *expected[:2]], expected[:4], expected[:6]]


async def test_input_may_be_left_out_where_a_conversation_has_it() -> None:
    async with client_of() as client:
        made = await client.conversations.create(items=[HELLO])
        count = (await client.responses.input_tokens.count(conversation=made.id)).input_tokens
        assert count == (await client.responses.input_tokens.count(input="Hello!")).input_tokens
        answer = await client.responses.create(**ASK, conversation=made.id)
        assert await texts(client, made.id) == ["Hello!", answer.output_text]
        with pytest.raises(openai.BadRequestError, match="input is missing"):
            await client.responses.create(**ASK)


async def test_nothing_of_answers_that_fail_or_are_given_up_is_appended() -> None:
    service = FakeService(hold=True)
    async with client_of(service) as client:
        made = await client.conversations.create(items=[HELLO])
        ask: dict[str, Any] = ASK | {"input": "?", "conversation": made.id}
        cancelled = await client.responses.create(**ask, background=True)
        failed = await client.responses.create(**ask, background=True)
        deleted = await client.responses.create(**ask, background=True)
        with anyio.fail_after(10):
            while len(service.running) < 3:
                await anyio.sleep(0.01)
        service.step()
        await client.responses.cancel(cancelled.id)
        await client.responses.delete(deleted.id)
        for running in list(service.running.values()):
            running.sink.fail(InternalFault("broken"))
        service.running.clear()
        await until(client, failed.id, "failed")
        await until(client, cancelled.id, "cancelled")
        for is_stream in (False, True):  # a client that leaves in the middle of its answer
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(leave, client, is_stream=is_stream, **ask))
                with anyio.fail_after(10):
                    while not service.running:
                        await anyio.sleep(0.01)
                service.step()
            with anyio.fail_after(10):
                while service.running:
                    await anyio.sleep(0.01)
        service.run()
        assert await texts(client, made.id) == ["Hello!"]


async def test_a_conversation_that_was_deleted_stays_deleted(tmp_path: Path) -> None:
    service = FakeService(hold=True)
    async with client_of(service, tmp_path) as client:
        made = await client.conversations.create()
        late = await client.responses.create(**ASK, input="?", conversation=made.id, background=True)
        with anyio.fail_after(10):
            while not service.running:
                await anyio.sleep(0.01)
        await client.conversations.delete(made.id)
        service.run()
        assert (await until(client, late.id, "incomplete")).output_text
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)


async def test_answers_at_the_same_time_join_whole() -> None:
    """Each after what it was asked, in the order in which they end."""
    service = FakeService(hold=True)
    async with client_of(service) as client:
        made = await client.conversations.create()
        ids = [
            (await client.responses.create(**ASK, input=f"{i}?", conversation=made.id, background=True)).id
            for i in range(4)
        ]
        with anyio.fail_after(10):
            while len(service.running) < 4:
                await anyio.sleep(0.01)
        service.run()
        answers = {(await until(client, name, "incomplete")).output_text for name in ids}
        found = await texts(client, made.id)
        assert {*found[::2]} == {"0?", "1?", "2?", "3?"} and {*found[1::2]} == answers and len(found) == 8


async def test_large_answers_join_from_their_thread() -> None:
    """With so many log probabilities that the answer is written in a thread; the conversation keeps none."""
    async with client_of() as client:
        made = await client.conversations.create()
        include: Any = ["message.output_text.logprobs"]
        answer = await client.responses.create(
            model="org/fake",
            max_output_tokens=300,
            input="?",
            conversation=made.id,
            include=include,
            top_logprobs=20,
        )
        (message,) = answer.output
        assert len(message.content[0].logprobs) > 0
        kept: Any = [item async for item in client.conversations.items.list(made.id, order="asc")][-1]
        assert kept.content[0].text == answer.output_text and kept.content[0].logprobs == []


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"type": "web_search_call"}], "items[0].type"),
        ([HELLO, {"role": "wizard", "content": "x"}], "items[1].role"),
        ([{"role": "user"}], "items[0].content"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "items[0].content"),
        ([HELLO | {"id": 5}], "items[0].id"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], "items[0].call_id"),
        ([], "items"),
        ([5], "items[0]"),
        ([HELLO] * 6, "items"),
    ],
)
async def test_items_that_no_response_could_read_are_refused(
    items: Any, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_ITEMS", 5)
    async with client_of() as client:
        made = await client.conversations.create()
        with pytest.raises(openai.BadRequestError) as error:
            await client.conversations.items.create(made.id, items=items)
        body: Any = error.value.body
        assert body["param"].startswith(param), body
        assert await texts(client, made.id) == []


async def test_what_responses_refuse_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_ITEMS", 2)
    async with client_of() as client:
        made = await client.conversations.create(items=[HELLO])
        for fields, status, param in (
            ({"conversation": "conv_0"}, 404, "conversation"),
            ({"conversation": {"id": made.id, "x": 1}}, 400, "conversation.x"),
            ({"conversation": made.id, "previous_response_id": "resp_0"}, 400, "previous_response_id"),
            ({"conversation": made.id, "input": [HELLO, HELLO]}, 400, "items"),
        ):
            with pytest.raises(openai.APIStatusError) as error:
                await client.responses.create(**ASK | {"input": "?"} | fields)  # type: ignore[operator]
            body: Any = error.value.body
            assert (error.value.status_code, body["param"]) == (status, param)
        assert await texts(client, made.id) == ["Hello!"]


async def test_ids_that_are_taken_are_replaced() -> None:
    async with client_of() as client:
        made = await client.conversations.create(items=[HELLO | {"id": "msg_1"}, HELLO | {"id": "msg_1"}])
        await client.responses.create(**ASK, input=[HELLO | {"id": "msg_1"}], conversation=made.id)
        ids = [item.id async for item in client.conversations.items.list(made.id, order="asc")]
        assert ids[0] == "msg_1" and len(set(ids)) == 4
