"""From the messages of a chat request to the messages of chat templates."""

from collections.abc import Iterable

import msgspec

from runtime.errors import InvalidRequest
from runtime.http.fields.media import MediaParts
from runtime.http.openai.completion_request import (
    ChatBody,
    Function,
    InputAudio,
    MediaUrl,
    Message,
    Part,
    Reasoning,
    SourcePart,
    ToolCall,
)
from runtime.http.openai.custom_tools import arguments_of
from runtime.json_value import Fields
from runtime.messages.media import MediaKind, MediaSource
from runtime.messages.requests import Chat

# variables by which templates turn reasoning on: Qwen3, GLM and others; DeepSeek and Kimi
THINKING_FLAGS = ("enable_thinking", "thinking")
# variables of the rendering itself, which clients cannot set
RESERVED = frozenset(
    {"messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"}
)


def chat_prompt(body: ChatBody, media: MediaParts) -> Chat:
    """The prompt of a chat request; its images, videos and sounds are added to `media`. Raises
    InvalidRequest, naming the field."""
    return Chat(
        messages=[_message(message, f"messages[{i}]", media) for i, message in enumerate(body.messages)],
        tools=None if body.tool_choice == "none" else body.tools or None,
        template_args=_template_args(body),
        continue_final=_continues(body),
    )


def with_video_sounds(body: ChatBody) -> bool:
    """Whether the model is given the sounds of videos, too."""
    args = body.mm_processor_kwargs
    return bool(body.use_audio_in_video or (args is not None and args.use_audio_in_video))


def _continues(body: ChatBody) -> bool:
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message goes on with the last message and add_generation_prompt begins another; "
            "choose one",
            param="continue_final_message",
        )
    if body.messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of role assistant", param="continue_final_message"
        )
    return True


def _template_args(body: ChatBody) -> Fields:
    args: Fields = dict(body.chat_template_kwargs or {})
    for name in sorted(RESERVED.intersection(args)):
        raise InvalidRequest(f"{name} cannot be set for the template", param=f"chat_template_kwargs.{name}")
    reasoning_options = body.reasoning or Reasoning()
    effort = body.reasoning_effort if reasoning_options.effort is None else reasoning_options.effort
    if effort is not None:
        args.setdefault("reasoning_effort", effort)
    is_thinking = effort != "none" if effort is not None else reasoning_options.enabled
    if body.enable_thinking is not None:
        is_thinking = body.enable_thinking
    if is_thinking is not None and args.keys().isdisjoint(THINKING_FLAGS):
        args.update(dict.fromkeys(THINKING_FLAGS, is_thinking))
    if body.documents is not None:
        args.setdefault("documents", body.documents)
    if body.add_generation_prompt is False:
        args["add_generation_prompt"] = False
    return args


def _message(message: Message, path: str, media: MediaParts) -> Fields:
    role = "system" if message.role == "developer" else message.role  # templates have the older name
    result: Fields = {"role": role, "content": _content(message, path, media)}
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", reasoning),
    ):
        if value is not None:
            result[name] = value
    if message.tool_calls:
        if role != "assistant":
            raise InvalidRequest(
                f"{path}.tool_calls belongs to the role assistant", param=f"{path}.tool_calls"
            )
        result["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return result


def _content(message: Message, path: str, media: MediaParts) -> str | list[Fields]:
    """A text; or, where there are images, videos or sounds, parts as chat templates have them."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":  # a message of tool calls only
            return ""
        raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
    parts: list[Fields] = []
    for i, part in enumerate(message.content):
        place = f"{path}.content[{i}]"
        source = _source(part, place)
        parts.append(media.add(source) if source else {"type": "text", "text": _text(part, place, _KINDS)})
    if all(part["type"] == "text" for part in parts):
        return "\n".join([part["text"] for part in parts])
    return parts


# type of a part -> what it holds; its field has the same name
_KINDS = {
    "image_url": MediaKind.IMAGE,
    "video_url": MediaKind.VIDEO,
    "audio_url": MediaKind.AUDIO,
    "input_audio": MediaKind.AUDIO,
}


def _source(part: Part, path: str) -> MediaSource | None:
    """The image, video or sound of a part; None: it has none."""
    if isinstance(part, SourcePart):
        return part.source
    if (kind := _KINDS.get(part.type)) is None:
        return None
    match getattr(part, part.type):
        case str() as url:
            return MediaSource(kind=kind, param=f"{path}.{part.type}", url=url)
        case MediaUrl(url=url):
            return MediaSource(kind=kind, param=f"{path}.{part.type}.url", url=url)
        case InputAudio(data=data):
            return MediaSource(kind=kind, param=f"{path}.{part.type}.data", base64=data)
    raise InvalidRequest(f"{path}.{part.type} is missing", param=f"{path}.{part.type}")


def predicted_text(body: ChatBody) -> str:
    """What the client expects the answer to be like; "": it says nothing. Raises InvalidRequest."""
    if body.prediction is None:
        return ""
    content, path = body.prediction.content, "prediction.content"
    if isinstance(content, str):
        return content
    return "".join([_text(part, f"{path}[{i}]") for i, part in enumerate(content)])


def _text(part: Part, path: str, where: Iterable[str] = ()) -> str:
    """The text of a part. `where`: other types that this place takes, for the error."""
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type != "text":
        raise InvalidRequest(
            f"{path}: parts of type {part.type} are not served here; send {', '.join(('text', *where))}",
            param=f"{path}.type",
        )
    if part.text is None:
        raise InvalidRequest(f"{path}.text is missing", param=f"{path}.text")
    return part.text


def _tool_call(call: ToolCall, path: str) -> Fields:
    """Clients send arguments as JSON text, or as an object; templates expect an object, which they write in
    the model's own format."""
    function = call.function
    if call.custom is not None:
        function = Function(call.custom.name, arguments_of(call.custom.input))
    if function is None:
        raise InvalidRequest(f"{path}.function is missing", param=f"{path}.function")
    path += ".function.arguments"
    arguments: object = function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{path} is not JSON: {error}", param=path) from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path} is not a JSON object", param=path)
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}
