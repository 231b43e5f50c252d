"""Response bodies of the OpenAI API. Answers are encoded as these types, and the OpenAPI document is made of
them.

A field that is UNSET is left out; `null` is written where OpenAI writes it.
"""

from datetime import datetime
from typing import Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from runtime.http.openai.batches import Batch
from runtime.http.openai.files import File
from runtime.json_value import JsonDict, JsonValue

T = TypeVar("T")


class CachedTokensDetails(Struct, forbid_unknown_fields=True):
    """Where cached tokens came from (--enable-cache-report), and those that stand for images, videos and
    sounds, where the prompt has some."""

    device: int | UnsetType = UNSET
    host: int | UnsetType = UNSET
    storage: int | UnsetType = UNSET
    storage_backend: str | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class MediaTokens(Struct, forbid_unknown_fields=True):
    """Tokens of images, videos and sounds of the prompt, where it has some, how many of these were not
    encoded, as they were cached, and the seconds of the encoder."""

    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    cached_media: int | UnsetType = UNSET
    encode_seconds: float | UnsetType = UNSET


class CachedTokens(Struct, forbid_unknown_fields=True):
    """Cached tokens of the prompt; the other fields are those of MediaTokens."""

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    cached_media: int | UnsetType = UNSET
    encode_seconds: float | UnsetType = UNSET


class OutputTokens(Struct, forbid_unknown_fields=True):
    """Kinds of tokens of the output."""

    reasoning_tokens: int
    # drafts of speculative decoding, where there were some
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct, forbid_unknown_fields=True):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputTokens | UnsetType = UNSET  # of routes that generate


class TopLogprob(Struct, forbid_unknown_fields=True):
    """A token with its log probability."""

    token: str
    bytes: list[int]
    logprob: float | None


class ChatTokenLogprob(TopLogprob, forbid_unknown_fields=True):
    """A sampled token with its log probability and the alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    """Log probabilities of a message's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(Struct, forbid_unknown_fields=True):
    """A called function: its name and its arguments as text, which should be JSON."""

    name: str
    arguments: str


class CalledTool(Struct, forbid_unknown_fields=True):
    """A called custom tool: its name and its text."""

    name: str
    input: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """A tool call of an answer: of a function, or of a custom tool."""

    id: str
    function: CalledFunction | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"
    custom: CalledTool | UnsetType = UNSET


class ChatMessage(Struct, forbid_unknown_fields=True):
    """The message of an answer."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None  # no model here refuses in a field of its own
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that choices of chat and text completions share."""

    index: int
    finish_reason: str | None
    matched_stop: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    hidden_states: JsonValue | UnsetType = UNSET  # a list of numbers, or null


class ChatChoice(Choice, kw_only=True, forbid_unknown_fields=True):
    """One of the `n` answers of a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class Extension(Struct, forbid_unknown_fields=True):
    """What SGLang adds to answers."""

    routed_experts: str  # as fields/routed_experts.py writes them


class ChatCompletion(Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    sglext: Extension | UnsetType = UNSET
    prompt_logprobs: list[JsonDict | None] | UnsetType = UNSET


class FunctionDelta(Struct, forbid_unknown_fields=True):
    """Part of a call's function."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomDelta(Struct, forbid_unknown_fields=True):
    """Part of a call's custom tool."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCallDelta(Struct, forbid_unknown_fields=True):
    """Part of tool call number `index`."""

    index: int
    function: FunctionDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class MessageDelta(Struct, forbid_unknown_fields=True):
    """Part of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    hidden_states: JsonValue | UnsetType = UNSET


class ChunkChoice(Choice, kw_only=True, forbid_unknown_fields=True):
    """Part of one of the `n` answers."""

    delta: MessageDelta
    logprobs: ChatLogprobs | None


class ChatChunk(Struct, kw_only=True, forbid_unknown_fields=True):
    """An event of a chat's stream, which ends with [DONE]."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    sglext: Extension | UnsetType = UNSET


class TextLogprobs(Struct, forbid_unknown_fields=True):
    """Log probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Choice, kw_only=True, forbid_unknown_fields=True):
    """One of the `n` texts, or a part of it."""

    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: list[JsonDict | None] | UnsetType = UNSET


class Completion(Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of /v1/completions, and an event of its stream, which ends with [DONE]."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None | UnsetType = UNSET
    sglext: Extension | UnsetType = UNSET


class Model(Struct, kw_only=True, forbid_unknown_fields=True):
    """A served model; the last fields are those of Anthropic's API."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: str | UnsetType = UNSET  # of an adapter: its base model
    type: str | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    created_at: datetime | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET


class Page(Struct, Generic[T], kw_only=True, forbid_unknown_fields=True):
    """One page of a list."""

    object: Literal["list"]
    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(Struct, forbid_unknown_fields=True):
    """A deleted object."""

    id: str
    object: str
    deleted: bool


Models, FilePage, BatchPage, ItemPage = Page[Model], Page[File], Page[Batch], Page[JsonDict]
