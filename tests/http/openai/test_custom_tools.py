"""Custom tools of chats, and the grammars of their texts, in calls as each format writes them."""

import json
from typing import Any

import openai
import pytest

from runtime.grammar.llguidance import create_backend
from runtime.grammar.quoted_lark import quoted_lark
from runtime.http.openai.custom_tools import TextGrammar
from runtime.http.openai.tools import calls_or, required_calls, strict_calls, tools_of
from runtime.messages.constraint import Calls, Rule
from runtime.messages.requests import Chat
from runtime.parsing.detect import AnswerFormats
from tests.grammar.test_calls import ANSWER, takes, terms
from tests.grammar.test_calls import body as chat_body
from tests.http.fake import FakeService
from tests.http.openai.test_tools import ADD, client_of
from tests.parsing.render import render

pytestmark = pytest.mark.anyio

PATCH = """
start: begin (add | change)+ end
begin: "*** Begin" LF
end: "*** End" LF?
add: "+++ " /(.+)/ LF   // a file
change: ("+" | "-") /(.*)/ LF
%import common.LF
"""
RIGHT = '*** Begin\n+++ a "b".py\n+print("x\\t")\n-\n*** End'
WRONG = "*** Begin\n+++ a\n*** Fin"
TOOL: Any = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Changes files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}},
    },
}
SAYS = ["Well", '<tool_call>{"name": "patch", ', '"arguments": {"input": "a\\n', 'b"}}', "</tool_call>"]
ASK: dict[str, Any] = {
    "model": "org/fake",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [ADD, TOOL],
}


async def test_a_custom_tool_is_called_with_a_text() -> None:
    service = FakeService(formats=AnswerFormats(tool_calls="hermes"), says=SAYS, has_grammars=True)
    async with client_of(service) as client:
        whole = await client.chat.completions.create(**ASK)
        (call,) = whole.choices[0].message.tool_calls or []
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", "a\nb")
        assert whole.choices[0].finish_reason == "tool_calls"
        pieces = [
            one
            async for chunk in await client.chat.completions.create(**ASK, stream=True)
            for one in chunk.choices[0].delta.tool_calls or ()
        ]
        assert pieces[0].type == "custom" and pieces[0].model_extra["custom"] == {
            "name": "patch",
            "input": "",
        }
        assert "".join(piece.model_extra["custom"]["input"] for piece in pieces) == "a\nb"
        asked = service.requests[-1]
        assert isinstance(asked.params.constraint, Calls) and isinstance(asked.prompt, Chat)
        seen = (asked.prompt.tools or [])[1]
        assert seen["type"] == "function" and "*** Begin" in json.dumps(seen)  # the model sees a function
        again = [
            *ASK["messages"],
            whole.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        await client.chat.completions.create(**ASK | {"messages": again})
        prompt = service.requests[-1].prompt
        assert isinstance(prompt, Chat)
        assert prompt.messages[1]["tool_calls"][0]["function"] == {
            "name": "patch",
            "arguments": {"input": "a\nb"},
        }
        for choice in (
            {"type": "custom", "custom": {"name": "patch"}},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "custom", "custom": {"name": "patch"}}],
                },
            },
        ):
            await client.chat.completions.create(**ASK, tool_choice=choice)
            rule = service.requests[-1].params.constraint
            assert isinstance(rule, Calls) and [form.begin for form in rule.forms] == [
                '{"name": "patch", "arguments": {"input": "'
            ]
        for wrong, param in (
            ({"name": 3}, "tools[0].custom"),
            ({"name": "p", "format": {"type": "grammar"}}, "tools[0].custom.format.grammar"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**ASK | {"tools": [{"type": "custom", "custom": wrong}]})
            assert refused.value.param == param


async def test_the_responses_route_keeps_the_grammar_too() -> None:
    service = FakeService(formats=AnswerFormats(tool_calls="hermes"), says=SAYS, has_grammars=True)
    tool = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[ab\\n]+"},
    }
    async with client_of(service) as client:
        response = await client.responses.create(model="org/fake", input="hi", tools=[tool])
    assert response.output[-1].type == "custom_tool_call" and response.output[-1].input == "a\nb"
    rule = service.requests[-1].params.constraint
    assert isinstance(rule, Calls) and "pattern" in str(rule.forms[0].arguments)


CUSTOM = [
    {
        "type": "function",
        "function": {
            "name": "patch",
            "parameters": {
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
                "additionalProperties": False,
            },
        },
    }
]
GRAMMARS = {
    "lark": ({"patch": TextGrammar("lark", PATCH)}, RIGHT, WRONG),
    "regex": ({"patch": TextGrammar("regex", '^[a-c]+/"\\n?$')}, 'abc/"\n', "abd"),
}


@pytest.mark.parametrize("syntax", GRAMMARS)
@pytest.mark.parametrize(
    "form",
    ["hermes", "mistral", "kimi_k2", "apertus2509", "qwen3_coder", "glm45", "minimax-m2", "deepseekv32"],
)
def test_the_grammar_of_a_text_holds_in_each_format(form: str, syntax: str) -> None:
    grammars, right, wrong = GRAMMARS[syntax]
    given = terms()
    backend = create_backend(given)
    body = chat_body()
    body.tools = CUSTOM
    tools = tools_of(body)
    rules: list[Rule | None] = [
        calls_or(body, tools, form, ANSWER, grammars),
        strict_calls(body, tools, form, grammars),
    ]
    for rule in rules:
        assert rule is not None
        for text, is_right in ((right, True), (wrong, False)):
            call = render(form, [("patch", {"input": text})])
            assert takes(backend, given, rule, call) is is_right, call
    body.tool_choice = "required"
    required = required_calls(body, tools, grammars)
    assert required is not None
    for text, is_right in ((right, True), (wrong, False)):
        call = json.dumps([{"name": "patch", "arguments": {"input": text}}])
        assert takes(backend, given, required, call) is is_right


@pytest.mark.parametrize(
    "grammar", ["start: /.*foo/", 'start: "a"\n%ignore " "', "start: /(?=a)b/", "%import common.NO"]
)
def test_what_cannot_stand_within_json_is_any_text(grammar: str) -> None:
    with pytest.raises(ValueError, match="possible|kept|known"):
        quoted_lark(grammar)
    body = chat_body(tool_choice="required")
    body.tools = CUSTOM
    rule = required_calls(body, tools_of(body), {"patch": TextGrammar("lark", grammar)})
    given = terms()
    assert rule is not None
    assert takes(
        create_backend(given), given, rule, json.dumps([{"name": "patch", "arguments": {"input": "x"}}])
    )
