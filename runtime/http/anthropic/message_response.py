"""What the routes of Anthropic's API answer. Answers are encoded as these, and the OpenAPI document is made
of them."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class ReasoningTokens(Struct, forbid_unknown_fields=True):
    """Of the output tokens."""

    thinking_tokens: int


class MessageUsage(Struct, forbid_unknown_fields=True):
    """How many tokens it took. Input tokens are those that were not found in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ReasoningTokens
    service_tier: str


class Text(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text."""

    text: str


class Thinking(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """What the model thought."""

    thinking: str
    signature: str


class ToolUse(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer of /v1/messages."""

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


class Delta(Struct, kw_only=True, forbid_unknown_fields=True):
    """More of a block, or how the message ends."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    stop_sequence: str | None | UnsetType = UNSET
    stop_details: None | UnsetType = UNSET
    container: None | UnsetType = UNSET


class MessageEvent(Struct, kw_only=True, forbid_unknown_fields=True):
    """An event of a message's growth; `type` says which fields it has."""

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


class TokenCount(Struct, forbid_unknown_fields=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int
