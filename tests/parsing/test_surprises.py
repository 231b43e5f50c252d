"""What models write and their templates do not: missing ends, types only in the schema, unpaired marks."""

import json
from typing import Any

import pytest

from runtime.parsing.answer_parser import Parser
from runtime.parsing.channel_parser import CHANNEL_FORMATS, ChannelParser
from runtime.parsing.events import Arguments, CallBegin, Content
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS
from tests.parsing.test_tool_call_formats import cuts, parse

TOOLS: dict[str, Any] = {
    "w": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array"},
            "at": {"type": "object"},
            "on": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "zip": {"$ref": "#/$defs/a~1b"},
        },
        "$defs": {"a/b": {"type": "string"}},
    },
    "union": {
        "$ref": "#/$defs/both",
        "$defs": {
            "both": {
                "oneOf": [
                    {"properties": {"kind": {"const": "x"}, "load": {"type": "object"}}},
                    {"properties": {"kind": {"const": "y"}}},
                ]
            }
        },
    },
    "none": {},
}
DSML = "｜DSML｜"
Q = '<|"|>'
M3 = "]<]minimax[>["
INVOKE = (
    f'<{DSML}invoke name="w"><{DSML}parameter name="city" string="true">Oslo</{DSML}parameter></{DSML}invoke>'
)


def coder(body: str) -> str:
    return f"<tool_call>\n<function=w>\n{body}</function>\n</tool_call>"


def glm(*pairs: tuple[str, str]) -> str:
    body = "".join([f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs])
    return f"<tool_call>w\n{body}</tool_call>"


Calls = list[tuple[str, dict[str, Any]]]

CASES: dict[str, tuple[str, str, Calls, str]] = {  # a format, a text, its calls, its content
    "value without its end": (
        "qwen3_coder",
        coder("<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n"),
        [("w", {"city": "Oslo", "days": 3})],
        "",
    ),
    "last value without its end": (
        "qwen3_coder",
        coder("<parameter=city>\nOslo\n"),
        [("w", {"city": "Oslo"})],
        "",
    ),
    "markup in a value": (
        "qwen3_coder",
        coder("<parameter=city>\n<b>a</b>\n<parameter=x>\n</function>\n</parameter>\n"),
        [("w", {"city": "<b>a</b>\n<parameter=x>\n</function>"})],
        "",
    ),
    "a call without its frame": (
        "qwen3_coder",
        "So:\n<function=w>\n<parameter=days>\n3\n</parameter>\n</function>",
        [("w", {"days": 3})],
        "So:",
    ),
    "nothing in a value": (
        "qwen3_coder",
        coder("<parameter=city>\n\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"),
        [("w", {"city": "", "note": None})],
        "",
    ),
    "null as a string": (
        "glm",
        glm(("city", "null"), ("zip", "0123")),
        [("w", {"city": "null", "zip": "0123"})],
        "",
    ),
    "Python for JSON": (
        "glm",
        glm(("tags", "['a', None, True]"), ("on", "True"), ("at", "{'k': 1}")),
        [("w", {"tags": ["a", None, True], "on": True, "at": {"k": 1}})],
        "",
    ),
    "escapes twice": (
        "glm",
        glm(("tags", r"[{\"id\": \"1\"}]"), ("days", '"7"'), ("city", r"\"a\"")),
        [("w", {"tags": [{"id": "1"}], "days": 7, "city": r"\"a\""})],
        "",
    ),
    "no number": (
        "glm",
        glm(("days", "soon"), ("at", "1e999"), ("on", "1")),
        [("w", {"days": "soon", "at": "1e999", "on": True})],
        "",
    ),
    "a backslash and n for a line": (
        "glm",
        "<tool_call>w\\n<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        [("w", {"days": 3})],
        "",
    ),
    "a union of schemas": (
        "glm",
        "<tool_call>union<arg_key>kind</arg_key><arg_value>x</arg_value><arg_key>load</arg_key><arg_value>"
        '{"v": "h"}</arg_value></tool_call>',
        [("union", {"kind": "x", "load": {"v": "h"}})],
        "",
    ),
    "invoke alone": ("deepseekv4", "Well. " + INVOKE, [("w", {"city": "Oslo"})], "Well."),
    "invoke with JSON": (
        "deepseekv32",
        f'<{DSML}function_calls>\n<{DSML}invoke name="w">\n{{"days": 3}}\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>.",
        [("w", {"days": 3})],
        ".",
    ),
    "no arguments": (
        "deepseekv31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>none<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("none", {})],
        "",
    ),
    "no arguments behind an id": (
        "kimi_k2",
        "<|tool_call_begin|>functions.none:5<|tool_call_argument_begin|><|tool_call_end|>",
        [("none", {})],
        "",
    ),
    "an end without a beginning": ("kimi_k2", "text<|tool_calls_section_end|>", [], "text"),
    "names with hyphens and dots": (
        "kimi_k2",
        "<|tool_call_begin|>functions.mcp.a-b:0\n<|tool_call_argument_begin|>{}<|tool_call_end|>",
        [("mcp.a-b", {})],
        "",
    ),
    "arguments before the name": (
        "mistral",
        '[TOOL_CALLS] [{"arguments":{"name": "w"}, "name": "none"}]\nmore',
        [("none", {"name": "w"})],
        "more",
    ),
    "a name, then arguments": (
        "mistral",
        'Hi[TOOL_CALLS]w{"days": 3}[TOOL_CALLS]none{}',
        [("w", {"days": 3}), ("none", {})],
        "Hi",
    ),
    "ids of calls": (
        "mistral",
        '[TOOL_CALLS]w[CALL_ID]123456789[ARGS]{"tags": [1, null]}',
        [("w", {"tags": [1, None]})],
        "",
    ),
    "a list for Python": (
        "lfm2",
        '<|tool_call_start|>[{"name": "w", "arguments": {"days": 3}}, {"name": "none"}]<|tool_call_end|>',
        [("w", {"days": 3}), ("none", {})],
        "",
    ),
    "a call behind text": (
        "pythonic",
        "See [1] and: [w(city='[x]', tags=[1, {'a': None}], days=-3), none()]",
        [("w", {"city": "[x]", "tags": [1, {"a": None}], "days": -3}), ("none", {})],
        "See [1] and:",
    ),
    "no such function behind text": ("pythonic", "Hi [f(x)(1)]", [], "Hi [f(x)(1)]"),
    "words of Python as names": (
        "pythonic",
        "[w(from='a, in=b\nc', class=1), none()]",
        [("w", {"from": "a, in=b\nc", "class": 1}), ("none", {})],
        "",
    ),
    "numbers that JSON has not": (
        "olmo3",
        "<function_calls>none()\nw(days=1e999)</function_calls>",
        [("none", {})],
        "w(days=1e999)</function_calls>",
    ),
    "half of a character": ("pythonic", r"[w(city='\ud83d')]", [("w", {"city": "\ud83d"})], ""),
    "Python's escapes": (
        "pythonic",
        r"[w(city='it\'s \u00e9', note='''a''')]",
        [("w", {"city": "it's é", "note": "a"})],
        "",
    ),
    "JSON's escapes": (
        "hermes",
        r'<tool_call>{"name": "w", "arguments": {"city": "\u00e9\ud83d\ude00\\"}}</tool_call>',
        [("w", {"city": "é😀\\"})],
        "",
    ),
    "arguments in a string": (
        "hermes",
        r'<tool_call>{"name": "w", "arguments": "{\"days\": 3}"}</tool_call>',
        [("w", {"days": 3})],
        "",
    ),
    "arguments null": (
        "hermes",
        '<tool_call>{"name": "none", "arguments": null}</tool_call>',
        [("none", {})],
        "",
    ),
    "no end at the stop": (
        "hermes",
        '<tool_call>{"name": "w", "arguments": {"days": 3}}',
        [("w", {"days": 3})],
        "",
    ),
    "lines in JSON strings": (
        "hermes",
        '<tool_call>{"name": "w", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        [("w", {"city": "a\nb\tc"})],
        "",
    ),
    "text between calls": (
        "hermes",
        '<tool_call>{"name": "none"}</tool_call>\nand\n<tool_call>{"name": "none"}</tool_call>',
        [("none", {}), ("none", {})],
        "and",
    ),
    "the first quote is missing": (
        "gemma4",
        f"<|tool_call>call:w{{city:Paris, France{Q},days:5,tags:[{Q}a{Q},b{Q}]}}<tool_call|>",
        [("w", {"city": "Paris, France", "days": 5, "tags": ["a", "b"]})],
        "",
    ),
    "a colon too many": (
        "gemma4",
        f"<|tool_call>:call:w{{city:{Q}x, y{Q}}}<tool_call|>",
        [("w", {"city": "x, y"})],
        "",
    ),
    "no frame": ("gemma4", f"So\ncall:w{{city:{Q}a{Q}}}", [("w", {"city": "a"})], "So"),
    "angles in a value": (
        "step3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="w">'
        '<steptml:parameter name="city">if a < b: <i></steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        [("w", {"city": "if a < b: <i>"})],
        "",
    ),
    "pairs of Hy3": (
        "hunyuan",
        "<tool_calls>\n<tool_call>w<tool_sep>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>none<tool_sep></tool_call></tool_calls>",
        [("w", {"days": 3}), ("none", {})],
        "",
    ),
    "names with suffixes": (
        "hunyuan",
        "<tool_calls:opensource><tool_call:opensource>w<tool_sep:opensource><arg_key:opensource>days"
        "</arg_key:opensource><arg_value:opensource>3</arg_value:opensource></tool_call:opensource>"
        "</tool_calls:opensource>",
        [("w", {"days": 3})],
        "",
    ),
    "elements in elements": (
        "minimax-m3",
        '@<tool_call>@<invoke name="w">@<at>@<k>1@</k>@<l>@<item>2@</item>@<item>@</item>@</l>'
        "@<b>true@</b>@</at>@<tags>@<item>1@</item>@</tags>@<city> a <b> @</city>"
        "@<days>3@</days>@</invoke>"
        "@</tool_call>".replace("@", M3),
        [("w", {"at": {"k": "1", "l": ["2", ""], "b": True}, "tags": ["1"], "city": " a <b> ", "days": 3})],
        "",
    ),
    "space behind the mark": (
        "minimax-m3",
        '@<tool_call>@ <invoke name="w">@\n<days>3@ </days>@</invoke>@</tool_call>'.replace("@", M3),
        [("w", {"days": 3})],
        "",
    ),
    "elements that don't match": (
        "minimax-m3",
        f'{M3}<tool_call>{M3}<invoke name="w">{M3}<a>1{M3}</b>',
        [],
        f'{M3}<tool_call>{M3}<invoke name="w">{M3}<a>1{M3}</b>',
    ),
    "a section of characters": (
        "minicpm5",
        '<function name="w"><param name="city"><![CDATA[</param>]]></param><param name="tags">'
        "<![CDATA[[1]]]></param></function>",
        [("w", {"city": "</param>", "tags": [1]})],
        "",
    ),
    "several in one object": (
        "apertus2509",
        '<|tools_prefix|>[{"w": {"days": 3}, "none": {}}]<|tools_suffix|>',
        [("w", {"days": 3}), ("none", {})],
        "",
    ),
    "types that are told": (
        "k2_horizon",
        "<ifm|tool_call>w<ifm|arg_key>x</ifm|arg_key><ifm|arg_type>string</ifm|arg_type><ifm|arg_value>3"
        "</ifm|arg_value></ifm|tool_call>",
        [("w", {"x": "3"})],
        "",
    ),
    "escapes of attributes": (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="w" index="1"<|sep|><|open|>argument key="a&quot;&amp;" '
        'type="object"<|sep|>{"k": [1]}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        [("w", {'a"&': {"k": [1]}})],
        "",
    ),
    "JSON for markup": (
        "dots",
        '<dots_function_call>{"name": "w", "arguments": {"days": 3}}</dots_function_call>',
        [("w", {"days": 3})],
        "",
    ),
    "a tool's header alone": (
        "inkling",
        '<|content_invoke_tool_json|>{"name": "w", "args": {"days": 3}}<|end_message|>',
        [("w", {"days": 3})],
        "",
    ),
    "the recipient in the role": (
        "gpt-oss",
        '<|start|>assistant to=functions.w<|channel|>commentary json<|message|>{"days": 3}<|call|>',
        [("w", {"days": 3})],
        "",
    ),
    "a recipient in analysis": (
        "gpt-oss",
        '<|channel|>analysis to=functions.w code<|message|>{"days": 3}<|call|>',
        [("w", {"days": 3})],
        "",
    ),
    "a call without arguments": (
        "gpt-oss",
        "Hi<|channel|>commentary to=functions.none <|constrain|>json<|message|><|call|>",
        [("none", {})],
        "Hi",
    ),
    "no end of such a call": (
        "gpt-oss",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.w<|constrain|>json<|message|>{"days": 3}',
        [("w", {"days": 3})],
        "Let me see.",
    ),
    "a name twice": (
        "muse",
        ' to=w<|message|><atem:function_calls>\n<atem:invoke name="w.w">\n<atem:parameter name="city"> a '
        "</atem:parameter></atem:invoke></atem:function_calls><|eot|>",
        [("w", {"city": " a "})],
        "",
    ),
    "a call that is quoted": (
        "muse",
        ' to=user<|message|>Write <atem:invoke name="w"></atem:invoke><|eot|>',
        [],
        'Write <atem:invoke name="w"></atem:invoke>',
    ),
    "no header": ("muse", "to be or not", [], "to be or not"),
}


def calls_and_content(name: str, pieces: list[str]) -> tuple[Calls, str]:
    events = parse(
        lambda: (
            ChannelParser(CHANNEL_FORMATS[name], TOOLS)
            if name in CHANNEL_FORMATS
            else Parser(TOOL_CALL_FORMATS[name], None, TOOLS)
        ),
        pieces,
    )
    names = [event.name for event in events if isinstance(event, CallBegin)]
    assert all([event.text.encode() for event in events if isinstance(event, Arguments)])
    arguments = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    return list(zip(names, arguments, strict=True)), " ".join(
        [event.text for event in events if isinstance(event, Content)]
    ).strip()


@pytest.mark.parametrize("case", CASES)
def test_calls_as_models_write_them(case: str) -> None:
    name, text, calls, content = CASES[case]
    for pieces in cuts(text):
        assert calls_and_content(name, pieces) == (calls, content)
