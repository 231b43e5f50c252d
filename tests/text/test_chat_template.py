"""Chat templates against transformers' apply_chat_template."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from runtime import gil
from runtime.errors import InvalidRequest, ModelError
from runtime.gil import giving_way
from runtime.messages.requests import Chat
from runtime.text import chat_template, jinja_sandbox
from runtime.text.chat_template import ChatTemplates
from tests.text import build

TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}

CHATML = """{% if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}

# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (loop.first and tools and message.role == 'system') %}
<|im_start|>{{ message.role }}
{% generation %}{{ message.content or '' }}{% endgeneration %}
{%- for call in message.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='You are careful.') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\n' + ns.system + '\\n' + strftime_now('%Y')[:2] + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""

INSTRUCT = """{%- macro text_of(content) %}
    {%- if content is string %}{{ content }}{% else %}
        {%- for part in content %}{{ part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- for message in messages %}
    {%- set is_turn = message.role in ['user', 'assistant'] and not tools %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) and is_turn %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[TOOLS]' + tools | tojson(indent=2, sort_keys=true) + '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + text_of(message.content) + ' [/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[CALLS]' }}
        {%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + message.content | string + '[/RESULT]' }}
    {%- else %}
        {{- (message.reasoning_content or '') + ' ' + text_of(message.content) + eos_token }}
    {%- endif %}
{%- endfor %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Tells <b>wet</b> from "dry" & més',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "Is it <raining> in Zürich? 'yes' & \"no\""}
ANSWER = {"role": "assistant", "content": "It is dry. "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    ],
}
RESULT = {"role": "tool", "content": '{"rain": 0}', "tool_call_id": "call_1"}
THOUGHT = {"role": "assistant", "content": "Dry.", "reasoning": "Look at the sky."}

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, USER],
    [USER, CALL, RESULT],
    [USER, THOUGHT, USER],
]


def theirs(source: str, tmp_path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(
        str(build.save(tmp_path, build.byte_level(), chat_template=source, **TOKENS))
    )


@pytest.mark.parametrize(
    "filter", ["tojson", "tojson(indent=2, sort_keys=true)", "tojson(ensure_ascii=true)"]
)
def test_long_json_is_written_value_by_value(filter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text, with pauses for the event loop."""
    templates = ChatTemplates({"default": "{{ tools | " + filter + " }}"}, {})
    chat = Chat([USER], TOOLS * 3, {}, False)
    whole = templates.render(chat)
    pauses: list[float] = []
    monkeypatch.setattr(gil, "RUN_S", 0.0)
    monkeypatch.setattr(gil, "sleep", pauses.append)
    assert giving_way(templates.render, chat) == whole and not pauses
    monkeypatch.setattr(jinja_sandbox, "LONG_JSON", 100)
    assert giving_way(templates.render, chat) == whole and len(pauses) > 30


@pytest.mark.parametrize("source", [CHATML, HEADERS, INSTRUCT], ids=["chatml", "headers", "instruct"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_parity_with_transformers(source: str, tools: list[dict[str, Any]] | None, tmp_path: Path) -> None:
    tokenizer = theirs(source, tmp_path)
    ours = ChatTemplates({"default": source}, TOKENS)
    num_rendered = 0
    for messages in CONVERSATIONS:
        for args in ({}, {"add_generation_prompt": False}, {"enable_thinking": False}):
            try:
                want = tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, **{"add_generation_prompt": True, **args}
                )
            except Exception:
                with pytest.raises(InvalidRequest, match="can't render this conversation") as refused:
                    ours.render(Chat(messages, tools, args))
                assert refused.value.param == "messages"
                continue
            assert ours.render(Chat(messages, tools, args)) == want
            num_rendered += 1
    assert num_rendered >= 9  # the refused conversations are the exception


@pytest.mark.parametrize("source", [CHATML, HEADERS, INSTRUCT], ids=["chatml", "headers", "instruct"])
@pytest.mark.parametrize("final", ["It is", "It is ", "  It\n", '{"a":', "It is, it is"])
def test_continuing_the_final_message_like_transformers(source: str, final: str, tmp_path: Path) -> None:
    messages = [USER, {"role": "assistant", "content": final}]
    want = theirs(source, tmp_path).apply_chat_template(messages, tokenize=False, continue_final_message=True)
    text = ChatTemplates({"default": source}, TOKENS).render(Chat(messages, continue_final=True))
    assert text == want and text.rstrip().endswith(final.strip())


def render(source: str, *messages: dict[str, Any], **args: Any) -> str:
    return ChatTemplates({"default": source}, TOKENS).render(Chat(list(messages), template_args=args))


def test_tool_arguments_may_be_a_json_string() -> None:
    def call(arguments: str) -> dict[str, Any]:
        return CALL | {
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
        }

    assert render(CHATML, USER, call('{"city": "Zürich"}')) == render(CHATML, USER, CALL)
    assert '"arguments": "{\\"city"' in render(CHATML, USER, call('{"city'))
    # the caller's messages are left alone
    assert CALL["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich"}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}", "[a][b]"),
        (
            "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}",
            "[a][b]",
        ),
        (
            "{% macro say(content) %}{% for p in content %}[{{ p.text }}]{% endfor %}{% endmacro %}"
            "{{ say(messages[0].content) }}",
            "[a][b]",
        ),
    ],
)
def test_parts_are_joined_for_templates_that_take_strings(source: str, text: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(source, {"role": "user", "content": parts}) == text


def test_arguments_that_are_joined_to_text_are_json() -> None:
    """As DeepSeek's own templates have it, and Kimi's."""
    source = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ call['type'] + '<sep>' + "
        "call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```' }}"
        "{{ call.function.arguments + '!' }}{% endfor %}{% endfor %}"
    )
    for arguments in ({"city": "Zürich", "n": 1}, '{"city": "Zürich", "n": 1}'):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        text = ChatTemplates({"default": source}, TOKENS).render(
            Chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
        )
        assert text == 'function<sep>f\n```json\n{"city": "Zürich", "n": 1}\n```{"city": "Zürich", "n": 1}!'


def test_a_template_for_tools_is_chosen_for_tools() -> None:
    both = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    assert (both.render(Chat([USER])), both.render(Chat([USER], TOOLS)), both.render(Chat([USER], []))) == (
        "plain",
        "tools",
        "plain",
    )


@pytest.mark.parametrize(
    ("source", "chat", "param", "message"),
    [
        ("{{ messages[0].nothing.more }}", Chat([USER]), "messages", "can't render"),
        ("{{ raise_exception('no system message') }}", Chat([USER]), "messages", "no system message"),
        ("{{ ''.__class__.__mro__ }}", Chat([USER]), "messages", "can't render"),
        ("{{ messages.append(1) }}", Chat([USER]), "messages", "can't render"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", Chat([USER]), "messages", "can't render"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            Chat([USER]),
            "messages",
            "turns of its loops",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            Chat([USER]),
            "messages",
            "turns of its",
        ),
        ("{{ 'x' * 99999999 }}", Chat([USER]), "messages", "repeats a value"),
        ("{{ 9 ** 9 ** 9 }}", Chat([USER]), "messages", "power of large numbers"),
        (
            "x",
            Chat([USER], template_args={"runtime_turn": "1"}),
            "chat_template_kwargs",
            "can't set runtime_turn",
        ),
        ("x", Chat([USER], template_args={"messages": []}), "chat_template_kwargs", "can't set messages"),
        ("x", Chat([], continue_final=True), "messages", "needs a final message"),
        ("x", Chat([{"role": "assistant"}], continue_final=True), "messages", "needs a final message"),
        ("x", Chat([USER], continue_final=True), "messages", "leaves out the final message"),
        (
            "x",
            Chat([USER], template_args={"add_generation_prompt": True}, continue_final=True),
            "add_generation_prompt",
            "exclude each other",
        ),
    ],
)
def test_refusals_name_the_field(
    source: str, chat: Chat, param: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jinja_sandbox, "MAX_TURNS", 10_000)
    with pytest.raises(InvalidRequest, match=message) as refused:
        ChatTemplates({"default": source}, {}).render(chat)
    assert refused.value.param == param


def test_turns_are_counted_anew_in_each_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "MAX_TURNS", 10_000)
    busy = ChatTemplates({"default": "{% for i in range(9999) %}{% endfor %}done"}, {})
    assert [busy.render(Chat([USER])) for _ in range(12)] == ["done"] * 12


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="longer than 1000 characters"):
        render(
            "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}", USER
        )


def test_arguments_named_like_python_parameters() -> None:
    assert render("{{ self_ }}{{ context }}", USER, self_="a", context="b", self="c") == "ab"


def test_a_model_without_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplates({}, {}).render(Chat([USER]))


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(ModelError, match="'default' of the model is not valid"):
        ChatTemplates({"default": "{% if %}"}, {})


def test_images_are_marks_in_templates_that_take_strings() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    parts = [{"type": "image", "image": ""}, {"type": "text", "text": "what?"}]
    chat = Chat([{"role": "user", "content": parts}])
    marked = ChatTemplates({"default": source}, {}, marks={"image": "<IMG>"})
    assert marked.render(chat) == "user: <IMG>\nwhat?;"
    looping = "{% for m in messages %}{% for part in m.content %}{{ part.type }} {% endfor %}{% endfor %}"
    marked = ChatTemplates({"default": looping}, {}, marks={"image": "<IMG>"})
    assert marked.render(chat) == "image text "
    knowing = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>"
        "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    marked = ChatTemplates({"default": knowing}, {}, marks={"image": "<image>", "video": "<VIDEO>"})
    parts = [{"type": "video", "video": ""}, *parts]
    assert marked.render(Chat([{"role": "user", "content": parts}])) == "<VIDEO><image>what?", (
        "a template that knows images and no videos is given the mark"
    )
