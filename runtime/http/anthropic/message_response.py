"""Response bodies and events of Anthropic's API. Answers are encoded as these types, and the OpenAPI document
is made of them."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from runtime.http.openai.completion_response import MediaTokens
from runtime.json_value import JsonDict


class ReasoningTokens(Struct, forbid_unknown_fields=True):
    """Reasoning tokens of the output."""

    thinking_tokens: int


class MessageUsage(Struct, forbid_unknown_fields=True):
    """Token counts. Input tokens are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ReasoningTokens
    service_tier: str
    input_tokens_details: MediaTokens | UnsetType = UNSET  # with images; an extension


class Text(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text block."""

    text: str


class Thinking(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """A block of reasoning."""

    thinking: str
    signature: str


class ToolUse(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A tool call."""

    id: str
    name: str
    input: JsonDict


class AppliedEdits(Struct, forbid_unknown_fields=True):
    """The edits of `context_management` that were applied: none are reported."""

    applied_edits: list[JsonDict] = []


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Text | Thinking | ToolUse]
    stop_reason: (
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    )
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


class Delta(Struct, kw_only=True, forbid_unknown_fields=True):
    """Part of a block, or how the message ends."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    stop_sequence: str | None | UnsetType = UNSET
    stop_details: None | UnsetType = UNSET
    container: None | UnsetType = UNSET


class MessageEvent(Struct, kw_only=True, forbid_unknown_fields=True):
    """An event of a message's stream; `type` determines which fields it has."""

    type: Literal[
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Text | Thinking | ToolUse | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    context_management: AppliedEdits | UnsetType = UNSET


class TokenCount(Struct, forbid_unknown_fields=True):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
