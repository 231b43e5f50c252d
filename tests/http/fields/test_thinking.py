"""Budgets of reasoning in the fields of all APIs: what they ask of the ranks, and where they are refused."""

from typing import Any

import httpx
import pytest

from runtime.actors.constraints import open_marks
from runtime.http.app import http_app
from runtime.http.fields.thinking import has_budgets
from runtime.messages.sampling import ThinkingLimit
from runtime.parsing.detect import AnswerFormats
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
QWEN, R1, OSS = (AnswerFormats(reasoning=name) for name in ("qwen3", "deepseek-r1", "gpt-oss"))
THINK = (("<think>", "</think>"),)


async def asked(formats: AnswerFormats, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status and the error, or the limit that the request got."""
    service = FakeService(formats=formats)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as http:
        answer = await http.post(path, json=body)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]
    return 200, service.requests[-1].params.thinking


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"thinking_token_budget": 7}),
        ("/v1/chat/completions", CHAT | {"reasoning": {"max_tokens": 7}}),
        ("/v1/messages", CHAT | {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}),
    ],
)
async def test_each_field_is_the_budget(path: str, body: dict[str, Any]) -> None:
    assert await asked(QWEN, path, body) == (200, ThinkingLimit(7, THINK))
    assert await asked(R1, path, body) == (200, ThinkingLimit(7, THINK, is_forced=True))
    channel = (("<|channel|>analysis<|message|>", "<|end|>"),)
    assert await asked(OSS, path, body) == (200, ThinkingLimit(7, channel, is_anywhere=True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "thinking_token_budget": 7}),
        ("/generate", {"text": "x", "max_thinking_tokens": 7}),
    ],
)
async def test_texts_that_are_continued_have_budgets_too(path: str, body: dict[str, Any]) -> None:
    assert await asked(QWEN, path, body) == (200, ThinkingLimit(7, THINK, is_continued=True))


async def test_no_reasoning_is_a_budget_of_0_where_the_template_has_no_say() -> None:
    for fields in ({"reasoning_effort": "none"}, {"reasoning": {"enabled": False}}):
        body = CHAT | fields
        assert await asked(R1, "/v1/chat/completions", body) == (200, ThinkingLimit(0, THINK, is_forced=True))
        assert await asked(QWEN, "/v1/chat/completions", body) == (200, None)
    assert await asked(R1, "/v1/chat/completions", CHAT | {"reasoning_effort": "minimal"}) == (200, None)


@pytest.mark.parametrize("formats", [AnswerFormats(), AnswerFormats(reasoning="muse")])
async def test_a_budget_is_refused_where_no_end_of_reasoning_is_known(formats: AnswerFormats) -> None:
    assert not has_budgets(formats)
    for path, field, body in (
        ("/v1/chat/completions", "thinking_token_budget", CHAT),
        ("/v1/completions", "thinking_token_budget", {"prompt": "x"}),
        ("/generate", "max_thinking_tokens", {"text": "x"}),
    ):
        status, error = await asked(formats, path, body | {field: 7})
        assert status == 400 and error["param"] == field and "--reasoning-parser" in error["message"]
        assert await asked(formats, path, body | {field: -1}) == (200, None)
    claude = CHAT | {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}
    assert await asked(formats, "/v1/messages", claude) == (200, None), "clients send it to every model"


async def test_a_budget_below_0_is_refused() -> None:
    for fields, param in (
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens"),
    ):
        status, error = await asked(QWEN, "/v1/chat/completions", CHAT | fields)
        assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("tail", "flags", "place"),
    [
        ("hi<think>\n", {}, 0),
        ("hi<t2>", {}, 1),
        ("hi<think>\n\n</think>\n\n", {"is_forced": True}, -1),
        ("hi", {"is_forced": True}, 0),
        ("hi", {}, -1),
        ("<think>so", {"is_continued": True}, 0),
        ("<t2>so", {"is_continued": True}, 1),
        ("<think>so</think>then", {"is_continued": True}, -1),
        ("then", {"is_continued": True, "is_forced": True}, -1),
    ],
)
def test_whether_an_answer_begins_inside_reasoning(tail: str, flags: dict[str, bool], place: int) -> None:
    limit = ThinkingLimit(1, (*THINK, ("<t2>", "</t2>")), **flags)
    assert open_marks(limit, tail) == place
