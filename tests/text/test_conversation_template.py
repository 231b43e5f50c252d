"""Conversation templates in JSON: the prompts that SGLang's separator styles make, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import InvalidRequest, OptionsError
from runtime.messages.requests import Chat, GenerateRequest, Text
from runtime.messages.sampling import SamplingParams
from runtime.text.chat_template import ChatTemplates
from runtime.text.conversation_template import STYLES, ConversationTemplate, jinja_of
from runtime.text.open_templates import chat_templates
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary
from tests.actors.test_tokenizer import Bench
from tests.text import build

CHAT = [
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
# after the system part, of the three messages and the opening of an answer, with user "[u]", assistant "[a]",
# sep "|" and sep2 "$"
TURNS = {
    "ADD_COLON_SINGLE": "[u]: U|[a]: A|[u]: V|[a]:",
    "ADD_COLON_TWO": "[u]: U|[a]: A$[u]: V|[a]:",
    "ADD_COLON_SPACE_SINGLE": "[u]: U|[a]: A|[u]: V|[a]: ",
    "NO_COLON_SINGLE": "[u]U|[a]A|[u]V|[a]",
    "NO_COLON_TWO": "[u]U|[a]A$[u]V|[a]",
    "ADD_NEW_LINE_SINGLE": "[u]\nU|[a]\nA|[u]\nV|[a]\n",
    "QWEN2_VL_EMBED": "[u]\nU|[a]\nA|[u]\nV|[a]\n<end>",
    "QWEN2_AUDIO": "[u]\nU|[a]\nA|[u]\nV|[a]\n",
    "LLAMA2": "U [a] A$[u] V|[a]",
    "LLAMA3": "".join(
        [
            f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
            for role, text in (("[u]", "U"), ("[a]", "A"), ("[u]", "V"))
        ]
    )
    + "<|start_header_id|>[a]<|end_header_id|>\n\n",
    "LLAMA4": "".join(
        [
            f"<|header_start|>{role}<|header_end|>\n\n{text}<|eot|>"
            for role, text in (("[u]", "U"), ("[a]", "A"), ("[u]", "V"))
        ]
    )
    + "<|header_start|>[a]<|header_end|>\n\n",
    "CHATGLM": "[Round 0]|[u]：U|[a]：A|[Round 1]|[u]：V|[a]：",
    "CHATML": "[u]\nU|\n[a]\nA|\n[u]\nV|\n[a]\n",
    "CHATINTERN": "<s>[u]:U|\n[a]:A$\n<s>[u]:V|\n[a]:",
    "DOLLY": "[u]:\nU|[a]:\nA$\n\n[u]:\nV|[a]:\n",
    "RWKV": "[u]: U\n\n[a]: A\n\n[u]: V\n\n[a]:",
    "PHOENIX": "[u]: <s>U</s>[a]: <s>A</s>[u]: <s>V</s>[a]: <s>",
    "ROBIN": "[u]:\nU|[a]:\nA|[u]:\nV|[a]:\n",
    "FALCON_CHAT": "[u]: U|[a]: A|[u]: V|[a]:",
    "CHATGLM3": "[u]\nU[a]\nA[u]\nV[a]",
    "DEEPSEEK_CHAT": "[u]: U|[a]: A$[u]: V|[a]:",
    "METAMATH": "[u]:\nU|[a]: $A[u]:\nV|[a]: $",
    "DeepSeekVL2": "[u]: U|[a]: A$[u]: V|[a]:",
    "GEMMA3": "U|[a]A|[u]V|[a]",
    "MPT": "[u]U|[a]A|[u]V|[a]",
}
SYSTEM_THEN_SEP = {
    "ADD_COLON_SINGLE",
    "ADD_COLON_TWO",
    "ADD_COLON_SPACE_SINGLE",
    "ADD_NEW_LINE_SINGLE",
    "QWEN2_VL_EMBED",
    "QWEN2_AUDIO",
    "CHATGLM",
    "CHATML",
    "ROBIN",
    "FALCON_CHAT",
    "METAMATH",
    "DeepSeekVL2",
    "MPT",
}


def template(style: str, **fields: Any) -> ConversationTemplate:
    given = {"user": "[u]", "assistant": "[a]", "sep": "|", "sep2": "$", "stop_str": ["<end>"]} | fields
    return ConversationTemplate(sep_style=style, **given)


def render(one: ConversationTemplate, messages: list[Any], **more: Any) -> str:
    return ChatTemplates({"default": jinja_of(one)}, {"text_begin": ""}).render(Chat(messages, **more))


@pytest.mark.parametrize("style", STYLES)
def test_each_style_joins_messages_as_the_reference_does(style: str) -> None:
    chat = [{"role": "system", "content": "S"}, *CHAT]
    behind = "" if style not in SYSTEM_THEN_SEP else "|\n" if style == "CHATML" else "|"
    assert render(template(style, system="<sys>"), chat) == f"<sys>\nS{behind}{TURNS[style]}"


def test_without_a_system_message_the_files_own_stands_or_nothing() -> None:
    assert render(template("CHATML", system="<sys>", system_message="D"), CHAT).startswith("<sys>\nD|\n[u]")
    assert render(template("LLAMA2", system="<sys>"), CHAT).startswith("[INST] U")
    assert render(template("LLAMA3", system="<sys>"), CHAT).startswith("<|start_header_id|>[u]")


def test_an_answer_can_be_continued_and_other_roles_are_refused() -> None:
    assert render(template("CHATML"), CHAT[:2], continue_final=True).endswith("[a]\nA")
    with pytest.raises(InvalidRequest, match="not tool"):
        render(template("CHATML"), [*CHAT, {"role": "tool", "content": "1"}])


def vocabulary() -> Vocabulary:
    return Vocabulary(build.sentencepiece(), TokenizerFiles(templates={}))


def test_a_json_file_is_a_conversation_and_never_jinja(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(
            {
                "name": "mine",
                "system": "{{ 1 }} '\"\\",
                "user": "<U>",
                "assistant": "<A>",
                "sep_style": "NO_COLON_SINGLE",
                "sep": "{% raw %}",
                "stop_str": "<end>",
            }
        )
    )
    templates = chat_templates(vocabulary(), str(path), None)
    assert templates.stops == ("<end>",)
    assert templates.render(Chat(CHAT[:1])).endswith("{{ 1 }} '\"\\\n<U>U{% raw %}<A>")
    path.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert chat_templates(vocabulary(), str(path), None).render(Chat(CHAT)) == "U!"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sep_style": "CHATMAL"}, "sep_style CHATMAL is unknown; there are"),
        ({"sep_style": "CHATML"}, "user and assistant are missing"),
        ({"sep_style": "LLAMA2", "user": "u", "assistant": "a"}, "needs sep2"),
        ({"user": "u"}, "missing required field `sep_style`"),
        ([1], "must hold an object"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_that_is_no_template_is_refused_at_start(tmp_path: Path, fields: Any, words: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    with pytest.raises(OptionsError, match=words):
        chat_templates(vocabulary(), str(path), None)


def test_a_conversation_ends_at_the_stops_of_its_template_too() -> None:
    bench = Bench()
    bench.actor._templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {}, ("<end>",))
    chat = Chat([{"role": "user", "content": "ab"}])
    asked = {
        id: bench.actor.prepare(
            GenerateRequest(id=id, prompt=prompt, params=SamplingParams(stop=("x",)), arrival_s=0.0), 1
        ).params.stop
        for id, prompt in (("chat", chat), ("text", Text("ab")))
    }
    assert asked == {"chat": ("x", "<end>"), "text": ("x",)}
