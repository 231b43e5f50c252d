"""Bodies of Ollama's API. `null` means the same as leaving a field out."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.http.openai.completion_request import MAX_MESSAGES, MAX_TOOLS
from runtime.json_value import JsonDict


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """`options`: sampling parameters, and options of Ollama's own server."""

    num_predict: int | None = None  # 0 and below: up to the context length
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # refused unless they change nothing
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    # accepted without effect: these configure Ollama's server; options of this server are set when it starts
    num_ctx: A[int, Meta(ge=1)] | None = None
    repeat_last_n: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    numa: bool | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    num_thread: int | None = None
    draft_num_predict: int | None = None


class CalledFunction(Struct):
    """A called function of an earlier answer."""

    name: str
    arguments: JsonDict = {}


class Call(Struct):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: str | None = None


class Message(Struct, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None  # reasoning of an earlier answer
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None  # in base64; they stand before the text


class Shared(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chats and generations share."""

    model: str
    stream: bool | None = None  # null: true
    format: str | JsonDict | None = None  # json, or a JSON schema
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: float | str | None = None  # accepted: the model stays
    truncate: bool | None = None  # accepted; --allow-auto-truncate decides
    shift: bool | None = None  # accepted; answers end where the context ends


class ChatBody(Shared, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /api/chat."""

    messages: A[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: A[list[JsonDict], Meta(max_length=MAX_TOOLS)] | None = None


class GenerateBody(Shared, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None  # text after the completion
    system: str | None = None
    images: list[str] | None = None  # in base64
    raw: bool | None = None  # the prompt goes to the model as it is, without the chat template
    # refused when they say anything
    template: str | None = None
    context: list[int] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class NamedBody(Struct):
    """The body of POST /api/show: a model by name."""

    model: str | None = None
    name: str | None = None  # the older field
    verbose: bool | None = None
