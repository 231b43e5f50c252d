"""Every format: calls come out whatever the text was cut like, and what is no call comes out as text."""

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.parsing.answer_parser import Parser
from runtime.parsing.channel_parser import CHANNEL_FORMATS, ChannelParser
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from runtime.parsing.reasoning_formats import REASONING_FORMATS
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS

TOOLS = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "g": {}}
DSML = "｜DSML｜"
HERMES = (
    'hi\n<tool_call>\n{"name": "f", "arguments": {"a": 5, "s": '
    '"x\\"]y"}}\n</tool_call>\n<tool_call>\n{"name": "g", '
    '"arguments": {}}\n</tool_call>bye'
)
CODER = (
    'hi\n<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=s>\nx"]y\n</parameter>'
    "\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n</function>\n</tool_call>bye"
)
GLM = (
    'hi\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n<arg_key>s</arg_key>\n<arg_value>x"]'
    "y</arg_value>\n</tool_call>"
    "\n<tool_call>g\n</tool_call>bye"
)
JSONS = '[{"name": "f", "arguments": {"a": 5, "s": "x\\"]y"}}, {"name": "g", "arguments": {}}]'
BARE = '<{0}>call:f{{a:5,s:{2}x"]y{2}}}<{1}><{0}>call:g{{}}<{1}>bye'


def invokes(mark: str, outer: str, strings: bool, inner: tuple[str, str] = ("", "")) -> str:
    says = [' string="false"', ' string="true"'] if strings else ["", ""]
    return (
        f'hi\n\n{outer}\n{inner[0]}<{mark}invoke name="f">\n<{mark}parameter '
        f'name="a"{says[0]}>5</{mark}parameter>\n'
        f'<{mark}parameter name="s"{says[1]}>x"]y</{mark}parameter>\n</{mark}invoke>{inner[1]}\n'
        f'{inner[0]}<{mark}invoke name="g">\n</{mark}invoke>{inner[1]}\n</{outer[1:]}bye'
    )


def deepseek(begin: str, then: str, end: str) -> str:
    return (
        "hi<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>{begin}{name}{then}{arguments}{end}<｜tool▁call▁end｜>"
            for name, arguments in (("f", '{"a": 5, "s": "x\\"]y"}'), ("g", "{}"))
        )
        + "<｜tool▁calls▁end｜>bye"
    )


# the same two calls as the models' own templates write them: f(a=5, s='x"]y') and g()
GOLDEN = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen25": HERMES,
    "trinity": HERMES,
    "qwen3_coder": CODER,
    "step3p5": CODER,
    "mimo": CODER,
    "glm": GLM,
    "glm45": GLM.replace("</arg_key>\n", "</arg_key>"),
    "glm47": GLM.replace("\n<arg", "<arg").replace("\n</tool", "</tool"),
    "llama3": '{"name": "f", "parameters": {"a": 5, "s": "x\\"]y"}}; {"name": "g", "parameters": {}}',
    "pythonic": "[f(a=5, s='x\"]y'), g()]",
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 5, "s": "x\\"]y"}[TOOL_CALLS]g[ARGS]{}',
    "deepseekv3": deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
    "deepseekv31": deepseek("", "<｜tool▁sep｜>", ""),
    "deepseekv32": invokes(DSML, f"<{DSML}function_calls>", True),
    "deepseekv4": invokes(DSML, f"<{DSML}tool_calls>", True),
    "kimi_k2": "hi<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|"
    'tool_call_argument_begin|>{"a": 5, "s": "x\\"]y"}'
    "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>bye",
    "step3": invokes(
        "steptml:",
        "<｜tool_calls_begin｜>",
        False,
        ("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
    ).replace("</｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    "minimax-m2": invokes("", "<minimax:tool_call>", False),
    "seed_oss": CODER.replace("<tool_call>", "<seed:tool_call>").replace("</tool_call>", "</seed:tool_call>"),
    "gemma": "hi" + BARE.format("start_function_call", "end_function_call", "<escape>"),
    "gemma4": "hi" + BARE.format("|tool_call", "tool_call|", '<|"|>'),
    "phi4": "hi<|tool_call|>" + JSONS + "<|/tool_call|>bye",
    "granite": "hi<|tool_call|>" + JSONS,
    "interns1": 'hi<|action_start|> <|plugin|>\n{"name": "f", "parameters": {"a": 5, "s": "x\\"]'
    'y"}}<|action_end|>'
    '<|action_start|> <|plugin|>\n{"name": "g", "parameters": {}}<|action_end|>bye',
    "hunyuan": "hi<tool_calls>" + JSONS + "</tool_calls>bye",
    "jamba": "hi<tool_calls>" + JSONS + "</tool_calls>bye",
    "lfm2": "hi<|tool_call_start|>[f(a=5, s='x\"]y'), g()]<|tool_call_end|>bye",
    "cohere_command4": "hi<|START_ACTION|>"
    + JSONS.replace('"name"', '"tool_name"').replace('"arguments"', '"parameters"')
    + "<|END_ACTION|>bye",
    "nanbeige": CODER,
    "ling3": GLM,
    "poolside_v1": GLM,
    "spark25": GLM.replace("</arg_key>\n", "</arg_key>"),
    "iquest_q1": GLM.replace("tool_call>", "iquest_tool_call>"),
    "longcat": HERMES.replace("tool_call>", "longcat_tool_call>"),
    "olmo3": "hi<function_calls>f(a=5, s='x\"]y')\ng()</function_calls>bye",
    "ernie45": HERMES.replace("hi", "<response>\nhi\n</response>"),
    "deepseekv41": invokes(DSML + " ", f"<{DSML} calls>", True),
    "gigachat35": invokes("｜GCML｜", "<｜GCML｜tool_calls>", True),
    "gigachat3": 'hi<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": '
    '{"a": 5, "s": "x\\"]y"}}<|message_sep|>'
    '<|function_call|>{"name": "g", "arguments": {}}<|message_sep|>bye',
    "apertus2509": 'hi<|tools_prefix|>[{"f": {"a": 5, "s": "x\\"]y"}}, {"g": {}}]<|tools_suffix|>bye',
    "dots": invokes("", "<dots_function_call>", False),
    "inkling": "<|message_model|><|content_text|>hi<|end_message|><|message_model|>f<|"
    'content_invoke_tool_json|>{"name": "f", "args": '
    '{"a": 5, "s": '
    '"x\\"]y"}}<|end_message|><|message_model|>g<|content_invoke_tool_json|>{"name":"g","args":{}}<|'
    "end_message|>"
    "<|message_model|><|content_text|>bye<|end_message|><|content_model_end_sampling|>",
    "k2_horizon": "hi\n<ifm|tool_calls>\n<ifm|tool_call>f\n<ifm|arg_key>a</ifm|arg_key>\n<ifm|"
    "arg_type>integer</ifm|arg_type>\n"
    '<ifm|arg_value>5</ifm|arg_value>\n<ifm|arg_key>s</ifm|arg_key>\n<ifm|arg_value>x"]y</ifm|arg_value>'
    "\n</ifm|tool_call>\n"
    '<ifm|tool_call>{"name": "g", "arguments": {}}</ifm|tool_call>\n</ifm|tool_calls>bye',
    "kimi_k3": "<|open|>response<|sep|>hi<|close|>response<|sep|><|open|>tools<|sep|><|open|>call "
    'tool="f" index="1"<|sep|><|open|>'
    'argument key="a" type="integer"<|sep|>5<|close|>argument<|sep|><|open|>argument key="s" '
    'type="string"<|sep|>x"]y'
    '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="g" '
    'index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    "<|close|>message<|sep|>bye",
    "minicpm5": 'hi\n<function name="f"><param name="a">5</param><param name="s"><![CDATA[x"]y]]>'
    "</param></function>\n"
    '<function name="g"></function>bye',
    "minimax-m3": (
        'hi\n@<tool_call>\n@<invoke name="f">@<a>5@</a>@<s>x"]y@</s>@</invoke>\n@<invoke '
        'name="g">@</invoke>\n@</tool_call>'
        "bye"
    ).replace("@", "]<]minimax[>["),
    "gpt-oss": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 5, "s": '
    '"x\\"]y"}<|call|><|start|>assistant'
    "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>",
    "muse": ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter '
    'name="a">5</atem:parameter>\n<atem:parameter '
    'name="s">x"]y</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant '
    "to=g<|message|>"
    '<atem:function_calls><atem:invoke name="g"></atem:invoke></atem:function_calls><|eot|>',
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
        begin
        for form in TOOL_CALL_FORMATS.values()
        for item in form.syntaxes
        for begin in item.begins
        if begin
    }
    | {
        "<think>",
        "</think>",
        '{"name": "f", "arguments": {',
        "[f(",
        "</parameter>",
        "</function>",
        "<parameter=s>",
        "f",
        "}",
        "]",
        '"',
        "<arg_key>",
        "```json",
        "<|call|>",
        "<|channel|>analysis",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "to=functions.f",
    }
)


def parse(make: Callable[[], Parser | ChannelParser], pieces: list[str]) -> list[Event]:
    """The events of a text in pieces, with neighbours joined."""
    parser = make()
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content | Reasoning) and isinstance(last, type(event)):
            joined[-1] = type(event)(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
            joined[-1] = Arguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def cuts(text: str) -> list[list[str]]:
    return [[text[i : i + size] for i in range(0, len(text), size)] for size in (1, 2, 3, 5, 11)] + [[text]]


def maker(name: str) -> Callable[[], Parser | ChannelParser]:
    return (
        (lambda: ChannelParser(CHANNEL_FORMATS[name], TOOLS))
        if name in CHANNEL_FORMATS
        else lambda: Parser(TOOL_CALL_FORMATS[name], REASONING_FORMATS["qwen3"], TOOLS)
    )


@pytest.mark.parametrize("name", [*TOOL_CALL_FORMATS, *CHANNEL_FORMATS])
def test_calls_are_read_from_every_format_however_it_is_cut(name: str) -> None:
    text = GOLDEN[name]
    for pieces in cuts(text):
        events = parse(maker(name), pieces)
        assert [e.name for e in events if isinstance(e, CallBegin)] == ["f", "g"]
        arguments = [json.loads(e.text) for e in events if isinstance(e, Arguments)]
        assert arguments == [{"a": 5, "s": 'x"]y'}, {}]
        assert sum(isinstance(e, CallEnd) for e in events) == 2
        contents = [e.text for e in events if isinstance(e, Content)]
        assert contents == [word for word in ("hi", "bye") if word in text]


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from([*TOOL_CALL_FORMATS, *CHANNEL_FORMATS]),
    text=st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=12).map("".join),
)
def test_any_text_in_any_pieces_gives_the_same_and_loses_nothing(
    data: st.DataObject, name: str, text: str
) -> None:
    if data.draw(st.booleans()):  # within calls, or instead of their rest
        golden = GOLDEN[name]
        split = data.draw(st.integers(0, len(golden)))
        text = golden[:split] + text + data.draw(st.sampled_from(["", golden[split:]]))
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    whole = parse(maker(name), [text])
    assert parse(maker(name), pieces) == whole == parse(maker(name), list(text))
    if (
        not any(isinstance(event, CallBegin | Reasoning) for event in whole)
        and name not in CHANNEL_FORMATS
        and "<think>" not in text
    ):
        kept = re.sub("|".join(map(re.escape, TOOL_CALL_FORMATS[name].dropped_markers)) or "(?!)", "", text)
        assert "".join(event.text for event in whole if isinstance(event, Content)) == kept


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    cut = GOLDEN["hermes"].partition('\\"')[0]
    assert parse(maker("hermes"), [cut])[-1] == Arguments(0, '{"a": 5, "s": "x')
    assert parse(maker("hermes"), ['<tool_call>{"name": "f"']) == [Content('<tool_call>{"name": "f"')]


def test_arguments_that_are_no_json_leave_as_far_as_they_are_right_however_they_are_cut() -> None:
    for arguments, right in (
        ('{"a": 5,] "s"', '{"a": 5,'),
        ('{"s": "x\\', '{"s": "x'),
        ('{"a": 1', '{"a": 1'),
    ):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}'
        for pieces in cuts(text):
            events = parse(maker("hermes"), pieces)
            assert events[1] == Arguments(0, right)
            assert [event.text for event in events[2:]] == [arguments[len(right) :]] * (right != arguments)


def test_bare_calls_of_functions_that_do_not_exist_are_content() -> None:
    assert parse(maker("pythonic"), ["[nope(a=1)]"]) == [Content("[nope(a=1)]")]
    assert parse(maker("llama3"), ['{"name": "nope", "parameters": {}}']) == [
        Content('{"name": "nope", "parameters": {}}')
    ]
    assert parse(maker("hermes"), ['<tool_call>{"name": "nope"}</tool_call>'])[0] == CallBegin(0, "nope")


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_thinking_is_separated_from_the_answer(name: str) -> None:
    row = REASONING_FORMATS[name]
    text = f"{row.begin}\nwhy\n{row.end}\n\n42 "
    for pieces in cuts(text):
        events = parse(lambda: Parser(None, row, {}), pieces)
        assert events == ([Content(text)] if row.stays_in_content else [Reasoning("why"), Content("42 ")])
    opened = parse(
        lambda: Parser(None, row, {}, row.is_open("assistant\n" + row.begin, False)), [f"why{row.end}42"]
    )
    assert opened == (
        [Content(f"{row.begin}why{row.end}42")] if row.stays_in_content else [Reasoning("why"), Content("42")]
    )
    assert not row.is_open(row.begin + "\n\n" + row.end + "\n\n", False)


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        "<|constrain|>json"
        '<|message|>{"a":1}<|call|><|start|>assistant<|channel|>final<|message|>done'
    )
    for pieces in cuts(text):
        events = parse(maker("gpt-oss"), pieces)
        assert events == [
            Reasoning("why"),
            CallBegin(0, "f"),
            Arguments(0, '{"a":1}'),
            CallEnd(0),
            Content("done"),
        ]
