"""Reasoning as models write it: in several ways, left open, and around calls."""

import pytest

from runtime.parsing.answer_parser import Parser
from runtime.parsing.events import Content, Event, Reasoning
from runtime.parsing.reasoning_formats import REASONING_FORMATS
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS
from tests.parsing.test_tool_call_formats import cuts, parse

INKLING = (
    "<|message_model|><|content_thinking|>why<|end_message|>"
    "<|message_model|><|content_text|>42<|end_message|>"
)
CASES: dict[str, tuple[str, bool, list[Event]]] = {  # a text, whether it begins inside reasoning, its events
    "inkling": (INKLING, False, [Reasoning("why"), Content("42")]),
    "kimi_k3": (
        "why<|close|>think<|sep|><|open|>response<|sep|>42<|close|>response<|sep|><|close|>message<|sep|>",
        True,
        [Reasoning("why"), Content("42")],
    ),
    "minimax-m3": ("</mm:think>42", False, [Content("42")]),
    "k2_horizon": ("why</ifm|think_fast>\n42", True, [Reasoning("why"), Content("42")]),
    "hunyuan": ("<think:opensource>why</think:opensource>42", False, [Reasoning("why"), Content("42")]),
    "qwen3": ("a <think> in text", False, [Content("a <think> in text")]),
}


@pytest.mark.parametrize("name", ["deepseek-r1", "qwen3-thinking", "step3", "minimax", "qwen3"])
@pytest.mark.parametrize("written", ["<think>", "\n<think>\n", ""])
def test_an_opening_marker_that_is_written_all_the_same_is_no_reasoning(name: str, written: str) -> None:
    for pieces in cuts(f"{written}why</think>42"):
        events = parse(lambda: Parser(None, REASONING_FORMATS[name], {}, True), pieces)
        assert events == [Reasoning("why"), Content("42")]


def test_an_opening_marker_that_stays_in_the_content_stands_there_once() -> None:
    row = REASONING_FORMATS["minimax-append-think"]
    for text in ("<think>why</think>42", "why</think>42"):
        for pieces in cuts(text):
            assert parse(lambda: Parser(None, row, {}, True), pieces) == [Content("<think>why</think>42")]


@pytest.mark.parametrize("name", CASES)
def test_reasoning_as_models_write_it(name: str) -> None:
    text, is_open, events = CASES[name]
    for pieces in cuts(text):
        assert parse(lambda: Parser(None, REASONING_FORMATS[name], {}, is_open), pieces) == events


def test_where_reasoning_begins() -> None:
    row = REASONING_FORMATS["k2_horizon"]
    assert row.is_open("...<ifm|think_faster>\n", False) and not row.is_open(
        "<ifm|think_fast></ifm|think_fast>", False
    )
    assert row.is_open("<ifm|think_fast>so", True) and not row.is_open(
        "<ifm|think_fast>so</ifm|think_fast>", True
    )


def test_reasoning_goes_on_behind_a_call() -> None:
    text = '<|inner_prefix|>a<|tools_prefix|>[{"w": {"days": 3}}]<|tools_suffix|>b<|inner_suffix|>42'
    for pieces in cuts(text):
        events = parse(
            lambda: Parser(TOOL_CALL_FORMATS["apertus2509"], REASONING_FORMATS["apertus2509"], {"w": {}}),
            pieces,
        )
        assert [type(event).__name__ for event in events] == [
            "Reasoning",
            "CallBegin",
            "Arguments",
            "CallEnd",
            "Reasoning",
            "Content",
        ]
        assert [event.text for event in events if isinstance(event, Reasoning)] == ["a", "b"]
        no_tools = parse(lambda: Parser(None, REASONING_FORMATS["apertus2509"], {}), pieces)
        assert [type(event) for event in no_tools] == [Reasoning, Content]
