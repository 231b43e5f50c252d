"""Response bodies of Ollama's API. Answers are encoded as these types, and the OpenAPI document is made of
them."""

from datetime import datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from runtime.http.openai.completion_response import ChatTokenLogprob, MediaTokens
from runtime.json_value import JsonDict


class CalledFunction(Struct, forbid_unknown_fields=True):
    """A called function."""

    index: int
    name: str
    arguments: JsonDict


class Call(Struct, forbid_unknown_fields=True):
    """A tool call."""

    id: str
    function: CalledFunction


class ResponseMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of the assistant, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Line(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that answers and the lines of their streams share. Durations, in nanoseconds, and counts are in
    the last line."""

    model: str
    created_at: datetime
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    prompt_eval_details: MediaTokens | UnsetType = UNSET  # with images; an extension
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class ChatLine(Line, kw_only=True, forbid_unknown_fields=True):
    """The response of /api/chat, or a line of it."""

    message: ResponseMessage


class GenerateLine(Line, kw_only=True, forbid_unknown_fields=True):
    """The response of /api/generate, or a line of it."""

    response: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Embeddings(Struct, forbid_unknown_fields=True):
    """The response of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class Embedding(Struct, forbid_unknown_fields=True):
    """The response of /api/embeddings."""

    embedding: list[float]


class Details(Struct, forbid_unknown_fields=True):
    """Details of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Tag(Struct, kw_only=True, forbid_unknown_fields=True):
    """A served model."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: Details


class Running(Tag, kw_only=True, forbid_unknown_fields=True):
    """A loaded model."""

    expires_at: datetime
    size_vram: int
    context_length: int


class Tags(Struct, forbid_unknown_fields=True):
    """The response of /api/tags."""

    models: list[Tag]


class Processes(Struct, forbid_unknown_fields=True):
    """The response of /api/ps."""

    models: list[Running]


class Shown(Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: JsonDict
    capabilities: list[str]
    modified_at: datetime


class Failure(Struct, forbid_unknown_fields=True):
    """The last line of a stream that failed."""

    error: str
