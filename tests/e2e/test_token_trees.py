"""Answers that follow a tree of tokens (--tree-decode-config) are those of transformers where all other
tokens are masked, with and without drafts."""

import json
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import runtime
from runtime import Engine
from runtime.errors import InvalidRequest, OptionsError
from runtime.messages.constraint import Choice
from runtime.messages.requests import FinishReason

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("drafts_pay")]

POCKET = Path(runtime.__file__).parent / "pocket"
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 4096}
PROMPTS = [[5, 17 + i, 300 * i + 9] for i in range(4)]
START, END = 7, 40  # the end is none of the model's own


def random_tree(random: Random) -> dict[str, list[int]]:
    """Sequences of up to nine tokens, many of them without a choice."""
    found, keys = dict[str, list[int]](), [(str(START), 0)]
    for key, depth in keys:
        count = random.choice((1, 1, 3)) if depth else 6
        tokens = random.sample(range(100, 2500), count)
        found[key] = [*tokens, END] if depth > 3 and random.random() < 0.3 else tokens
        keys += [(f"{key}_{token}", depth + 1) for token in tokens if depth < 8]
    return found


@pytest.fixture(scope="module")
def tree() -> dict[str, list[int]]:
    return random_tree(Random(3))


@pytest.fixture(scope="module")
def path(tree: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tree") / "tree.json"
    path.write_text(json.dumps({"start_token_id": START, "end_token_id": END, "prefix_dict": tree}))
    return path


@pytest.fixture(scope="module")
def expected(tree: dict[str, list[int]]) -> list[list[int]]:
    """The answer to each prompt: always the likeliest of the tokens that the tree allows, up to END."""
    model = AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        answer: list[int] = []
        with torch.inference_mode():
            while True:
                logits = model(torch.tensor([prompt + answer])).logits[0, -1]
                allowed = tree.get("_".join(map(str, [START, *answer])), [END])
                token = max(allowed, key=lambda one: float(logits[one]))
                if token == END:
                    break
                answer.append(token)
        answers.append(answer)
    assert len({tuple(answer) for answer in answers}) > 1
    return answers


@pytest.mark.parametrize(
    "options", [{}, {"speculative_algorithm": "NGRAM"}, {"disable_jump_forward": True}], ids=str
)
async def test_answers_are_those_of_transformers(
    options: dict[str, Any], path: Path, expected: list[list[int]]
) -> None:
    found: list[list[int]] = [[] for _ in PROMPTS]
    async with Engine(model_path="pocket", tree_decode_config=str(path), **OPTIONS, **options) as engine:

        async def ask(i: int) -> None:
            answer = await engine.generate(PROMPTS[i], temperature=0, ignore_eos=i == 1, max_new_tokens=40)
            assert answer.finish is not None and answer.finish.reason == FinishReason.STOP
            found[i] = [token for token in answer.token_ids if token != END]

        async with anyio.create_task_group() as tasks:
            for i in range(len(PROMPTS)):
                tasks.start_soon(ask, i)
        assert found == expected
        with pytest.raises(InvalidRequest, match="constraint: all answers of this server follow"):
            await engine.generate("a", constraint=Choice(("yes",)))


async def test_sampled_answers_are_in_the_tree(tree: dict[str, list[int]], path: Path) -> None:
    """Those of chats as well, with calls of tools and reasoning among what is asked for."""
    async with Engine(model_path="pocket", tree_decode_config=str(path), **OPTIONS) as engine:
        seen = set()
        for seed in range(6):
            answer = await engine.generate("a", temperature=1.5, seed=seed, max_new_tokens=40)
            key = str(START)
            for token in answer.token_ids:
                assert token in tree.get(key, [END])
                key += f"_{token}"
            seen.add(key)
        assert len(seen) > 2
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
        body = {"model": "pocket", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
        client = httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://here")
        async with client:
            reply = await client.post("/v1/chat/completions", json=body | {"max_tokens": 40})
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree_decode_config": "none.json"}, "none.json can't be read"),
        ({"grammar_backend": "none"}, "--tree-decode-config masks tokens as grammars do"),
    ],
    ids=["no file", "no grammars"],
)
async def test_what_is_refused(options: dict[str, Any], message: str, path: Path) -> None:
    with pytest.raises(OptionsError, match=message):
        async with Engine(**({"model_path": "pocket", "tree_decode_config": str(path)} | OPTIONS | options)):
            pass
