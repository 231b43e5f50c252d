"""Calls written as a model's template writes them are read as they were, whatever their arguments hold and
however the text is cut."""

import json
from keyword import iskeyword
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime.parsing.answer_parser import Parser
from runtime.parsing.channel_parser import CHANNEL_FORMATS, ChannelParser
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS
from tests.parsing.render import WRITERS, render
from tests.parsing.test_tool_call_formats import parse

MARKUP = {
    name
    for name, form in TOOL_CALL_FORMATS.items()
    if any(hasattr(item, "value_end") for item in form.syntaxes)
}
MARKS = sorted(
    {
        mark
        for form in TOOL_CALL_FORMATS.values()
        for section in form.sections
        for mark in (section.begin, section.end)
        if mark
    }
    | {
        "</parameter>",
        "</arg_value>",
        "</function>",
        "```",
        "<|call|>",
        "\n",
        '"',
        "'",
        "\\",
        "}",
        "]",
        "<escape>",
        '<|"|>',
    }
)
TEXTS = st.lists(
    st.sampled_from(MARKS) | st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=6), max_size=4
).map("".join)
LEAVES = (
    TEXTS | st.integers(-(2**40), 2**40) | st.booleans() | st.none() | st.floats(-1e6, 1e6, allow_nan=False)
)
# Pythonic calls have none
KEYS = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True).filter(lambda word: not iskeyword(word))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
KINDS = {
    str: "string",
    int: "integer",
    bool: "boolean",
    type(None): "null",
    float: "number",
    list: "array",
    dict: "object",
}


def strings(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case list():
            return [text for inner in value for text in strings(inner)]
        case dict():
            return [text for inner in value.values() for text in strings(inner)]
    return []


def schema_of(value: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": KINDS[type(value)]}
    if isinstance(value, dict):
        schema["properties"] = {key: schema_of(inner) for key, inner in value.items()}
    if isinstance(value, list):
        schema["prefixItems"] = [schema_of(inner) for inner in value]
    return schema


def can_say(name: str, arguments: dict[str, Any]) -> bool:
    """Formats that write strings without escapes cannot write their own marks inside of them, nor the white
    space that they trim."""
    texts = strings(arguments)
    if name in MARKUP:
        return not any(mark in text for text in texts for mark in ("</", "<arg")) and not any(
            isinstance(value, str) and value != value.strip() for value in arguments.values()
        )
    if name in ("gemma", "gemma4"):
        quote = "<escape>" if name == "gemma" else '<|"|>'
        return not any(quote[0] in text for text in texts)
    if name == "minimax-m3":
        return not any("]<]" in text for text in texts)
    if name in CHANNEL_FORMATS:  # the message ends there, whatever stands around it
        return not any("<|" in text for text in texts)
    return True


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(WRITERS)),
    content=st.sampled_from(["", "Well."]),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    arguments=st.lists(st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=3),
)
def test_calls_come_back(name: str, content: str, cuts: list[int], arguments: list[dict[str, Any]]) -> None:
    assume(all(can_say(name, one) for one in arguments))
    calls = [(f"f{i}", one) for i, one in enumerate(arguments)]
    tools = {function: schema_of(one) for function, one in calls}
    text = ("" if name in ("llama3", "pythonic", *CHANNEL_FORMATS) else content) + render(name, calls)
    at = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    events = parse(
        lambda: (
            ChannelParser(CHANNEL_FORMATS[name], tools)
            if name in CHANNEL_FORMATS
            else Parser(TOOL_CALL_FORMATS[name], None, tools)
        ),
        pieces,
    )
    assert [event.name for event in events if isinstance(event, CallBegin)] == [
        function for function, _ in calls
    ]
    assert [json.loads(event.text) for event in events if isinstance(event, Arguments)] == arguments
    assert sum(isinstance(event, CallEnd) for event in events) == len(calls)
    assert [event.text for event in events if isinstance(event, Content)] == (
        [content] if content and text.startswith(content) else []
    )
