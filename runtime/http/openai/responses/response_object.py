"""Response bodies and events of /v1/responses."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from runtime.http.openai.completion_response import CachedTokens, ChatTokenLogprob, OutputTokens
from runtime.http.openai.responses.response_request import ConversationName
from runtime.json_value import JsonDict


class ResponseUsage(Struct, forbid_unknown_fields=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class OutputPart(Struct, forbid_unknown_fields=True):
    """A text of an output item."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[JsonDict] | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class OutputItem(Struct, kw_only=True, forbid_unknown_fields=True):
    """A message, a tool call, or reasoning."""

    id: str
    type: Literal["message", "function_call", "custom_tool_call", "reasoning"]
    status: str
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[OutputPart] | UnsetType = UNSET
    summary: list[JsonDict] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class Failure(Struct, forbid_unknown_fields=True):
    """Why a response failed."""

    code: str
    message: str


class Response(Struct, kw_only=True, forbid_unknown_fields=True):
    """A response, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: Failure | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str
    store: bool
    temperature: float | None
    text: JsonDict
    tool_choice: str | JsonDict
    tools: list[JsonDict]
    top_logprobs: int
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    conversation: ConversationName | None = None


class ResponseEvent(Struct, kw_only=True, forbid_unknown_fields=True):
    """An event of a response's stream; `type` determines which fields it has."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputPart | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class InputTokens(Struct, forbid_unknown_fields=True):
    """The number of tokens of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int
