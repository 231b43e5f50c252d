"""The requests of the OpenAI API as this server takes them. Fields that are not here are refused, with the nearest name.

Limits of sampling parameters stand in runtime.sampling; these types only say what is a number, a string or a list.
`null` is the same as leaving a field out: clients send it. Fields of later steps are `Any`: `refuse_later` answers for them.
"""

from typing import Annotated as A
from typing import Any, Literal

from msgspec import Meta, Struct

from runtime.errors import InvalidRequest
from runtime.sampling import CacheSalt, Priority

MAX_MESSAGES = 16_384
MAX_PROMPTS = 1_024
MAX_TOOLS = 1_024


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # ignored: there is nothing to hide the length of


class Function(Struct, forbid_unknown_fields=True):
    """A function as it was called."""

    name: str
    arguments: str = "{}"  # a JSON object


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call that the assistant made earlier in the conversation."""

    function: Function
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # some clients replay what they were streamed


class Part(Struct):
    """A piece of a message's content; other types than text come in a later step."""

    type: str
    text: str | None = None


class Message(Struct, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier answer, for templates that show it
    refusal: str | None = None  # ignored, like the next three: clients replay whole answers
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class Shared(Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # how tokens are chosen
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None  # keys are strings in JSON
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None  # vLLM's name for
    no_stop_trim: bool | None = None  # SGLang's
    priority: Priority | None = None  # see --enable-priority-scheduling
    cache_salt: CacheSalt | list[CacheSalt] | None = None  # cached prefixes are shared within one salt only; in vLLM's words
    extra_key: CacheSalt | list[CacheSalt] | None = None  # and in SGLang's
    # real clients set these; they change nothing here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    # what the answer must look like: at most one of these (http/constraint.py)
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | None = None  # SGLang's, with the next three
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's, and its older
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # later steps
    lora_path: Any = None


class ChatBody(Shared, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions"""

    messages: A[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: A[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # handed to the template
    # accepted without effect
    parallel_tool_calls: bool | None = None
    verbosity: str | None = None
    moderation: Any = None
    modalities: list[Literal["text"]] | None = None
    # later steps
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    audio: Any = None
    web_search_options: Any = None


class CompletionBody(Shared, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. The prompt is a text, texts, token ids, or lists of token ids."""

    prompt: str | A[list[str | int | list[int]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None  # what follows the text that is wanted (see --completion-template)


LATER = ("lora_path", "functions", "function_call", "prediction", "audio", "web_search_options")


def refuse_later(body: Shared) -> None:
    """Raises InvalidRequest for fields that exist and that this version does not serve yet."""
    for name in LATER:
        if getattr(body, name, None) not in (None, ""):
            raise InvalidRequest(f"{name} is not served by this version yet; leave it out", param=name)
