"""A request of Anthropic's API as a chat request. Errors name the client's own fields."""

from collections.abc import Sequence

import msgspec

from runtime.errors import InvalidRequest, ThreadsNotServed
from runtime.http.anthropic.message_request import (
    REFUSED,
    Adaptive,
    AnyChoice,
    Base64Source,
    Block,
    ClearThinking,
    CountBody,
    DocumentBlock,
    Enabled,
    ImageBlock,
    MessagesBody,
    NoChoice,
    SearchBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    Turns,
    UrlSource,
)
from runtime.http.openai.completion_request import ChatBody, Function, Message, Part, SourcePart, ToolCall
from runtime.json_value import Fields
from runtime.messages.media import MediaKind, MediaSource

# fields that both APIs have
SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "priority",
    "cache_salt",
)
# our names of other fields -> the client's, for error texts
NAMES = {
    "stop": "stop_sequences",
    "max_new_tokens": "max_tokens",
    "response_format": "output_config.format",
    "prompt": "messages",
    "input_ids": "messages",
}
SEPARATOR = "\n"  # between the texts of a message, as in chat completions
ERROR = "Error: "  # templates cannot mark failed calls


def chat_body(body: CountBody) -> ChatBody:
    """The chat request of a Messages request. Raises InvalidRequest."""
    for name in REFUSED:
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not served here; leave it out", param=name)
    if body.thread:
        raise ThreadsNotServed("thread is not served here; send the whole conversation", param="thread")
    fields: Fields = {name: value for name in SAME if (value := getattr(body, name, None)) is not None}
    fields["messages"] = messages_of(body)
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = [tool_of(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    fields |= _choice(body)
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    form = (body.output_config.format if body.output_config is not None else None) or body.output_format
    if form is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.schema},
        }
    fields["chat_template_kwargs"] = _thinking(body) | (body.chat_template_kwargs or {})
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    return ChatBody(**fields)


def _choice(body: CountBody) -> Fields:
    match choice := body.tool_choice:
        case None:
            return {}
        case NoChoice():
            return {"tool_choice": "none"}
        case ToolChoice(name=name):
            tool_choice: object = {"type": "function", "function": {"name": name}}
        case _:
            tool_choice = "required" if isinstance(choice, AnyChoice) else "auto"
    return {"tool_choice": tool_choice} | (
        {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    )


def _thinking(body: CountBody) -> Fields:
    """Template variables that turn reasoning on or off; a request without `thinking` turns it off where the
    template can."""
    thinking = body.thinking
    if isinstance(thinking, Adaptive):
        return {}
    is_on = isinstance(thinking, Enabled)
    args: Fields = {"enable_thinking": is_on, "thinking": is_on}
    if isinstance(thinking, Enabled):
        if isinstance(body, MessagesBody) and thinking.budget_tokens >= body.max_tokens:
            raise InvalidRequest(
                "thinking.budget_tokens must be below max_tokens", param="thinking.budget_tokens"
            )
        args["thinking_budget"] = thinking.budget_tokens
    return args


def tool_of(tool: Tool, path: str) -> Fields:
    """A tool as a function of a chat request. Raises InvalidRequest."""
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{path}: tools of type {tool.type} do not run here; give tools of your own, with input_schema",
            param=f"{path}.type",
        )
    if tool.input_schema is None:
        raise InvalidRequest(f"{path}.input_schema is missing", param=f"{path}.input_schema")
    function: Fields = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def messages_of(body: CountBody) -> list[Message]:
    """The chat messages of a request. Raises InvalidRequest."""
    messages = []
    if body.system:
        text = (
            body.system
            if isinstance(body.system, str)
            else SEPARATOR.join([block.text for block in body.system])
        )
        messages.append(Message(role="system", content=text))
    for i, turn in enumerate(body.messages):
        path = f"messages[{i}].content"
        if isinstance(turn.content, str):
            messages.append(Message(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            messages.append(_assistant(turn.content, path))
            if i == len(body.messages) - 1 and messages[-1].tool_calls:
                raise InvalidRequest(f"{path} ends with a tool_use; its tool_result must follow", param=path)
        else:
            messages += _user(turn, turn.content, path)
    _clear_reasoning(body, messages)
    return messages


def _clear_reasoning(body: CountBody, messages: list[Message]) -> None:
    """Removes the reasoning of earlier answers that context_management clears."""
    for edit in body.context_management.edits if body.context_management is not None else ():
        if isinstance(edit, ClearThinking) and isinstance(edit.keep, Turns):
            for message in [message for message in messages if message.reasoning_content][: -edit.keep.value]:
                message.reasoning_content = None


def _assistant(blocks: Sequence[Block], path: str) -> Message:
    texts, reasoning, calls = [], [], []
    for i, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=text):
                reasoning.append(text)
            case ToolUseBlock(id=call_id, name=name, input=value):
                calls.append(ToolCall(Function(name, msgspec.json.encode(value).decode()), call_id))
            case _:
                _refuse(block, "an answer", f"{path}[{i}]")
    return Message(
        role="assistant",
        content=SEPARATOR.join(texts),
        reasoning_content=SEPARATOR.join(reasoning) or None,
        tool_calls=calls or None,
    )


def _user(turn: Turn, blocks: Sequence[Block], path: str) -> list[Message]:
    """The messages of one turn: several, because tool results are messages of their own in templates."""
    messages: list[Message] = []
    parts: list[Part] = []

    def flush() -> None:
        if parts:
            messages.append(Message(role=turn.role, content=_content(parts)))
            parts.clear()

    for i, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                parts.append(Part("text", text))
            case ImageBlock():
                parts.append(_image(block, f"{path}[{i}]"))
            case ToolResultBlock():
                flush()
                messages.append(_result(block, f"{path}[{i}]"))
            case _:
                _refuse(block, f"a message of the {turn.role}", f"{path}[{i}]")
    flush()
    return messages


def _result(block: ToolResultBlock, path: str) -> Message:
    blocks = [TextBlock(block.content)] if isinstance(block.content, str) else block.content or []
    parts: list[Part] = []
    for i, one in enumerate(blocks):
        match one:
            case TextBlock(text=text):
                parts.append(Part("text", text))
            case ImageBlock():
                parts.append(_image(one, f"{path}.content[{i}]"))
            case _:
                _refuse(one, "a tool_result", f"{path}.content[{i}]")
    content = _content(parts)
    if block.is_error:
        content = ERROR + content if isinstance(content, str) else [Part("text", ERROR), *content]
    return Message(role="tool", content=content, tool_call_id=block.tool_use_id)


def _content(parts: Sequence[Part]) -> str | list[Part]:
    """One text, where all parts are texts."""
    if any(isinstance(part, SourcePart) for part in parts):
        return list(parts)
    return SEPARATOR.join([part.text or "" for part in parts])


def _image(block: ImageBlock, path: str) -> SourcePart:
    match block.source:
        case Base64Source(data=data):
            source = MediaSource(kind=MediaKind.IMAGE, param=f"{path}.source.data", base64=data)
        case UrlSource(url=url):
            source = MediaSource(kind=MediaKind.IMAGE, param=f"{path}.source.url", url=url)
        case _:
            raise InvalidRequest(
                f"{path}.source: files of Anthropic are not kept here; send base64 or a URL",
                param=f"{path}.source.file_id",
            )
    return SourcePart("image", source=source)


def _refuse(block: Block, where: str, path: str) -> None:
    kind = type(block).__struct_config__.tag
    if isinstance(block, (DocumentBlock, SearchBlock)):
        raise InvalidRequest(
            f"{path}: blocks of type {kind} are not served by this version yet; texts and images are",
            param=f"{path}.type",
        )
    if kind != "redacted_thinking":
        raise InvalidRequest(
            f"{path}: a block of type {kind} does not belong to {where}", param=f"{path}.type"
        )
