"""Rendering of conversations with the very template that is shipped.

Training on anything else than the output of the shipped template would teach the model
a form that no client ever sends.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pocket.exchange import Message, Tool

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")
END = "<|im_end|>"
ASSISTANT = "<|im_start|>assistant\n"


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@cache
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


@cache
def template_source() -> str:
    """Return the chat template as it is written into the tokenizer's settings."""
    return TEMPLATE_PATH.read_text(encoding="utf-8")


def render(
    messages: list[Message],
    tools: list[Tool] | None = None,
    enable_thinking: bool | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Turn messages into the text that the model reads."""
    options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return _compiled(template_source()).render(
        messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **options
    )


def reply_text(message: Message) -> str:
    """Write an assistant message as the model should produce it, end of turn included."""
    rendered = render([{"role": "user", "content": ""}, message])
    return rendered[rendered.index(ASSISTANT) + len(ASSISTANT) :].rstrip("\n")
