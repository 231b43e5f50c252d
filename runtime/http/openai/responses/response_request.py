"""Bodies of /v1/responses; `null` means the same as leaving a field out."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.errors import InvalidRequest
from runtime.http.fields.sampling import SamplingFields
from runtime.http.openai.parameters import NOTHING
from runtime.http.openai.responses import tools
from runtime.json_value import JsonDict, JsonValue
from runtime.messages.sampling import CacheSalt, Priority

MAX_ITEMS = 16_384


class Format(Struct, forbid_unknown_fields=True):
    """`text.format`: the form of the output text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: JsonDict | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    """`text`: options of the output text."""

    format: Format | None = None
    verbosity: str | None = None  # accepted without effect


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """`reasoning`. Reasoning is returned in full, as reasoning_text; there are no summaries."""

    effort: str | None = None  # passed to the chat template
    max_tokens: int | None = None  # most tokens of reasoning; not in OpenAI's API
    summary: str | None = None
    generate_summary: str | None = None


class ConversationName(Struct, forbid_unknown_fields=True):
    """`conversation` as an object."""

    id: str


class ResponseBody(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses."""

    # left out only where a conversation goes on as it is
    input: str | A[list[JsonDict], Meta(min_length=1, max_length=MAX_ITEMS)] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[JsonDict] | None = None
    tool_choice: str | JsonDict | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: A[dict[str, str], Meta(max_length=16)] | None = None
    # not in OpenAI's API; as SGLang and vLLM have them, also most of SamplingFields
    seed: int | None = None
    chat_template_kwargs: JsonDict | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: JsonDict | None = None
    enable_thinking: bool | None = None
    # accepted without effect
    truncation: Literal["auto", "disabled"] | None = None  # --allow-auto-truncate decides
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: JsonValue = None
    client_metadata: JsonValue = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonValue = None
    # not served
    prompt: JsonValue = None
    max_tool_calls: JsonValue = None
    context_management: JsonValue = None
    moderation: JsonValue = None
    image: JsonValue = None
    access_programs: JsonValue = None
    background_options: JsonValue = None
    request_id: JsonValue = None
    mm_processor_kwargs: JsonValue = None
    enable_response_messages: JsonValue = None
    previous_input_messages: JsonValue = None
    previous_response: JsonValue = None
    vllm_xargs: JsonValue = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the response belongs to."""
        named = self.conversation
        return named.id if isinstance(named, ConversationName) else named


NOT_SERVED = (
    "prompt",
    "max_tool_calls",
    "context_management",
    "moderation",
    "image",
    "access_programs",
    "background_options",
    "request_id",
    "mm_processor_kwargs",
    "enable_response_messages",
    "previous_input_messages",
    "previous_response",
    "vllm_xargs",
)
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")  # the second changes nothing: reasoning is given as text


def check(body: ResponseBody) -> None:
    """Raises InvalidRequest, naming the field, for what is not supported."""
    for name in NOT_SERVED:
        if getattr(body, name) not in (None, *NOTHING):
            raise InvalidRequest(f"{name} is not served here; leave it out", param=name)
    for name in body.include or ():
        if name not in INCLUDES:
            raise InvalidRequest(
                f"include: {name} is not served here; {', '.join(INCLUDES)} are", param="include"
            )
    tools.check(body.tools)
    if body.conversation is not None and body.previous_response_id is not None:
        raise InvalidRequest(
            "a response belongs to a conversation or continues another one; leave previous_response_id out",
            param="previous_response_id",
        )
    if body.input is None and body.conversation is None and body.previous_response_id is None:
        raise InvalidRequest("input is missing", param="input")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store: the answer is fetched later", param="store")
