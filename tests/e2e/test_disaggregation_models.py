"""Prompts and answers on different servers, for caches beside plain pages: of draft models, of layers with a
sliding window; and grammars and log probabilities, of which nothing travels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine
from runtime.messages.transfer import Transfer
from tests.e2e.disaggregated import (
    COUNT,
    FULL,
    KEY,
    PROMPT,
    TWO,
    both,
    counts,
    key_options,
    server,
    source_of,
)
from tests.models.make import make_checkpoint
from tests.models.make_heads import make_eagle3
from tests.models.reference import Reference

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return key_options(tmp_path, KEY)


@pytest.mark.usefixtures("drafts_pay")
@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
async def test_pages_of_draft_models(algorithm: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """They travel with those of the model, so drafts are as good as on one server."""
    target = make_checkpoint("qwen3", tmp_path / "target", num_hidden_layers=6)
    draft = target if algorithm == "STANDALONE" else make_eagle3(tmp_path / "head")
    options |= {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        "max_running_requests": 4,
    }
    expected = Reference(target).greedy(PROMPT, 24)

    async def steps(engine: Engine, ask: Callable[[], Any]) -> int:
        replica = engine._core.replicas[0]
        assert replica.scheduler is not None
        before = replica.scheduler.totals.accepted_drafts
        assert await ask() == expected
        return replica.scheduler.totals.accepted_drafts - before

    async with server("prefill", target, **options) as prefill:
        async with server("decode", target, **options | TWO) as (engine, decode):

            async def ask() -> Any:
                tokens, cached = await both(prefill, decode, PROMPT, count=24)
                assert cached == FULL and not counts(engine).failures
                return tokens

            async def ask_one() -> Any:
                return (await prefill[1](PROMPT, None, 24))[0]

            apart = await steps(engine, ask)
        # the first token comes from the other server, so there is one less to draft
        assert 0 <= await steps(prefill[0], ask_one) - apart <= 1
        assert apart > 0 or algorithm == "EAGLE3"  # a random head hits by chance


async def test_sliding_windows(tmp_path: Path, options: dict[str, Any]) -> None:
    layers = ["full_attention", "sliding_attention"]
    model = make_checkpoint(
        "qwen2", tmp_path / "model", use_sliding_window=True, layer_types=layers, sliding_window=13
    )
    options["disable_hybrid_swa_memory"] = True
    async with server("prefill", model, **options) as prefill:
        async with server("decode", model, **options | TWO) as (engine, decode):
            assert await both(prefill, decode, PROMPT) == (Reference(model).greedy(PROMPT, COUNT), FULL)
            assert not counts(engine).failures


async def test_grammars_and_first_log_probabilities(
    checkpoint: Checkpoint, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one server, but for rounding."""
    monkeypatch.setattr("runtime.transfer.service.ROOM_S", 0.1)
    body: dict[str, Any] = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": COUNT, "regex": "[0-9]{3}[a-z]{4}"},
        "return_logprob": True,
        "top_logprobs_num": 3,
    }
    async with server("prefill", checkpoint("llama"), **options) as prefill:
        alone = await prefill[1].post(body, None)
        async with server("decode", checkpoint("llama"), **options) as (engine, decode):
            other = await decode.post(body, Transfer(1, source_of(prefill[0])))
            assert counts(engine).failures == 1  # its other half did not come
            await prefill[1](PROMPT[::-1], Transfer(2))
            body["input_ids"] = PROMPT[::-1]
            apart = await decode.post(body, Transfer(2, source_of(prefill[0])))
            assert counts(engine).failures == 1 and apart["meta_info"]["cached_tokens"] == FULL
        together = await prefill[1].post(body, None)
        for one, two in ((alone, other), (together, apart)):
            assert one["output_ids"] == two["output_ids"] and one["text"][:3].isdigit()
            first, second = (answer["meta_info"]["output_token_logprobs"] for answer in (one, two))
            assert [pair[0] for pair in first] == pytest.approx([pair[0] for pair in second], abs=1e-5)
