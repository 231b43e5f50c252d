"""stop_regex over HTTP: answers end where the definition says, streamed or not, on each route."""

import re
from typing import Any

import httpx
import msgspec
import pytest

from runtime import Engine

pytestmark = pytest.mark.anyio

PROMPT = "Once upon a time"
REGEXES: list[str | list[str]] = [
    r"[aeiou] \w",
    [r"\w{6}", r"(?i)THE"],
    r"t.*e\b",
    "never there",
    r"\s\S+\s\S+$",
]


def cut(regexes: str | list[str], text: str, keep: bool) -> tuple[str, str | None]:
    alternatives = [regexes] if isinstance(regexes, str) else regexes
    for end in range(1, len(text) + 1):
        found = [
            (match.start(), match.end(), regex)
            for regex in alternatives
            if (match := re.search(regex, text[:end]))
        ]
        if found:
            start, stop, regex = min(found)
            return text[: stop if keep else start], regex
    return text, None


def events(response: httpx.Response) -> list[Any]:
    return [msgspec.json.decode(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]


async def test_whole_and_streamed() -> None:
    async with (
        Engine(num_threads=1, max_running_requests=8) as engine,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(engine.asgi()), base_url="http://here", timeout=60
        ) as client,
    ):
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        free = (await client.post("/generate", json={"text": PROMPT, "sampling_params": sampling})).json()[
            "text"
        ]
        for regexes in REGEXES:
            for keep in (False, True):
                text, matched = cut(regexes, free, keep)
                body = {
                    "text": PROMPT,
                    "sampling_params": sampling | {"stop_regex": regexes, "no_stop_trim": keep},
                }
                answer = (await client.post("/generate", json=body)).json()
                assert (answer["text"], answer["meta_info"]["finish_reason"].get("matched")) == (
                    text,
                    matched,
                )
                last = events(await client.post("/generate", json=body | {"stream": True}))[-1]
                assert (last["text"], last["meta_info"]["finish_reason"]) == (
                    text,
                    answer["meta_info"]["finish_reason"],
                )
            text, matched = cut(regexes, free, False)
            body = {
                "prompt": PROMPT,
                "max_tokens": 40,
                "temperature": 0,
                "ignore_eos": True,
                "stop_regex": regexes,
            }
            choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            assert (choice["text"], choice["matched_stop"], choice["finish_reason"]) == (
                text,
                matched,
                "stop" if matched else "length",
            )
            chunks = events(await client.post("/v1/completions", json=body | {"stream": True}))
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        for path, field, body in (
            (
                "/generate",
                "sampling_params.stop_regex",
                {"text": "a", "sampling_params": {"stop_regex": "a("}},
            ),
            ("/v1/completions", "stop_regex", {"prompt": "a", "stop_regex": ["b", "a("]}),
            (
                "/v1/chat/completions",
                "stop_regex",
                {"messages": [{"role": "user", "content": "a"}], "stop_regex": "a("},
            ),
        ):
            error = (await client.post(path, json=body)).json()["error"]
            assert error["param"] == field and "missing ): a(" in error["message"]
