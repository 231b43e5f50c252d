"""Conversation templates in JSON, as SGLang's --chat-template takes them: the texts around messages, and the
style in which they are put together. Each becomes a Jinja template.

    {"name": "mine", "system": "<|system|>", "system_message": "", "user": "<|user|>",
     "assistant": "<|assistant|>", "sep_style": "NO_COLON_SINGLE", "sep": "<|end|>", "stop_str": ["<|end|>"]}

The system prompt is `system`, a line break, and the conversation's system message or else `system_message`.
A prompt begins with what the tokenizer puts before any text: a BOS token, mostly.
"""

import msgspec
from msgspec import Struct

from runtime.errors import OptionsError

# parts of styles, as Jinja expressions; `prompt` is the system prompt, `message` the system message, `at`
# counts the messages from 0
_JOINED = "prompt + sep"
_IF_PROMPT = "prompt + sep if prompt else ''"
_ALONE = "prompt"
_IF_MESSAGE = "prompt if message else ''"
_LAST = "(sep if at % 2 == 0 else sep2)"


class Style(Struct, frozen=True):
    """How a prompt is put together: Jinja expressions of the system part, of what stands before the text of a
    message, of the text and what stands behind it, and of what opens an answer."""

    system: str
    before: str
    text: str
    opening: str


def _llama(name: str, end: str) -> Style:
    header = f"'<|{name}|>' + role + '<|{name.replace('start', 'end')}|>\\n\\n'"
    return Style(_IF_MESSAGE, header, f"text.strip() + '<|{end}|>'", header)


_NEW_LINES = Style(_IF_PROMPT, "role + '\\n'", "text + sep", "role + '\\n'")
STYLES = {
    "ADD_COLON_SINGLE": Style(_JOINED, "role + ': '", "text + sep", "role + ':'"),
    "ADD_COLON_TWO": Style(_JOINED, "role + ': '", f"text + {_LAST}", "role + ':'"),
    "ADD_COLON_SPACE_SINGLE": Style(_JOINED, "role + ': '", "text + sep", "role + ': '"),
    "NO_COLON_SINGLE": Style(_ALONE, "role", "text + sep", "role"),
    "NO_COLON_TWO": Style(_ALONE, "role", f"text + {_LAST}", "role"),
    "ADD_NEW_LINE_SINGLE": _NEW_LINES,
    "QWEN2_VL_EMBED": Style(_IF_PROMPT, "role + '\\n'", "text + sep", "role + '\\n' + stop"),
    "QWEN2_AUDIO": _NEW_LINES,
    "LLAMA2": Style(
        "prompt if message else '[INST] '",
        "'' if at == 0 else tag + ' '",
        f"text + (' ' if at == 0 else {_LAST})",
        "tag",
    ),
    "LLAMA3": _llama("start_header_id", "eot_id"),
    "LLAMA4": _llama("header_start", "eot"),
    "CHATGLM": Style(_IF_PROMPT, "round + role + '：'", "text + sep", "round + role + '：'"),
    "CHATML": Style(
        "prompt + sep + '\\n' if prompt else ''", "role + '\\n'", "text + sep + '\\n'", "role + '\\n'"
    ),
    "CHATINTERN": Style(
        _ALONE,
        "('<s>' if at % 2 == 0 else '') + role + ':'",
        f"text + {_LAST} + '\\n'",
        "('<s>' if at % 2 == 0 else '') + role + ':'",
    ),
    "DOLLY": Style(
        _ALONE, "role + ':\\n'", f"text + {_LAST} + ('\\n\\n' if at % 2 == 1 else '')", "role + ':\\n'"
    ),
    "RWKV": Style(
        _ALONE,
        "role + ': '",
        "text.replace('\\r\\n', '\\n').replace('\\n\\n', '\\n') + '\\n\\n'",
        "role + ':'",
    ),
    "PHOENIX": Style(_ALONE, "role + ': <s>'", "text + '</s>'", "role + ': <s>'"),
    "ROBIN": Style(_JOINED, "role + ':\\n'", "text + sep", "role + ':\\n'"),
    "FALCON_CHAT": Style("prompt + sep if message else ''", "role + ': '", "text + sep", "role + ':'"),
    "CHATGLM3": Style(_IF_MESSAGE, "role + '\\n'", "text", "role"),
    "DEEPSEEK_CHAT": Style(_ALONE, "role + ': '", f"text + {_LAST}", "role + ':'"),
    "METAMATH": Style(
        _IF_PROMPT,
        "role + (':\\n' if at % 2 == 0 else ': ' + sep2)",
        "text + (sep if at % 2 == 0 else '')",
        "role + (':\\n' if at % 2 == 0 else ': ' + sep2)",
    ),
    "DeepSeekVL2": Style(_IF_PROMPT, "role + ': '", f"text + {_LAST}", "role + ':'"),
    "GEMMA3": Style(_ALONE, "'' if at == 0 else role", "text + sep", "role"),
    "MPT": Style(_JOINED, "role", "text + sep", "role"),
}


class ConversationTemplate(Struct, kw_only=True):
    """A template's file. `roles` may stand in place of `user` and `assistant`; other fields are ignored."""

    sep_style: str
    name: str = ""
    system: str = ""
    system_message: str = ""
    user: str | None = None
    assistant: str | None = None
    roles: tuple[str, str] | None = None
    sep: str = "\n"
    sep2: str | None = None
    stop_str: str | list[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        texts = [self.stop_str] if isinstance(self.stop_str, str) else self.stop_str or []
        return tuple([text for text in texts if text])


class _Wrapped(Struct):
    """chat_template.json of a model's folder: Jinja within JSON."""

    chat_template: str


def read_conversation(path: str, text: str) -> tuple[str, tuple[str, ...]]:
    """The Jinja template in a file for --chat-template, whichever form it has, and the texts that end an
    answer. Jinja is returned as it is. Raises OptionsError for JSON that is no template."""
    is_json = path.endswith(".json")
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not is_json:
            return text, ()
        raise OptionsError([f"--chat-template {path} is not JSON: {error}"]) from None
    if not isinstance(value, dict):
        if not is_json:
            return text, ()
        raise OptionsError([f"--chat-template {path} must hold an object with sep_style, user, assistant"])
    try:
        if "chat_template" in value:
            return msgspec.convert(value, _Wrapped).chat_template, ()
        template = msgspec.convert(value, ConversationTemplate)
        return jinja_of(template), template.stops
    except (msgspec.ValidationError, ValueError) as error:
        raise OptionsError([f"--chat-template {path}: {error}"]) from None


def jinja_of(template: ConversationTemplate) -> str:
    """The Jinja template. Raises ValueError, naming the field, where something is missing."""
    style = STYLES.get(template.sep_style)
    if style is None:
        raise ValueError(f"sep_style {template.sep_style} is unknown; there are {', '.join(STYLES)}")
    user, assistant = template.roles or (template.user, template.assistant)
    if user is None or assistant is None:
        raise ValueError("user and assistant are missing: the texts before their messages")
    if template.sep2 is None and "sep2" in style.before + style.text:
        raise ValueError(f"sep_style {template.sep_style} needs sep2")
    texts: dict[str, str | int] = {
        "system": template.system + "\n",
        "default": template.system_message,
        "user": user,
        "assistant": assistant,
        "sep": template.sep,
        "sep2": template.sep2 or "",
        "stop": "".join(template.stops),
        "first": int(template.name == "chatglm2"),
    }
    constants = "\n".join([f"{{%- set {name} = {_literal(value)} %}}" for name, value in texts.items()])
    return constants + (
        _LOOP.replace("SYSTEM", style.system)
        .replace("BEFORE", style.before)
        .replace("TEXT", style.text)
        .replace("OPENING", style.opening)
    )


def _literal(value: str | int) -> str:
    """A constant in Jinja, which reads escapes as Python does; all but letters and digits are escaped."""
    if isinstance(value, int):
        return str(value)
    return "'" + "".join([c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in value]) + "'"


_LOOP = """
{%- set found = namespace(message=default, at=0) %}
{%- for turn in messages if turn['role'] == 'system' %}{% set found.message = turn['content'] %}{% endfor %}
{%- set message = found.message %}
{%- set prompt = system + message %}
{{- text_begin + (SYSTEM) }}
{%- for turn in messages if turn['role'] != 'system' %}
    {%- if turn['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('this template knows system, user and assistant; not ' + turn['role']) }}
    {%- endif %}
    {%- set at = loop.index0 %}
    {%- set role = user if turn['role'] == 'user' else assistant %}
    {%- set tag = user if at % 2 == 0 else assistant %}
    {%- set round = '[Round ' ~ (at // 2 + first) ~ ']' + sep if at % 2 == 0 else '' %}
    {%- set text = turn['content'] %}
    {%- set found.at = at + 1 %}
    {%- if text %}{{ BEFORE }}{{ TEXT }}{% else %}{{ OPENING }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set at = found.at %}
    {%- set role = assistant %}
    {%- set tag = user if at % 2 == 0 else assistant %}
    {%- set round = '[Round ' ~ (at // 2 + first) ~ ']' + sep if at % 2 == 0 else '' %}
    {{- OPENING }}
{%- endif %}"""
