"""Tools of a chat request: their schemas, and the constraints that tool_choice and strict tools put on the
answer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct, structs

from runtime.errors import InvalidRequest
from runtime.grammar.call_grammar import slashed
from runtime.grammar.quoted_lark import quoted_lark
from runtime.http.errors import convert
from runtime.http.openai.completion_request import ChatBody
from runtime.http.openai.custom_tools import INPUT, TextGrammar
from runtime.json_value import Fields, JsonValue
from runtime.messages.constraint import (
    INDEX,
    AnyText,
    CallForm,
    Calls,
    JsonSchema,
    Lark,
    PythonArguments,
    Rule,
    StructuralTag,
)
from runtime.parsing import call_frames as frames
from runtime.parsing.call_frames import CALL_FRAMES, CallFrame
from runtime.parsing.schema_types import Tools

TextGrammars = Mapping[str, TextGrammar]  # by the names of custom tools
NO_GRAMMARS: TextGrammars = MappingProxyType({})
# the form of answers for which tool_choice requires a call, whatever the model's own format is
LISTED = CallFrame('{"name": "NAME", "arguments": ', "}", before="[", between=", ", after="]")
DEFINITIONS = ("$defs", "definitions")  # parts of a schema that are referenced from its root


class NamedFunction(Struct):
    """A function by its name."""

    name: str


class AllowedTool(Struct):
    """A tool of `allowed_tools`."""

    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct, forbid_unknown_fields=True):
    """tool_choice.allowed_tools: which tools may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: A[list[AllowedTool], Meta(min_length=1)]


def tools_of(body: ChatBody) -> Tools:
    """Parameter schemas, by function name, of the tools that may be called. Raises InvalidRequest."""
    tools = schemas_of(body.tools or [])
    return {} if body.tool_choice == "none" else tools


def schemas_of(tool_list: list[Fields]) -> Tools:
    """Parameter schemas of a list of tools, by function name. Raises InvalidRequest."""
    tools: dict[str, Fields] = {}
    for i, tool in enumerate(tool_list):
        path = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise InvalidRequest(
                f"{path}: tools of type {tool['type']} are not served here; functions are",
                param=f"{path}.type",
            )
        function = tool.get("function")
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise InvalidRequest(f"{path}.function.name is missing", param=f"{path}.function.name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidRequest(
                f"{path}.function.parameters must be a JSON schema", param=f"{path}.function.parameters"
            )
        tools[function["name"]] = parameters
    return tools


def with_allowed_tools(body: ChatBody) -> ChatBody:
    """The request with only its `allowed_tools`, which the model then sees alone. Raises InvalidRequest."""
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body
    try:
        allowed = convert(choice.get("allowed_tools"), AllowedTools, {})
    except InvalidRequest as error:
        raise InvalidRequest(f"tool_choice.allowed_tools: {error.message}", param="tool_choice") from None
    names = {tool.function.name for tool in allowed.tools}
    if missing := sorted(names.difference(schemas_of(body.tools or []))):
        raise InvalidRequest(
            f"tool_choice allows {missing[0]}, which is none of the tools", param="tool_choice"
        )
    functions: list[Fields] = body.tools or []
    tools = [tool for tool in functions if tool["function"]["name"] in names]
    return structs.replace(body, tools=tools, tool_choice=allowed.mode)


def requires_call(body: ChatBody) -> bool:
    """Whether the answer has to call a tool."""
    return body.tool_choice in ("required", "any") or isinstance(body.tool_choice, dict)


def required_calls(body: ChatBody, tools: Tools, grammars: TextGrammars = NO_GRAMMARS) -> Rule | None:
    """The constraint that makes the answer a list of calls; None where no call is required. Raises
    InvalidRequest."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if not requires_call(body):
        raise InvalidRequest(
            f"tool_choice {choice} is unknown; use auto, none, required, a function or allowed_tools",
            param="tool_choice",
        )
    if not tools:
        raise InvalidRequest("tool_choice requires a call, but there are no tools", param="tool_choice")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type", "function") != "function" or not isinstance(name, str):
            raise InvalidRequest(
                'tool_choice must be like {"type": "function", "function": {"name": ...}}',
                param="tool_choice",
            )
        if name not in tools:
            raise InvalidRequest(f"tool_choice names {name}, which is none of the tools", param="tool_choice")
        tools = {name: tools[name]}
    # small models repeat calls until they are cut off: several calls only with parallel_tool_calls
    is_one = isinstance(choice, dict) or not body.parallel_tool_calls
    if not grammars.keys().isdisjoint(tools):
        return structs.replace(own_calls(body, tools, LISTED, grammars), is_single=is_one)
    schema = calls_schema(tools) | {"minItems": 1} | ({"maxItems": 1} if is_one else {})
    return JsonSchema(msgspec.json.encode(schema).decode())


def strict_calls(
    body: ChatBody, tools: Tools, form: str | None, grammars: TextGrammars = NO_GRAMMARS
) -> Calls | None:
    """The constraint for free text in which calls, in the model's own format `form`, follow the schemas of
    tools with `strict`; None without such tools, and for formats whose calls no text begins."""
    functions: list[Fields] = body.tools or []  # checked by `tools_of`
    names = {tool["function"]["name"] for tool in functions if tool["function"].get("strict") is True}
    frame = CALL_FRAMES.get(form or "")
    if frame is None or not frame.trigger:
        return None
    held = names if frame.body == "json" else set()
    if held.isdisjoint(tools) and grammars.keys().isdisjoint(tools):
        return None
    schemas = {name: (schema if name in held else None) or {} for name, schema in tools.items()}
    return structs.replace(own_calls(body, schemas, frame, grammars), answer=AnyText(), trigger=frame.trigger)


def calls_or(
    body: ChatBody, tools: Tools, form: str | None, rule: Rule, grammars: TextGrammars = NO_GRAMMARS
) -> Rule:
    """The constraint for calls in the model's own format `form`, or an answer that `rule` allows. Without a
    format no call would be recognised; structural tags leave room for calls in their free text."""
    frame = CALL_FRAMES.get(form or "")
    if frame is None or not tools or isinstance(rule, StructuralTag | Calls):
        return rule
    return structs.replace(own_calls(body, tools, frame, grammars), answer=rule)


def own_calls(body: ChatBody, tools: Tools, frame: CallFrame, grammars: TextGrammars) -> Calls:
    """The calls of these tools in the model's own format; as many as the model likes, unless
    parallel_tool_calls is false."""
    return Calls(
        tuple([_form(name, schema, frame, grammars.get(name)) for name, schema in tools.items()]),
        before=frame.before,
        between=frame.between,
        after=frame.after,
        is_single=body.parallel_tool_calls is False,
    )


def _form(
    name: str, schema: Mapping[str, JsonValue], frame: CallFrame, grammar: TextGrammar | None
) -> CallForm:
    begin = frame.begin.replace(frames.INDEX, INDEX).replace(frames.NAME, name)
    if grammar is not None and frame.body == "free":
        before, after = [text.replace(frames.KEY, INPUT) for text in frame.text]
        return CallForm(begin + before, _lark(grammar), after + frame.end)
    if grammar is not None and frame.body == "json":
        return _text_form(begin, schema, frame, grammar)
    match frame.body:
        case "json" | "object":
            arguments: Fields = {"type": "object", **schema}
            if frame.body == "object":
                arguments = _call_object(name, arguments, "parameters")
            return CallForm(begin, JsonSchema(msgspec.json.encode(arguments).decode()), frame.end)
        case "python":
            return CallForm(begin, PythonArguments(), frame.end)
    return CallForm(begin, AnyText(frame.text), frame.end)


def _lark(grammar: TextGrammar) -> Lark:
    if grammar.syntax == "lark":
        return Lark(grammar.definition)
    return Lark(f"start: {slashed(grammar.definition)}")


def _text_form(
    begin: str, schema: Mapping[str, JsonValue], frame: CallFrame, grammar: TextGrammar
) -> CallForm:
    """A custom tool whose text stands within JSON. What cannot be rewritten for that is any text."""
    if grammar.syntax == "regex":
        bare = grammar.definition.removeprefix("^").removesuffix("$")
        text = {"type": "string", "pattern": f"^(?:{bare})$"}
        held: Fields = {**schema, "type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        held["additionalProperties"] = False
        return CallForm(begin, JsonSchema(msgspec.json.encode(held).decode()), frame.end)
    try:
        quoted = Lark(quoted_lark(grammar.definition))
    except ValueError:
        any_object = msgspec.json.encode({"type": "object", **schema}).decode()
        return CallForm(begin, JsonSchema(any_object), frame.end)
    return CallForm(f'{begin}{{"{INPUT}": "', quoted, '"}' + frame.end)


def _call_object(name: str, arguments: Fields, word: str) -> Fields:
    """The schema of a call as an object, whose arguments are called `word`."""
    shared = {key: arguments[key] for key in DEFINITIONS if key in arguments}
    own = {key: value for key, value in arguments.items() if key not in DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, word: own},
        "required": ["name", word],
        "additionalProperties": False,
    } | shared


def calls_schema(tools: Tools) -> Fields:
    """JSON schema of a list of calls. Raises InvalidRequest."""
    shared: dict[str, Fields] = {}
    items = []
    for name, parameters in tools.items():
        for word in DEFINITIONS:
            definitions = parameters.get(word) or {}
            if not isinstance(definitions, dict):
                raise InvalidRequest(
                    f"{word} in the parameters of {name} must be an object of schemas", param="tools"
                )
            for key, definition in definitions.items():
                if shared.setdefault(word, {}).setdefault(key, definition) != definition:
                    raise InvalidRequest(
                        f"two tools define {word}.{key} differently; give one of them another name",
                        param="tools",
                    )
        own = {key: value for key, value in parameters.items() if key not in DEFINITIONS}
        items.append(_call_object(name, {"type": "object"} | own, "arguments"))
    return {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}} | shared
