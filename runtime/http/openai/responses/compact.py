"""POST /v1/responses/compact: a shorter window of items in place of a conversation. As in OpenAI's API it is
all user messages and then one item that stands for the rest. Here that item is a summary which the served
model writes; its `encrypted_content` is the text in base64, and no secret."""

import base64
from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct

from runtime.errors import InvalidRequest
from runtime.http.errors import decode
from runtime.http.openai.files import new_id
from runtime.http.openai.responses.items import PREFIXES, SUMMARY, Item
from runtime.http.openai.responses.response_object import ResponseUsage
from runtime.http.openai.responses.response_request import MAX_ITEMS, ResponseBody
from runtime.http.openai.responses.serve import PreparedResponse, ResponseAnswerFormat
from runtime.http.openai.responses.writer import Payload
from runtime.http.streaming.answer_format import Output
from runtime.json_value import JsonDict, JsonValue
from runtime.service import Service

ASK = (
    "Summarize this conversation, for yourself to go on with it: what was asked, what was decided and found "
    "out, results of tools, names and numbers that matter, and what is left to be done. Write the summary "
    "alone."
)


class CompactBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses/compact."""

    model: str | None = None
    input: str | A[list[JsonDict], Meta(min_length=1, max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    # accepted without effect
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonValue = None
    service_tier: str | None = None


class Compacted(Struct, kw_only=True, forbid_unknown_fields=True):
    """A compacted window: what to send as the input of the next response, before anything new."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[JsonDict]
    usage: ResponseUsage


_decoder = msgspec.json.Decoder(CompactBody)


def read_compaction(content: bytes) -> ResponseBody:
    """The response that has the summary of what a body names. Raises InvalidRequest."""
    body = decode(content, _decoder)
    if body.input is None and body.previous_response_id is None:
        raise InvalidRequest("input is missing", param="input")
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
    return ResponseBody(
        model=body.model,
        input=[*given, {"role": "user", "content": ASK}],
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        store=False,
    )


class CompactAnswerFormat(ResponseAnswerFormat):
    """The compacted window of a response that has the summary."""

    answer_type = Compacted  # type: ignore[assignment]

    def __init__(self, service: Service, prepared: PreparedResponse) -> None:
        super().__init__(service, prepared, lambda _: None)

    def body(self, outputs: list[Output]) -> Payload:
        """The answer in one piece. Raises InvalidRequest where there is no whole summary."""
        response = super().body(outputs)
        parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
        text = "".join(part["text"] for part in parts).strip()
        if response["status"] != "completed" or not text:
            raise InvalidRequest(
                "the model wrote no whole summary within its context; compact earlier, or send the items "
                "that matter as the input of /v1/responses",
                param="input",
            )
        before = [*self.prepared.context, *self.prepared.input[:-1]]
        return {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [*(item for item in before if _is_of_user(item)), _summary(text)],
            "usage": response["usage"],
        }


def _is_of_user(item: Item) -> bool:
    return item["type"] == "message" and item.get("role") == "user"


def _summary(text: str) -> Item:
    content = SUMMARY + base64.b64encode(text.encode()).decode()
    return {"id": new_id(PREFIXES["compaction"]), "type": "compaction", "encrypted_content": content}
