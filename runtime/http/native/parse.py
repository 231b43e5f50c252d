"""POST /parse_function_call and /separate_reasoning: texts that came some other way, read as answers are."""

from typing import Any

from anyio.to_thread import run_sync  # a text may be long
from msgspec import Struct
from starlette.routing import Route

from runtime.errors import InvalidRequest, OptionsError
from runtime.http.json_routes import taking
from runtime.http.native.native_response import ParsedCalls, ParsedReasoning
from runtime.http.openai.tools import schemas_of
from runtime.http.settings import HttpSettings
from runtime.parsing.channels import FRAMINGS
from runtime.parsing.detect import Formats, choose, open_parser
from runtime.parsing.events import Arguments, CallBegin, Content, Event, Reasoning
from runtime.service import Service


class CallBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /parse_function_call"""

    text: str
    tools: list[dict[str, Any]]
    tool_call_parser: str | None = None  # left out: the server's


class ReasoningBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /separate_reasoning"""

    text: str
    reasoning_parser: str | None = None  # left out: the server's


def routes(service: Service, settings: HttpSettings) -> list[Route]:
    async def calls(wish: CallBody) -> Any:
        name = _named(wish.tool_call_parser or service.card.formats.tools, "tool_call_parser")
        thinking = name if name in FRAMINGS else None
        events = await run_sync(
            _read, _formats(name, thinking, "tool_call_parser"), wish.text, schemas_of(wish.tools)
        )
        found: list[dict[str, Any]] = []
        for event in events:
            match event:
                case CallBegin(index=index, name=called):
                    found.append({"tool_index": index, "name": called, "parameters": ""})
                case Arguments(text=text):
                    found[-1]["parameters"] += text
        return {"normal_text": _joined(events, Content), "calls": found}

    async def reasoning(wish: ReasoningBody) -> Any:
        name = _named(wish.reasoning_parser or service.card.formats.thinking, "reasoning_parser")
        events = await run_sync(_read, _formats(None, name, "reasoning_parser"), wish.text, {})
        return {"reasoning_text": _joined(events, Reasoning), "text": _joined(events, Content)}

    return [
        Route(
            "/parse_function_call",
            taking(CallBody, ParsedCalls, calls, settings.max_body_bytes),
            methods=["POST"],
        ),
        Route(
            "/separate_reasoning",
            taking(ReasoningBody, ParsedReasoning, reasoning, settings.max_body_bytes),
            methods=["POST"],
        ),
    ]


def _named(name: str | None, field: str) -> str:
    if name is None:
        raise InvalidRequest(f"{field} is missing, and the server's model has none", param=field)
    return name


def _formats(tools: str | None, thinking: str | None, field: str) -> Formats:
    try:
        return choose(tools or "none", thinking or "none", "")
    except OptionsError as error:
        raise InvalidRequest(
            error.problems[0].replace("--" + field.replace("_", "-"), field), param=field
        ) from None


def _read(formats: Formats, text: str, tools: Any) -> list[Event]:
    parser = open_parser(formats, tools, "")
    return parser.feed(text) + parser.flush()


def _joined(events: list[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join([event.text for event in events if isinstance(event, kind)])
