"""Formats by the marks of chat templates, and by name."""

from pathlib import Path

import pytest

from runtime.errors import OptionsError
from runtime.parsing.answer_parser import Parser
from runtime.parsing.channel_parser import CHANNEL_FORMATS, ChannelParser
from runtime.parsing.detect import (
    REASONING_MARKERS,
    TOOL_CALL_MARKERS,
    AnswerFormats,
    markers_of,
    open_parser,
    select_formats,
)
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from runtime.parsing.reasoning_formats import REASONING_FORMATS
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS
from runtime.pocket import PATH
from runtime.text.tokenizer_files import read_files
from tests.parsing.test_tool_call_formats import GOLDEN

DOC = Path(__file__).parents[2] / "docs" / "tools.md"


@pytest.mark.parametrize(
    ("template", "tools", "thinking"),
    [
        ("{{ messages }}", None, None),
        ("<tools></tools><tool_call>", "hermes", None),
        ("<tool_call>{{ '<think>' }}", "hermes", "qwen3"),
        ("<tool_call>\n<function=example>", "qwen3_coder", None),
        ("<tool_call>{name}<arg_key><think>", "glm45", "glm45"),
        ("<｜tool▁call▁begin｜>function ```json <think>", "deepseekv3", "deepseek-v3"),
        ("<｜tool▁call▁begin｜>", "deepseekv31", None),
        ("<｜DSML｜function_calls>", "deepseekv32", None),
        ("<｜DSML｜tool_calls>", "deepseekv4", None),
        ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("<|channel|>analysis<|message|> to=functions.", "gpt-oss", "gpt-oss"),
        ("<|tool_calls_section_begin|><think>", "kimi_k2", "kimi_k2"),
        ("Environment: ipython <|python_tag|>", "llama3", None),
        ("<|python_start|><|python_tag|>", "pythonic", None),
    ],
)
def test_templates_show_the_format(template: str, tools: str | None, thinking: str | None) -> None:
    assert select_formats("auto", "auto", template) == AnswerFormats(tools, thinking)


SAME = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "trinity": "hermes",
    "step3p5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "glm": "glm45",
    "glm47": "glm45",
    "jamba": "hunyuan",
    "ling3": "glm45",
    "poolside_v1": "glm45",
    "spark25": "glm45",
    "nanbeige": "qwen3_coder",
}


# their calls have no marks
@pytest.mark.parametrize(
    "name", sorted((TOOL_CALL_FORMATS.keys() | CHANNEL_FORMATS) - {"llama3", "pythonic"})
)
def test_a_template_that_writes_calls_of_a_format_shows_it(name: str) -> None:
    assert select_formats("auto", "auto", GOLDEN[name]).tool_calls == SAME.get(name, name)


def test_every_format_is_in_the_document() -> None:
    text = DOC.read_text(encoding="utf-8")
    rows = [*TOOL_CALL_FORMATS.items(), *REASONING_FORMATS.items(), *CHANNEL_FORMATS.items()]
    assert [name for name, row in rows if f"| `{name}` | {row.models} |" not in text] == []


def test_marks() -> None:
    assert {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "</think>"} <= {
        *markers_of("deepseekv3", "deepseek-r1")
    }
    assert "<|channel|>" in markers_of("gpt-oss", None) and markers_of(None, None) == ()


def test_pockets_template() -> None:
    assert select_formats("auto", "auto", read_files(PATH).templates["default"]) == AnswerFormats(
        "hermes", "qwen3"
    )


def test_names() -> None:
    assert select_formats("qwen25", "deepseek-r1", "") == AnswerFormats(
        "qwen25", "deepseek-r1", is_explicit=True
    )
    assert select_formats("none", "none", "<tool_call><think>") == AnswerFormats()
    for wrong, says in (
        (("xyz", "auto"), "xyz is unknown; there are auto, none"),
        (("auto", "qwen4"), "did you mean qwen3"),
        (("beam", "auto"), "beam reads a template of answers"),
        (("auto", "telechat4"), "nothing public says"),
    ):
        with pytest.raises(OptionsError, match=says):
            select_formats(*wrong, "")
    for table, known in ((TOOL_CALL_MARKERS, TOOL_CALL_FORMATS), (REASONING_MARKERS, REASONING_FORMATS)):
        assert {name for name, _ in table} <= {*CHANNEL_FORMATS, *known}


@pytest.mark.parametrize(
    ("tools", "thinking", "ours"),
    [
        ("deepseek_v3", "deepseek_r1", ("deepseekv3", "deepseek-r1")),
        ("openai", "openai_gptoss", ("gpt-oss", "gpt-oss")),
        ("llama3_json", "none", ("llama3", None)),
        ("llama", "none", ("llama3", None)),
        ("minimax_m2", "minimax_m2_append_think", ("minimax-m2", "minimax-append-think")),
        ("qwen3_xml", "glm45", ("qwen3_coder", "glm45")),
        ("kimi_k3", "kimi_k3", ("kimi_k3", "kimi_k3")),
        ("glm-45", "hunyuan_a13b", ("glm45", "hunyuan")),
    ],
)
def test_names_that_other_runtimes_have(tools: str, thinking: str, ours: tuple[str, str | None]) -> None:
    assert select_formats(tools, thinking, "") == AnswerFormats(*ours, is_explicit=thinking != "none")


def test_parsers() -> None:
    hermes = AnswerFormats("hermes", "qwen3")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert open_parser(hermes, {}, "").feed(call + ".") == [Content(call + ".")]
    parser = open_parser(hermes, {"f": {}}, "<think>\n")
    assert isinstance(parser, Parser)
    assert parser.feed("so</think>") + parser.feed(call) == [
        Reasoning("so"),
        CallBegin(0, "f"),
        *parser_rest(),
    ]
    assert isinstance(open_parser(AnswerFormats("gpt-oss", "gpt-oss"), {}, ""), ChannelParser)
    assert isinstance(
        open_parser(AnswerFormats("gpt-oss", "gpt-oss"), {"f": {}}, "", is_required=True), Parser
    )
    listed = open_parser(AnswerFormats(), {"f": {}}, "", is_required=True).feed(
        '[{"name": "f", "arguments": {}}]'
    )
    assert listed == [CallBegin(0, "f"), *parser_rest()]


def parser_rest() -> list[Event]:
    return [Arguments(0, "{}"), CallEnd(0)]
