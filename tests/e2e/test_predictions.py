"""OpenAI's `prediction` through the whole stack: the answer is what it is without, in fewer steps."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime import Engine
from tests.models.make import make_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("drafts_pay")]

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 4096}
QUESTION = [{"role": "user", "content": "Write about a fox."}]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_next", tmp_path_factory.mktemp("hybrid"))


async def asked(engine: Engine, **fields: Any) -> tuple[str, dict[str, int], int]:
    """-> the text of a chat's answer, the details of its usage, and the steps that it took"""
    totals = engine._core.replicas[0].scheduler.totals
    before = totals.steps
    body = {"model": "pocket", "messages": QUESTION, "max_tokens": 80, "ignore_eos": True, "temperature": 0}
    client = httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://here")
    async with client:
        answer = await client.post("/v1/chat/completions", json=body | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    details = found["usage"]["completion_tokens_details"]
    return found["choices"][0]["message"]["content"], details, totals.steps - before


def predicted(text: str) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
async def test_a_prediction_saves_steps(algorithm: str | None) -> None:
    async with Engine(model_path="pocket", **OPTIONS, speculative_algorithm=algorithm) as engine:
        for sampling in ({}, {"temperature": 0.8, "seed": 3, "cache_salt": "other"}):
            text, _, steps = await asked(engine, speculation={"enabled": False}, **sampling)
            edited = text[: len(text) // 2] + " WRONG " + text[len(text) // 2 :]
            parts = {"type": "content", "content": [{"type": "text", "text": edited}]}
            for prediction in (predicted(text), {"prediction": parts}):
                again, details, fewer = await asked(engine, **prediction, **sampling)
                assert again == text and fewer < steps * 0.6
                assert details["accepted_prediction_tokens"] > steps - fewer - 5
            off, details, slow = await asked(
                engine, **predicted(text), speculation={"enabled": False}, **sampling
            )
            assert off == text and "accepted_prediction_tokens" not in details and slow > steps * 0.9


async def test_what_never_comes_is_rejected() -> None:
    async with Engine(model_path="pocket", **OPTIONS) as engine:
        text, details, _ = await asked(engine)
        assert "rejected_prediction_tokens" not in details
        other, details, _ = await asked(engine, **predicted(text[:12] + "zzzz qqqq " * 40))
        assert other == text and details["rejected_prediction_tokens"] > 0
        assert details["accepted_prediction_tokens"] < 12


async def test_a_model_with_recurrent_layers(hybrid: Path) -> None:
    """Texts of a random model are no texts, so the prediction is only its beginning."""
    async with Engine(model_path=str(hybrid), context_length=256, **OPTIONS) as engine:
        text, _, _ = await asked(engine, model=str(hybrid))
        again, details, _ = await asked(engine, model=str(hybrid), **predicted(text))
        assert again == text and details["rejected_prediction_tokens"] + details["accepted_prediction_tokens"]


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "other", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction"),
    ],
)
async def test_other_predictions_are_refused(prediction: dict[str, Any], message: str) -> None:
    async with Engine(model_path="pocket", **OPTIONS) as engine:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(engine.asgi()), base_url="http://here")
        async with client:
            body = {"model": "pocket", "messages": QUESTION, "prediction": prediction}
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and message in answer.text
