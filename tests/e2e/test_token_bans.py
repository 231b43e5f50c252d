"""bad_words and allowed_token_ids through the whole runtime, and by each API."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime import Engine
from runtime.messages.constraint import Regex

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1}

pytestmark = pytest.mark.anyio


def has(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


@pytest.mark.parametrize(
    "more",
    [
        {"tp_size": 2},
        {"disable_overlap_schedule": True, "chunked_prefill_size": 2},
        {"max_total_tokens": 48, "page_size": 4, "schedule_conservativeness": 0.0},
    ],
    ids=str,
)
async def test_answers_keep_to_what_is_left(checkpoint: Callable[[str], Path], more: dict[str, Any]) -> None:
    async with Engine(model_path=str(checkpoint("llama")), **OPTIONS, **more) as engine:
        free = (await engine.generate([5, 6, 7], **GREEDY)).token_ids
        allowed = tuple(range(40, 60))
        answers = await engine.generate_n([5, 6, 7], allowed_token_ids=allowed, n=3, temperature=1, seed=1,
                                          max_new_tokens=24, ignore_eos=True)  # fmt: skip
        assert len(answers) == 3 and all(set(answer.token_ids) <= set(allowed) for answer in answers)
        at = next(i for i in range(1, 23) if engine._core.decode(free[i : i + 2]).isalnum())
        without = await engine.generate(
            [5, 6, 7], bad_words=[engine._core.decode(free[at : at + 2])], **GREEDY
        )
        assert not has(without.token_ids, free[at : at + 2])
        assert without.token_ids[: at + 1] == free[: at + 1]


async def test_the_apis(checkpoint: Callable[[str], Path]) -> None:
    async with (
        Engine(num_threads=1) as engine,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(engine.asgi()), base_url="http://here", timeout=60
        ) as http,
    ):

        async def text_of(path: str, body: dict[str, Any]) -> str:
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            if "choices" in answer:
                choice = answer["choices"][0]
                return str(choice["text"] if "text" in choice else choice["message"]["content"])
            if "output" in answer:
                return str(answer["output"][-1]["content"][0]["text"])
            return str(answer["text"])

        ends = {"temperature": 0, "ignore_eos": True}
        messages = [{"role": "user", "content": "Tell me a story"}]
        native = {"max_new_tokens": 30, **ends}
        requests: list[tuple[str, dict[str, Any], str | None]] = [
            ("/generate", {"text": "Once upon a time", "sampling_params": native}, "sampling_params"),
            ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 30, **ends}, None),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 30, **ends}, None),
            ("/v1/responses", {"input": "Tell me a story", "max_output_tokens": 30, **ends}, None),
        ]
        for path, body, field in requests:
            words = (await text_of(path, body)).split()
            banned = next(word for word in words if word.isalpha() and len(word) > 2)

            def put(body: dict[str, Any], field: str | None, **more: Any) -> dict[str, Any]:
                return body | more if field is None else body | {field: body[field] | more}

            assert banned not in (await text_of(path, put(body, field, bad_words=[banned]))).split()
            tokenized = (
                await http.post("/tokenize", json={"prompt": " the", "add_special_tokens": False})
            ).json()
            only = put(body, field, allowed_token_ids=tokenized["tokens"][:1], bad_words=[])
            assert len(set((await text_of(path, only)).split())) <= 1
            for more, name in (
                ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
                ({"allowed_token_ids": []}, "allowed_token_ids"),
                ({"bad_words": [""]}, "bad_words"),
            ):
                refused = await http.post(path, json=put(body, field, **more))
                assert refused.status_code == 400 and name in refused.text, (path, more, refused.text)


async def test_a_grammar_is_stronger() -> None:
    """Words that the grammar demands come although they are bad."""
    async with Engine(num_threads=1) as engine:
        rule = Regex("(the cat sat on the mat, ){2}the dog")
        bans: dict[str, Any] = {"bad_words": ["cat", "cat sat", "the dog"], "allowed_token_ids": [7, 8]}
        answer = await engine.generate("A", constraint=rule, temperature=0, **bans)
        assert answer.text == "the cat sat on the mat, the cat sat on the mat, the dog"


async def test_the_end_of_text_is_named() -> None:
    """finish_reason.matched is the id of the token that ended the text, as in SGLang; a stop token's too."""
    async with (
        Engine(num_threads=1) as engine,
        httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://here") as http,
    ):
        for params, matched in (
            ({"allowed_token_ids": [2]}, {"type": "stop", "matched": 2}),
            ({"allowed_token_ids": [9], "stop_token_ids": [9]}, {"type": "stop", "matched": 9}),
            ({"allowed_token_ids": [9], "max_new_tokens": 3}, {"type": "length", "length": 3}),
        ):
            answer = await http.post("/generate", json={"text": "a", "sampling_params": params})
            assert answer.json()["meta_info"]["finish_reason"] == matched
        body = {"prompt": "a", "allowed_token_ids": [2]}
        choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        assert (choice["finish_reason"], choice["matched_stop"], choice["text"]) == ("stop", 2, "")
