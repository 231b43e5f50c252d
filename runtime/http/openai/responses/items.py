"""Items of the input and output of /v1/responses, and the chat messages that stand for them in a chat
template."""

import base64

from runtime.errors import InvalidRequest
from runtime.http.openai.completion_request import Function, Message, Part, SourcePart, ToolCall
from runtime.http.openai.custom_tools import arguments_of
from runtime.http.openai.files import new_id
from runtime.http.openai.responses.tools import model_name
from runtime.json_value import Fields
from runtime.messages.media import MediaKind, MediaSource

Item = Fields
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
SUMMARY = "summary."  # what stands before the base64 of a summary in a compaction item of this server
# parts with an image -> the fields that may have it
FILES = {"input_image": ("image_url",), "input_file": ("file_data", "file_url")}
TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")


def items_of(value: str | list[Item], field: str = "input") -> list[Item]:
    """The value of a field as a list of complete items. Raises InvalidRequest."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_item(item, f"{field}[{i}]") for i, item in enumerate(value)]


def _item(item: Item, path: str) -> Item:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in PREFIXES:
        raise InvalidRequest(
            f"{path}: items of type {kind} are not served here; {', '.join(PREFIXES)} are",
            param=f"{path}.type",
        )
    if not isinstance(item.get("id", ""), str | None):
        raise InvalidRequest(f"{path}.id must be a text; leave it out", param=f"{path}.id")
    item = (
        {"id": new_id(PREFIXES[kind])}
        | {key: value for key, value in item.items() if value is not None}
        | {"type": kind}
    )
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": item["content"]}]
    return item


def messages_of(instructions: str | None, items: list[Item], field: str = "input") -> list[Message]:
    """The chat messages of a list of items, which `field` names: consecutive reasoning, text and calls of the
    assistant become one message. Raises InvalidRequest."""
    messages = [] if instructions is None else [Message(role="system", content=instructions)]
    for i, item in enumerate(items):
        path = f"{field}[{i}]"
        match item["type"]:
            case "message" if item.get("role") == "assistant":
                message = _assistant(messages)
                text = _text(item.get("content"), f"{path}.content")
                message.content = (message.content or "") + text  # type: ignore[operator]
            case "message":
                messages.append(_other(item, path))
            case "reasoning":
                message = _assistant(messages)
                message.reasoning_content = (message.reasoning_content or "") + _text(
                    item.get("content") or [], f"{path}.content"
                )
            case "compaction":
                message = _assistant(messages)
                summary = f"Summary of the conversation so far:\n{_summary_of(item, path)}"
                message.content = f"{message.content or ''}{summary}"
            case "function_call" | "custom_tool_call" as kind:
                message = _assistant(messages)
                name = model_name(_string(item, "name", path), item.get("namespace"))
                is_custom = kind == "custom_tool_call"
                arguments = (
                    arguments_of(_string(item, "input", path))
                    if is_custom
                    else _string(item, "arguments", path)
                )
                function = Function(name, arguments)
                message.tool_calls = [
                    *(message.tool_calls or ()),
                    ToolCall(function, _string(item, "call_id", path)),
                ]
            case "function_call_output" | "custom_tool_call_output":
                messages.append(
                    Message(
                        role="tool",
                        tool_call_id=_string(item, "call_id", path),
                        content=_output(item.get("output"), f"{path}.output"),
                    )
                )
    return messages


def _summary_of(item: Item, path: str) -> str:
    """The text of a compaction item, which responses/compact.py has written."""
    content = _string(item, "encrypted_content", path)
    try:
        if not content.startswith(SUMMARY):
            raise ValueError
        return base64.b64decode(content.removeprefix(SUMMARY), validate=True).decode()
    except ValueError:
        raise InvalidRequest(
            f"{path}.encrypted_content is not of this server's /v1/responses/compact; send the items "
            "themselves",
            param=f"{path}.encrypted_content",
        ) from None


def _assistant(messages: list[Message]) -> Message:
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    return messages[-1]


def _other(item: Item, path: str) -> Message:
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise InvalidRequest(
            f"{path}.role must be user, assistant, system or developer", param=f"{path}.role"
        )
    parts = _parts(item, path)
    return Message(role=role, content=[_part(one, f"{path}.content", i) for i, one in enumerate(parts)])


def _output(parts: object, path: str) -> str | list[Part]:
    """What a function returned: a text; with images among its parts, the parts."""
    if isinstance(parts, list) and any(_has_file(part) for part in parts):
        return [_part(part, path, i) for i, part in enumerate(parts)]
    return _text(parts, path)


def _has_file(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in FILES


def _part(part: object, path: str, i: int) -> Part:
    """Part `i` of the content `path`: a text or an image."""
    if not isinstance(part, dict) or not _has_file(part):
        return Part("text", _text([part], path))
    path = f"{path}[{i}]"
    for name in FILES[part["type"]]:
        if isinstance(text := part.get(name), str):
            field = f"{path}.{name}"
            # file_data is a data URL, or plain base64
            is_url = name != "file_data" or text.startswith("data:")
            url, base64 = (text, "") if is_url else ("", text)
            source = MediaSource(kind=MediaKind.IMAGE, param=field, url=url, base64=base64)
            return SourcePart("image", source=source)
    if part.get("file_id") is not None:
        raise InvalidRequest(
            f"{path}: files that were uploaded are not read as images by this version yet; send "
            f"{FILES[part['type']][0]}",
            param=f"{path}.file_id",
        )
    raise InvalidRequest(
        f"{path}: a part of type {part['type']} needs {' or '.join(FILES[part['type']])}", param=path
    )


def _parts(item: Item, path: str) -> list[object]:
    content = item.get("content")
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
    return content


def _text(parts: object, path: str) -> str:
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise InvalidRequest(f"{path} must be a text, or a list of parts", param=path)
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS:
            raise InvalidRequest(
                f"{path}: parts of type {kind} are not served here; texts and images are", param=path
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}: a part of type {kind} has no text", param=path)
        texts.append(text)
    return "".join(texts)


def _string(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} is missing, or no string", param=f"{path}.{name}")
    return value
