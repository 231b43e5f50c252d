"""Chat templates: from a conversation to the text that the model was trained on.

Templates are Jinja as transformers' apply_chat_template extends it. They come with the model, so they run in
a sandbox (jinja_sandbox.py) with time and output bounded.
"""

import json
from collections.abc import Iterator, Mapping

from jinja2 import TemplateError, nodes

from runtime.errors import InvalidRequest, ModelError
from runtime.json_value import Fields, JsonValue
from runtime.messages.requests import Chat
from runtime.text.jinja_sandbox import TURN, Sandbox, Turns

MAX_SOURCE = 1 << 18  # characters of a template; the longest known have 30,000
MAX_CHARS = 16 * 1024 * 1024
RESERVED = frozenset({"messages", "tools", "chat_template", "continue_final_message", "tokenize", TURN})
# names of one field; templates read the first, some the second
REASONING = ("reasoning_content", "thinking", "reasoning")
NO_MARKS: Mapping[str, str] = {}
CUT = "\ue000cut here\ue001 "  # private-use characters: no message or template says this


class ChatTemplates:
    """The compiled templates of a model, by name. Thread-safe: rendering changes nothing."""

    def __init__(
        self,
        sources: dict[str, str],
        special_tokens: dict[str, str],
        stops: tuple[str, ...] = (),
        marks: Mapping[str, str] = NO_MARKS,
    ) -> None:
        """`stops`: texts that end an answer; `marks`: texts for images, videos and sounds, by the type of a
        part, where a template takes a string, or knows other types of these. Raises ModelError for a template
        that is not Jinja."""
        environment = Sandbox()
        self.stops, self._marks = stops, marks
        self._special_tokens = special_tokens
        self.source = sources.get("default")  # of the template for ordinary chats; None: there is none
        self._templates = {}
        self._reads_parts = {}
        self._unknown: dict[str, Mapping[str, str]] = {}  # `marks` of types that a template has no word for
        for name, source in sources.items():
            if len(source) > MAX_SOURCE:
                raise ModelError(
                    f"the chat template {name!r} of the model is longer than {MAX_SOURCE} characters"
                )
            try:
                self._templates[name] = environment.from_string(source)
                self._reads_parts[name] = _reads_parts(environment.parse(source))
                unknown = {kind: mark for kind, mark in marks.items() if kind not in source}
                self._unknown[name] = unknown if len(unknown) < len(marks) else {}
            except RecursionError:
                raise ModelError(
                    f"the chat template {name!r} of the model is nested too deeply; mend it or remove it"
                ) from None
            except (
                TemplateError,
                ArithmeticError,
                ValueError,
                TypeError,
            ) as error:  # of a constant expression
                raise ModelError(
                    f"the chat template {name!r} of the model is not valid: {error}; mend it or remove it"
                ) from None

    def render(self, chat: Chat) -> str:
        """The prompt's text. Raises InvalidRequest where the model has no template, the template refuses the
        conversation, or rendering takes too long or makes too much."""
        name = self._choose(chat)
        if reserved := RESERVED & chat.template_args.keys():
            raise InvalidRequest(
                f"chat_template_kwargs can't set {min(reserved)}", param="chat_template_kwargs"
            )
        reads_parts = self._reads_parts[name]
        marks = self._unknown[name] if reads_parts else self._marks
        messages = [_plain_message(message, reads_parts, marks) for message in chat.messages]
        variables: Fields = {
            TURN: Turns(),
            "add_generation_prompt": not chat.continue_final,
            "documents": None,
        }
        variables |= {**self._special_tokens, **chat.template_args}
        final = None
        if chat.continue_final:
            if variables["add_generation_prompt"]:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other; set only one",
                    param="add_generation_prompt",
                )
            final = _mark_final(messages)
        try:
            text = _join(
                self._templates[name].generate({"messages": messages, "tools": chat.tools} | variables)
            )
        except InvalidRequest:
            raise
        except RecursionError:
            raise InvalidRequest(
                "the conversation is nested too deeply for the chat template", param="messages"
            ) from None
        except Exception as error:  # a template is a program: whatever it raises is about this conversation
            raise InvalidRequest(
                f"the chat template can't render this conversation: {error}", param="messages"
            ) from None
        return text if final is None else _cut(text, final)

    def _choose(self, chat: Chat) -> str:
        if chat.tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" not in self._templates:
            raise InvalidRequest(
                "the model has no chat template, so it can't take messages; send a prompt to "
                "/v1/completions, "
                "or add chat_template.jinja to the model's folder",
                param="messages",
            )
        return "default"


def _join(parts: Iterator[str]) -> str:
    kept: list[str] = []
    room = MAX_CHARS
    for part in parts:
        room -= len(part)
        if room < 0:
            raise InvalidRequest(
                f"the rendered conversation is longer than {MAX_CHARS} characters", param="messages"
            )
        kept.append(part)
    return "".join(kept)


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether a template loops over the parts of a message's content, or only takes the content as a
    string."""

    def is_content(node: nodes.Node) -> bool:
        return (
            (isinstance(node, nodes.Getattr) and node.attr == "content")
            or (
                isinstance(node, nodes.Getitem)
                and isinstance(node.arg, nodes.Const)
                and node.arg.value == "content"
            )
            or (isinstance(node, nodes.Name) and "content" in node.name)
        )

    return any(
        is_content(node)
        for loop in tree.find_all(nodes.For)
        for node in (loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem, nodes.Name)))
    )


def _plain_message(message: Fields, reads_parts: bool, marks: Mapping[str, str]) -> Fields:
    """A message as templates expect it: parts joined for templates that take strings, and for others those
    that have `marks` as texts; arguments as objects, reasoning under each of its names."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [_text_of(part, marks) for part in content]
        if not reads_parts and None not in texts:
            message["content"] = "\n".join([text for text in texts if text is not None])
        else:
            message["content"] = [_part(part, marks) for part in content]
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_plain_call(call) for call in calls]
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
    return message


def _part(part: JsonValue, marks: Mapping[str, str]) -> JsonValue:
    """A part as templates that read parts take it: a copy, or a text for a type that has a mark."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    mark = marks.get(kind) if isinstance(kind, str) else None
    return dict(part) if mark is None else {"type": "text", "text": mark}


def _text_of(part: JsonValue, marks: Mapping[str, str]) -> str | None:
    """A part as a text; None: there is no text for it."""
    if not isinstance(part, dict):
        return None
    if isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type")
    return marks.get(kind) if isinstance(kind, str) else None


def _plain_call(call: JsonValue) -> JsonValue:
    """OpenAI's API has `arguments` as a JSON string, templates expect an object. Anything but a JSON object
    stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    written = function.get("arguments")
    if not isinstance(written, str):
        return call
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _mark_final(messages: list[Fields]) -> str:
    """Puts CUT behind the final message's text. -> that text"""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + CUT
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + CUT
            return text
    raise InvalidRequest("continue_final_message needs a final message with text content", param="messages")


def _cut(text: str, final: str) -> str:
    """Ends the rendered text where the final message ends. The space at the end of CUT shows whether the
    template trims messages."""
    at = text.rfind(CUT.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequest(
            "the chat template leaves out the final message, so it can't be continued", param="messages"
        )
    return text[:at] if text.startswith(CUT, at) else text[:at].rstrip()
