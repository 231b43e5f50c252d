"""POST /parse_function_call and /separate_reasoning: parses texts as answers are parsed."""

from collections.abc import Iterator

from anyio.to_thread import run_sync  # a text may be long
from msgspec import Struct

from runtime.errors import InvalidRequest, OptionsError
from runtime.gil import give_way, giving_way
from runtime.http.openai.tools import schemas_of
from runtime.http.operation import Operation
from runtime.json_value import Fields
from runtime.parsing.channel_parser import CHANNEL_FORMATS
from runtime.parsing.detect import AnswerFormats, open_parser, select_formats
from runtime.parsing.events import Arguments, CallBegin, Content, Event, Reasoning
from runtime.parsing.schema_types import Tools
from runtime.service import Service

PIECE_CHARS = 4096  # of a text, parsed at once


class CallBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /parse_function_call."""

    text: str
    tools: list[Fields]
    tool_call_parser: str | None = None  # null: the server's


class ReasoningBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /separate_reasoning."""

    text: str
    reasoning_parser: str | None = None  # null: the server's


class ParsedCall(Struct, forbid_unknown_fields=True):
    """A tool call in the text."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(Struct, forbid_unknown_fields=True):
    """The response of /parse_function_call."""

    normal_text: str
    calls: list[ParsedCall]


class ParsedReasoning(Struct, forbid_unknown_fields=True):
    """The response of /separate_reasoning."""

    reasoning_text: str
    text: str


async def parse_calls(service: Service, body: CallBody) -> Fields:
    """POST /parse_function_call: the tool calls in a text. Raises InvalidRequest."""
    name = _named(body.tool_call_parser or service.card.formats.tool_calls, "tool_call_parser")
    thinking = name if name in CHANNEL_FORMATS else None
    formats = _formats(name, thinking, "tool_call_parser")
    return await run_sync(giving_way, _parsed_calls, formats, body.text, schemas_of(body.tools))


async def separate_reasoning(service: Service, body: ReasoningBody) -> Fields:
    """POST /separate_reasoning: the reasoning in a text, and the rest. Raises InvalidRequest."""
    name = _named(body.reasoning_parser or service.card.formats.reasoning, "reasoning_parser")
    formats = _formats(None, name, "reasoning_parser")
    return await run_sync(giving_way, _parsed_reasoning, formats, body.text)


def _named(name: str | None, field: str) -> str:
    if name is None:
        raise InvalidRequest(f"{field} is missing, and the server's model has none", param=field)
    return name


def _formats(tools: str | None, thinking: str | None, field: str) -> AnswerFormats:
    try:
        return select_formats(tools or "none", thinking or "none", "")
    except OptionsError as error:
        raise InvalidRequest(
            error.problems[0].replace("--" + field.replace("_", "-"), field), param=field
        ) from None


def _parsed_calls(formats: AnswerFormats, text: str, tools: Tools) -> Fields:
    normal: list[str] = []
    calls: list[Fields] = []
    for event in _read(formats, text, tools):
        match event:
            case Content(text=part):
                normal.append(part)
            case CallBegin(index=index, name=called):
                calls.append({"tool_index": index, "name": called, "parameters": ""})
            case Arguments(text=part):
                calls[-1]["parameters"] += part
    return {"normal_text": "".join(normal), "calls": calls}


def _parsed_reasoning(formats: AnswerFormats, text: str) -> Fields:
    texts: dict[type[Event], list[str]] = {Reasoning: [], Content: []}
    for event in _read(formats, text, {}):
        if isinstance(event, Reasoning | Content):
            texts[type(event)].append(event.text)
    return {"reasoning_text": "".join(texts[Reasoning]), "text": "".join(texts[Content])}


def _read(formats: AnswerFormats, text: str, tools: Tools) -> Iterator[Event]:
    parser = open_parser(formats, tools, "")
    for at in range(0, len(text), PIECE_CHARS):
        give_way()
        yield from parser.feed(text[at : at + PIECE_CHARS])
    yield from parser.flush()


OPERATIONS = (
    Operation(
        "POST",
        "/parse_function_call",
        "Tool calls in a text",
        body=CallBody,
        example={"text": "Hello!", "tools": [], "tool_call_parser": "hermes"},
        answers=(ParsedCalls,),
        call=parse_calls,
    ),
    Operation(
        "POST",
        "/separate_reasoning",
        "Reasoning in a text",
        body=ReasoningBody,
        example={"text": "Hello!", "reasoning_parser": "qwen3"},
        answers=(ParsedReasoning,),
        call=separate_reasoning,
    ),
)
