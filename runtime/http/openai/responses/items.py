"""Items, of which the input and the output of /v1/responses consist, and the chat messages that they are to a
template."""

from typing import Any

from runtime.errors import InvalidRequest
from runtime.http.openai.completion_request import Function, Message, Part, ToolCall
from runtime.http.openai.files import new_id
from runtime.http.openai.responses.tools import arguments_of, shown

Item = dict[str, Any]
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")


def items_of(given: str | list[Item]) -> list[Item]:
    """The input with everything said that may be left out. Raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{i}]") for i, item in enumerate(given)]


def _item(item: Item, place: str) -> Item:
    kind = item.get("type", "message")
    if kind not in PREFIXES:
        raise InvalidRequest(
            f"{place}: items of type {kind} are not served here; {', '.join(PREFIXES)} are",
            param=f"{place}.type",
        )
    item = (
        {"id": new_id(PREFIXES[kind])}
        | {key: value for key, value in item.items() if value is not None}
        | {"type": kind}
    )
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": item["content"]}]
    return item


def messages_of(instructions: str | None, items: list[Item]) -> list[Message]:
    """What the assistant thought, said and called between two words of others is one message. Raises
    InvalidRequest."""
    messages = [] if instructions is None else [Message(role="system", content=instructions)]
    for i, item in enumerate(items):
        place = f"input[{i}]"
        match item["type"]:
            case "message" if item.get("role") == "assistant":
                mine = _assistant(messages)
                mine.content = (mine.content or "") + _text(item.get("content"), f"{place}.content")  # type: ignore[operator]
            case "message":
                messages.append(_other(item, place))
            case "reasoning":
                mine = _assistant(messages)
                mine.reasoning_content = (mine.reasoning_content or "") + _text(
                    item.get("content") or [], f"{place}.content"
                )
            case "function_call" | "custom_tool_call" as kind:
                mine = _assistant(messages)
                name = shown(_string(item, "name", place), item.get("namespace"))
                is_custom = kind == "custom_tool_call"
                arguments = (
                    arguments_of(_string(item, "input", place))
                    if is_custom
                    else _string(item, "arguments", place)
                )
                function = Function(name, arguments)
                mine.tool_calls = [
                    *(mine.tool_calls or ()),
                    ToolCall(function, _string(item, "call_id", place)),
                ]
            case "function_call_output" | "custom_tool_call_output":
                messages.append(
                    Message(
                        role="tool",
                        tool_call_id=_string(item, "call_id", place),
                        content=_text(item.get("output"), f"{place}.output"),
                    )
                )
    return messages


def _assistant(messages: list[Message]) -> Message:
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    return messages[-1]


def _other(item: Item, place: str) -> Message:
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise InvalidRequest(
            f"{place}.role must be user, assistant, system or developer", param=f"{place}.role"
        )
    return Message(
        role=role, content=[Part("text", _text([part], f"{place}.content")) for part in _parts(item, place)]
    )


def _parts(item: Item, place: str) -> list[Any]:
    content = item.get("content")
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{place}.content is missing", param=f"{place}.content")
    return content


def _text(parts: Any, place: str) -> str:
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise InvalidRequest(f"{place} must be a text, or a list of parts", param=place)
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS:
            raise InvalidRequest(f"{place}: parts of type {kind} are not served here; texts are", param=place)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{place}: a part of type {kind} has no text", param=place)
        texts.append(text)
    return "".join(texts)


def _string(item: Item, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{place}.{name} is missing, or no string", param=f"{place}.{name}")
    return value
