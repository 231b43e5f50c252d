"""Tools of /v1/responses. The model sees each as a function; calls of functions become items again.

{"type": "function", "name": "f"}                                       f
{"type": "namespace", "name": "ns", "tools": [a function f]}            ns__f
{"type": "custom", "name": "patch"}: takes a text, not an object        patch, with one parameter, `input`
{"type": "web_search"} and others that run in OpenAI's servers          left out, so never called
"""

from collections.abc import Iterator

from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.json_value import Fields

# prefixes of the types of tools that run in OpenAI's servers; clients send them by default
SERVER_TOOLS = (
    "web_search",
    "file_search",
    "image_generation",
    "code_interpreter",
    "computer",
    "mcp",
    "tool_search",
)


class Tool(Struct, frozen=True):
    """A tool as the client names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def served(tools: list[Fields] | None) -> list[Fields]:
    """The tools without those that run in OpenAI's servers."""
    return [tool for tool in tools or () if not _runs_on_server(tool)]


def check(tools: list[Fields] | None) -> None:
    """Raises InvalidRequest, naming the field."""
    for i, tool in enumerate(tools or ()):
        _check(tool, f"tools[{i}]")


def chat_tools(tools: list[Fields] | None) -> list[Fields]:
    """The tools as functions and custom tools of a chat request."""
    return [_chat_tool(tool, model_name(tool["name"], namespace)) for namespace, tool in _flat(tools)]


def by_model_name(tools: list[Fields] | None) -> dict[str, Tool]:
    """The tools by the names that the model uses."""
    return {
        model_name(tool["name"], namespace): Tool(tool["name"], namespace, tool["type"] == "custom")
        for namespace, tool in _flat(tools)
    }


def model_name(name: str, namespace: object = None) -> str:
    """The name of a tool for the model."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.rstrip('_')}__{name}"


def _runs_on_server(tool: Fields) -> bool:
    return str(tool.get("type")).startswith(SERVER_TOOLS)


def _check(tool: Fields, path: str, *, is_inner: bool = False) -> None:
    kind = tool.get("type")
    if _runs_on_server(tool):
        return
    if kind not in ("function", "custom") and (is_inner or kind != "namespace"):
        raise InvalidRequest(
            f"{path}: tools of type {kind} are not served here; use functions", param=f"{path}.type"
        )
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{path}.name is missing", param=f"{path}.name")
    if kind == "namespace":
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise InvalidRequest(f"{path}.tools must be a list of tools", param=f"{path}.tools")
        for i, one in enumerate(inner):
            _check(one, f"{path}.tools[{i}]", is_inner=True)


def _flat(tools: list[Fields] | None) -> Iterator[tuple[str | None, Fields]]:
    """Each tool with its namespace."""
    for tool in served(tools):
        if tool["type"] == "namespace":
            yield from [(tool["name"], one) for one in served(tool["tools"])]
        else:
            yield None, tool


def _chat_tool(tool: Fields, name: str) -> Fields:
    """The tool as /v1/chat/completions has it, by the name that the model uses."""
    kind = tool["type"]
    fields = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": kind, kind: fields | {"name": name}}
