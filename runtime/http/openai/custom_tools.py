"""Custom tools of a chat: they take a text in place of an object. The model sees a function with one
parameter, `input`, and the client a call of its tool again."""

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct, structs

from runtime.errors import InvalidRequest
from runtime.http.errors import convert
from runtime.http.openai.completion_request import ChatBody
from runtime.json_value import Fields

INPUT = "input"  # the function's parameter


class TextGrammar(Struct, frozen=True, forbid_unknown_fields=True):
    """The grammar of a tool's text."""

    syntax: Literal["lark", "regex"]
    definition: str


class TextFormat(Struct, frozen=True):
    """`format` of a custom tool; the fields of a grammar may also stand in it itself, as in /v1/responses."""

    type: Literal["text", "grammar"] = "text"
    grammar: TextGrammar | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Struct, frozen=True):
    """A custom tool, as /v1/chat/completions has it."""

    name: str
    description: str | None = None
    format: TextFormat | None = None

    @property
    def grammar(self) -> TextGrammar | None:
        """The grammar of its text, if it has one."""
        if self.format is None or self.format.type == "text":
            return None
        if self.format.grammar is not None or self.format.syntax is None:
            return self.format.grammar
        return TextGrammar(self.format.syntax, self.format.definition or "")


def custom_tools(tools: list[Fields] | None) -> dict[str, CustomTool]:
    """The custom tools among `tools`, by name. Raises InvalidRequest."""
    found: dict[str, CustomTool] = {}
    for i, tool in enumerate(tools or ()):
        if tool.get("type") != "custom":
            continue
        path = f"tools[{i}].custom"
        try:
            one = convert(tool.get("custom"), CustomTool, {})
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error.message}", param=path) from None
        if one.format is not None and one.format.type == "grammar" and one.grammar is None:
            raise InvalidRequest(f"{path}.format.grammar is missing", param=f"{path}.format.grammar")
        found[one.name] = one
    return found


def grammars_of(tools: Mapping[str, CustomTool]) -> dict[str, TextGrammar]:
    """The grammars of tools that have one, by the tools' names."""
    return {name: tool.grammar for name, tool in tools.items() if tool.grammar is not None}


def with_functions(body: ChatBody, tools: Mapping[str, CustomTool]) -> ChatBody:
    """The request with functions in place of its custom tools."""
    if not tools:
        return body
    given: list[Fields] = body.tools or []
    functions = [
        _function(tools[tool["custom"]["name"]]) if tool.get("type") == "custom" else tool for tool in given
    ]
    return structs.replace(body, tools=functions, tool_choice=_choice(body.tool_choice))


def _function(tool: CustomTool) -> Fields:
    text: Fields = {"type": "string"}
    if tool.grammar is not None:
        text["description"] = f"must follow this grammar:\n{tool.grammar.definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function: Fields = {"name": tool.name, "parameters": parameters}
    return {
        "type": "function",
        "function": function | ({"description": tool.description} if tool.description else {}),
    }


def _choice(choice: str | Fields | None) -> str | Fields | None:
    """tool_choice with functions in place of custom tools."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "custom":
        return {"type": "function", "function": choice.get("custom")}
    allowed = choice.get("allowed_tools")
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        tools = [_choice(tool) for tool in allowed["tools"]]
        return choice | {"allowed_tools": allowed | {"tools": tools}}
    return choice


def arguments_of(text: str) -> str:
    """The text of a custom tool call as arguments of a function."""
    return msgspec.json.encode({INPUT: text}).decode()


def input_of(arguments: str) -> str:
    """The text in the arguments of a custom tool call; the arguments themselves where they are cut off or
    something else."""
    try:
        text = msgspec.json.decode(arguments, type=Fields).get(INPUT)
    except msgspec.DecodeError:
        return arguments
    return text if isinstance(text, str) else arguments


def as_custom(call: Fields) -> Fields:
    """A call of a function as one of the custom tool that it stands for."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {"id": call["id"], "type": "custom", "custom": {"name": name, "input": input_of(arguments)}}
