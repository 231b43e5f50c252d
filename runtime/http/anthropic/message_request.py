"""Bodies of Anthropic's API. Unknown fields of blocks are ignored: clients send whole answers back."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.http.openai.completion_request import MAX_MESSAGES, MAX_TOOLS
from runtime.json_value import JsonDict, JsonValue
from runtime.messages.sampling import CacheSalt, Priority

MAX_BLOCKS = 16_384


class TextBlock(Struct, tag_field="type", tag="text"):
    """A text."""

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str


class RedactedBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server; left out."""

    data: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: JsonDict


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """The result of a tool call: blocks of text, and images."""

    tool_use_id: str
    content: "str | list[TextBlock | ImageBlock | DocumentBlock | SearchBlock] | None" = None
    is_error: bool | None = None


class Base64Source(Struct, tag_field="type", tag="base64"):
    """An image in base64."""

    data: str
    media_type: str | None = None  # accepted: the file itself says what it is


class UrlSource(Struct, tag_field="type", tag="url"):
    """The URL of an image."""

    url: str


class FileSource(Struct, tag_field="type", tag="file"):
    """Refused: Anthropic's files are not kept here."""

    file_id: str = ""


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | UrlSource | FileSource


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """Refused: only text is supported."""

    source: JsonValue = None


class SearchBlock(Struct, tag_field="type", tag="search_result"):
    """Refused: only text is supported."""

    source: JsonValue = None


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchBlock
)


class Turn(Struct, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | A[list[Block], Meta(max_length=MAX_BLOCKS)]


class Tool(Struct):
    """A function of the client. Tools that run in Anthropic's servers have another `type` and are refused."""

    name: A[str, Meta(min_length=1, max_length=128)]
    input_schema: JsonDict | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None  # calls follow the schema: docs/tools.md


class AutoChoice(Struct, tag_field="type", tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any"):
    """The model has to call a tool."""

    disable_parallel_tool_use: bool | None = None


class ToolChoice(Struct, tag_field="type", tag="tool"):
    """The model has to call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none"):
    """The model must not call a tool."""


Display = Literal["summarized", "omitted"]  # there are no summaries: reasoning is sent in full, or left out


class Enabled(Struct, tag_field="type", tag="enabled"):
    """Reasoning is on."""

    budget_tokens: A[int, Meta(ge=1)]
    display: Display | None = None


class Adaptive(Struct, tag_field="type", tag="adaptive"):
    """It thinks if it likes to."""

    display: Display | None = None


class Disabled(Struct, tag_field="type", tag="disabled"):
    """It answers at once."""


class SchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """The answer is JSON of this schema."""

    schema: JsonDict


class OutputConfig(Struct):
    """How the answer is made."""

    effort: str | None = None  # handed to the template
    format: SchemaFormat | None = None


class Turns(Struct, frozen=True, tag_field="type", tag="thinking_turns"):
    """So many answers."""

    value: A[int, Meta(ge=1)]


class AllTurns(Struct, tag_field="type", tag="all"):
    """All of them."""


class ClearThinking(Struct, tag_field="type", tag="clear_thinking_20251015"):
    """The reasoning of the last answers stays, that of earlier answers is left out."""

    keep: Turns | AllTurns | Literal["all"] = Turns(1)


class ClearToolUses(Struct, tag_field="type", tag="clear_tool_uses_20250919"):
    """Results of older tool calls are left out from some length on: accepted without effect, so that the
    prefix of the conversation stays in the cache."""

    trigger: JsonValue = None
    keep: JsonValue = None
    clear_at_least: JsonValue = None
    clear_tool_inputs: JsonValue = None
    exclude_tools: list[str] | None = None


class ContextManagement(Struct, forbid_unknown_fields=True):
    """What is left out of the conversation."""

    edits: list[ClearThinking | ClearToolUses] = []


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens"""

    model: str
    messages: A[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: A[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: Enabled | Adaptive | Disabled | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None  # the older place of output_config.format
    chat_template_kwargs: JsonDict | None = None  # not Anthropic's, as the last six of the next
    cache_control: JsonValue = None  # prefixes are found without marks
    # accepted without effect
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    context_management: ContextManagement | None = None
    billing_policy: JsonValue = None
    fallback_credit_token: JsonValue = None
    # refused when they say anything: REFUSED, and threads
    mcp_servers: list[JsonValue] | None = None
    compaction: JsonValue = None
    fallbacks: JsonValue = None
    thread: JsonValue = None


REFUSED = ("mcp_servers", "compaction", "fallbacks")


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages"""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # accepted without effect
    # user_id is for logs; whose share a request uses is a matter of keys or headers
    metadata: JsonDict | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    container: JsonValue = None
    diagnostics: JsonValue = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
