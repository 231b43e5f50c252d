"""/v1/responses/compact with the openai client and a scripted service."""

from typing import Any

import openai
import pytest

from runtime.messages.requests import Chat
from tests.http.fake import FakeService
from tests.http.openai.test_responses import client_of

pytestmark = pytest.mark.anyio

TALK: list[Any] = [
    {"role": "user", "content": "I am Ada."},
    {"role": "assistant", "content": "Hello, Ada."},
    {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "nothing"},
    {"role": "user", "content": "Go on."},
]


SAYS = ["Ada", " asked", ";", " nothing", " was", " found", "."]


def contents(service: FakeService) -> list[Any]:
    prompt = service.requests[-1].prompt
    assert isinstance(prompt, Chat)
    return [message["content"] for message in prompt.messages]


async def test_user_messages_and_one_summary_are_the_window() -> None:
    service = FakeService(says=SAYS)
    async with client_of(service) as client:
        compacted = await client.responses.compact(model="org/fake", input=TALK, instructions="Be brief.")
        asked = contents(service)
        assert asked[0] == "Be brief." and asked[1] == "I am Ada." and "Summarize" in asked[-1]
        assert compacted.object == "response.compaction" and compacted.usage.output_tokens > 0
        window: list[Any] = [item.to_dict(warnings=False) for item in compacted.output]
        assert [item["type"] for item in window] == ["message", "message", "compaction"]
        assert [item["content"][0]["text"] for item in window[:2]] == ["I am Ada.", "Go on."]
        answer = await client.responses.create(
            model="org/fake", input=[*window, {"role": "user", "content": "Who am I?"}]
        )
        seen = contents(service)
        assert seen[:2] == ["I am Ada.", "Go on."] and seen[3] == "Who am I?"
        assert seen[2] == "Summary of the conversation so far:\n" + "".join(SAYS)
        # a stored response is continued likewise, and a window is compacted again
        again = await client.responses.compact(model="org/fake", previous_response_id=answer.id)
        assert [item.type for item in again.output] == ["message"] * 3 + ["compaction"]
        made = await client.conversations.create(items=window)
        await client.responses.create(model="org/fake", input="?", conversation=made.id)
        assert contents(service)[2] == seen[2]


async def test_what_cannot_be_compacted_is_refused() -> None:
    async with client_of() as client:  # whose answers are cut off
        with pytest.raises(openai.BadRequestError, match="no whole summary"):
            await client.responses.compact(model="org/fake", input=TALK)
        with pytest.raises(openai.BadRequestError, match="input is missing"):
            await client.responses.compact(model="org/fake")
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            await client.responses.compact(model="org/fake", previous_response_id="resp_0")
        with pytest.raises(openai.NotFoundError, match="other"):
            await client.responses.compact(model="other", input="?")


@pytest.mark.parametrize("content", ["gAAAAA", "summary.???", "summary./w==", 5, None])
async def test_compaction_items_of_others_are_refused(content: Any) -> None:
    async with client_of() as client:
        item: Any = {"type": "compaction", "encrypted_content": content}
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(model="org/fake", input=[item])
        body: Any = error.value.body
        assert body["param"] == "input[0].encrypted_content"
