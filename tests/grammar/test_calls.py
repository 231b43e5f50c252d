"""Grammars of calls in each model's own format: they take calls as the model writes them, or the other
answer, and nothing else."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.grammar.backend import Backend, GrammarVocabulary, Matcher
from runtime.grammar.llguidance import create_backend as open_llguidance
from runtime.grammar.open_backend import OTHERS, WithOthers
from runtime.grammar.outlines import create_backend as open_outlines
from runtime.grammar.xgrammar import create_backend as open_xgrammar
from runtime.http.openai.completion_request import ChatBody, Message
from runtime.http.openai.tools import calls_or, strict_calls, tools_of
from runtime.messages.constraint import (
    Choice,
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    Rule,
    StructuralTag,
    grammar_of,
)
from runtime.parsing.call_frames import CALL_FRAMES
from runtime.parsing.detect import markers_of
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS
from tests.parsing.render import render

EOS = 256
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "get_INDEX")
]
CALLS = [("weather", {"city": "Zurich", "days": 3}), ("get_INDEX", {"city": "(a) b"})]
ANSWER = JsonSchema(
    json.dumps({"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]})
)


def terms(special: tuple[str, ...] = ()) -> GrammarVocabulary:
    """A token for each byte, the end of the text, and special tokens."""
    tokens = [*[bytes([byte]) for byte in range(256)], b"", *[b"" for _ in special]]
    return GrammarVocabulary(
        tokens=tokens,
        encode=lambda text: list(text.encode()),
        eos_ids=(EOS,),
        special={text: EOS + 1 + at for at, text in enumerate(special)},
    )


def ids_of(text: str, special: Mapping[str, int]) -> list[int]:
    ids: list[int] = []
    while text:
        mark = max((one for one in special if text.startswith(one)), key=len, default=None)
        if mark is None:
            ids += list(text[0].encode())
            text = text[1:]
        else:
            ids.append(special[mark])
            text = text[len(mark) :]
    return ids


def allows(matcher: Matcher, token: int, size: int) -> bool:
    bits = np.zeros(-(-size // 32), np.int32)
    assert matcher.fill(bits)
    return bool(bits[token // 32] >> (token % 32) & 1)


def takes(backend: Backend, given: GrammarVocabulary, rule: Rule, text: str) -> bool:
    """Whether the text may come, and end there."""
    matcher = backend.compile(grammar_of(rule)).matcher()
    for token in ids_of(text, given.special):
        if not allows(matcher, token, len(given.tokens)) or not matcher.accept(token):
            return False
    return allows(matcher, EOS, len(given.tokens))


def body(**fields: Any) -> ChatBody:
    return ChatBody(messages=[Message("user", "hi")], tools=TOOLS, **fields)


def union(form: str, answer: Rule = ANSWER, **fields: Any) -> Rule:
    asked = body(**fields)
    return calls_or(asked, tools_of(asked), form, answer)


def test_each_format_with_calls_of_its_own_has_a_frame() -> None:
    assert CALL_FRAMES.keys() == TOOL_CALL_FORMATS.keys()
    for name, frame in CALL_FRAMES.items():
        assert (frame.before + frame.begin).startswith(frame.trigger), name
        assert frame.body != "free" or all(frame.text), name


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("form", CALL_FRAMES)
def test_calls_as_the_model_writes_them_or_an_answer_in_the_schema(form: str, is_special: bool) -> None:
    marks = sorted({text for text in markers_of(form, None) if text.startswith("<") and text.endswith(">")})
    if form in ("mistral", "gigachat3", "kimi_k3", "interns1", "inkling"):
        marks = [*marks, "[ARGS]", "[TOOL_CALLS]", "<|message_sep|>", "<|open|>", "<|sep|>", "<|close|>"]
    given = terms(tuple(dict.fromkeys(marks)) if is_special else ())
    backend = open_llguidance(given)
    rule = union(form)
    for calls in (CALLS[:1], CALLS):
        assert takes(backend, given, rule, render(form, calls)), render(form, calls)
    assert takes(backend, given, rule, '{"y": 1}')
    for wrong in (
        "",
        "Well",
        '{"y": "1"}',
        render(form, CALLS[:1])[:-1],
        '{"y": 1}' + render(form, CALLS[:1]),
    ):
        assert not takes(backend, given, rule, wrong), wrong
    one = union(form, parallel_tool_calls=False)
    assert takes(backend, given, one, render(form, CALLS[:1]))
    assert not takes(backend, given, one, render(form, CALLS))
    unknown = render(form, [("other", CALLS[0][1])])
    assert not takes(backend, given, rule, unknown), unknown


def test_arguments_keep_to_the_schema() -> None:
    given = terms()
    backend = open_llguidance(given)
    assert not takes(backend, given, union("hermes"), render("hermes", [("weather", {"days": 3})]))
    assert not takes(backend, given, union("mistral"), render("mistral", [("weather", {"city": 3})]))


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (JsonObject(), '{"a": [1]}', "[1]"),
        (Regex("a/b+\n"), "a/bb\n", "a/"),
        (Choice(("yes", "n/o")), "n/o", "no"),
        (Ebnf('root ::= "(" root ")" | "x"'), "((x))", "((x)"),
    ],
)
def test_an_answer_of_another_kind_stands_next_to_calls(answer: Rule, right: str, wrong: str) -> None:
    given = terms()
    backend = open_llguidance(given)
    rule = union("hermes", answer)
    assert takes(backend, given, rule, right) and not takes(backend, given, rule, wrong)
    assert takes(backend, given, rule, render("hermes", CALLS))


def test_what_has_room_for_calls_or_knows_none_stays_as_it_is() -> None:
    tag = StructuralTag("{}")
    assert union("hermes", tag) == tag and union("gpt-oss") == ANSWER and union("none") == ANSWER
    assert calls_or(body(tool_choice="none"), {}, "hermes", ANSWER) == ANSWER


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("form", [name for name, frame in CALL_FRAMES.items() if frame.body == "json"])
def test_calls_in_free_text_keep_to_their_schemas(form: str, is_special: bool) -> None:
    frame = CALL_FRAMES[form]
    rule = strict_calls(body(), tools_of(body()), form)
    if not frame.trigger:
        assert rule is None
        return
    assert rule is not None
    given = terms((frame.trigger, "</tool_call>", "[ARGS]") if is_special else ())
    backend = open_llguidance(given)
    call = render(form, CALLS[:1])
    for text in ("", "Well <", f"Well: {call}", f"{call}{call}", f"{call} and {render(form, CALLS)}!"):
        assert takes(backend, given, rule, text), text
    assert not takes(backend, given, rule, "so " + render(form, [("weather", {"days": 3})]))
    assert not takes(backend, given, rule, f"so {frame.trigger}")
    single = strict_calls(body(parallel_tool_calls=False), tools_of(body()), form)
    assert single is not None and takes(backend, given, single, f"Well: {call}")
    assert not takes(backend, given, single, f"{call}{call}")


@pytest.mark.parametrize("name", ["xgrammar", "outlines"])
def test_other_backends_have_the_grammar_of_calls_next_to_their_own(name: str) -> None:
    given = terms()
    main: Backend = {"xgrammar": open_xgrammar, "outlines": open_outlines}[name](given)
    backend: Backend = WithOthers(main, OTHERS[name], lambda: open_llguidance(given))
    rules: list[Rule] = [Choice(("yes", "no")), union("hermes"), Choice(("no",)), union("hermes")]
    matchers: list[Any] = [backend.compile(grammar_of(rule)).matcher() for rule in rules]
    for rows, firsts in (
        ((0, 1, 2, 3), (b"yn", b"<{", b"n", b"<{")),
        ((1, 3), (b"<{", b"<{")),
        ((0, 2), (b"yn", b"n")),
    ):
        bits = np.zeros((len(rows), -(-len(given.tokens) // 32)), np.int32)
        assert all([matchers[row].fill(out) for row, out in zip(rows, bits, strict=True)])
        for row, first in zip(bits, firsts, strict=True):
            may = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            assert set(may.tolist()) == set(first)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"forms": []}', type=type(rules[1]))
