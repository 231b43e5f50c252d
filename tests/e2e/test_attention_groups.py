"""Data-parallel attention over gloo: every answer is that of transformers, whatever happens to a rank."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import load_file, save_file

from runtime import Engine
from runtime.errors import OptionsError, StartError
from runtime.messages.requests import TokenLogprob
from runtime.options.facts import this_machine
from runtime.options.footprint import footprint, stored_weights
from tests.e2e.conftest import Generate
from tests.e2e.greedy import greedy, greedy_at_once
from tests.metrics.read import sample
from tests.models.make import make_checkpoint
from tests.models.make_heads import make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.models.reference import Reference

pytestmark = pytest.mark.anyio

COUNT = 16
PROMPTS = [list(range(5, 17)), [3, 1, 4, 1, 5], list(range(40, 70)), [7] * 9, [1, 2, 3] * 4]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 96,
    "page_size": 4,
    "random_seed": 1,
    "max_running_requests": 4,
    "standby_ranks": 0,
    "enable_dp_attention": True,
    "data_parallel_size": 2,
    "tensor_parallel_size": 2,
    "load_balance_method": "round_robin",
}


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {}, {}),
        ("qwen3_moe", {"mlp_only_layers": [0]}, {"moe_dense_tp_size": 1, "chunked_prefill_size": 7}),
        ("deepseek_v3", {}, {"tensor_parallel_size": 4, "expert_parallel_size": 4}),
        ("qwen3", {"tie_word_embeddings": False}, {"enable_dp_lm_head": True, "tensor_parallel_size": 4}),
        ("deepseek_v3", {}, {"moe_a2a_backend": "deepep", "tensor_parallel_size": 4}),
        ("deepseek_v32", {}, {"moe_a2a_backend": "deepep"}),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0]},
            {"moe_a2a_backend": "deepep", "deepep_mode": "normal", "moe_dense_tp_size": 1},
        ),
        ("qwen3", {}, {"enable_two_batch_overlap": True, "tensor_parallel_size": 4}),
        ("llama", {}, {"enable_hierarchical_cache": True, "hicache_ratio": 3.0, "max_total_tokens": 160}),
        (
            "qwen3_moe",
            {"num_hidden_layers": 4, "mlp_only_layers": [0]},
            {"pipeline_parallel_size": 2, "chunked_prefill_size": 7, "enable_two_batch_overlap": True},
        ),
        (
            "deepseek_v3",
            {},
            {
                "moe_a2a_backend": "deepep",
                "enable_two_batch_overlap": True,
                "enable_single_batch_overlap": True,
                "chunked_prefill_size": 7,
            },
        ),
    ],
    ids=str,
)
async def test_answers_are_those_of_transformers(
    family: str, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, **sizes)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:
        assert await greedy_at_once(engine, PROMPTS, COUNT) == expected
        for i in (0, 1):  # by one group, then by the other, while each time the other one is idle
            assert await greedy(engine, PROMPTS[i], COUNT) == expected[i]
        core = engine._core
        assert [replica.num_steps > 0 for replica in core.replicas] == [True, True]
        found = footprint(core.plan, core.model, this_machine(), stored_weights(folder))
        readies = core.replicas[0].supervisor.readies
        weights = {ready.weights_bytes for ready in readies}
        assert found.weights_bytes in weights and (len(weights) == 1 or "pipeline_parallel_size" in options)
        assert {ready.pages_bytes // ready.num_pages for ready in readies} == {4 * found.token_bytes}


TREES = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


@pytest.mark.usefixtures("drafts_pay")
@pytest.mark.parametrize(
    ("family", "algorithm", "options"),
    [
        ("llama", "NGRAM", {}),
        ("qwen3_moe", "NGRAM", {"tensor_parallel_size": 4, "moe_a2a_backend": "deepep"}),
        ("llama", "STANDALONE", {"tensor_parallel_size": 4}),
        ("llama", "STANDALONE", TREES),
        ("llama", "EAGLE3", {}),
        ("deepseek_v3", "NEXTN", {"moe_a2a_backend": "deepep"}),
        (
            "deepseek_v3",
            "NEXTN",
            {"tensor_parallel_size": 4, "expert_parallel_size": 4, "chunked_prefill_size": 7},
        ),
    ],
    ids=str,
)
async def test_drafts_of_groups(family: str, algorithm: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A group drafts by itself, also while the other one has nothing to do."""
    sizes = {"num_hidden_layers": 4} if algorithm == "EAGLE3" else {}
    folder = make_checkpoint(family, tmp_path / "model", **sizes)
    reference = Reference(folder)
    prompts = [[*prompt, *prompt] for prompt in PROMPTS]
    expected = [reference.greedy(prompt, 2 * COUNT) for prompt in prompts]
    draft = {"speculative_algorithm": algorithm}
    if algorithm == "NEXTN":
        add_next_token_layers(folder)
    elif algorithm != "NGRAM":
        head = make_eagle3(tmp_path / "head") if algorithm == "EAGLE3" else folder
        draft["speculative_draft_model_path"] = str(head)
    async with Engine(model_path=str(folder), **(OPTIONS | draft | options)) as engine:
        assert await greedy_at_once(engine, prompts, 2 * COUNT) == expected
        for i in (0, 1):
            assert await greedy(engine, prompts[i], 2 * COUNT) == expected[i]
        drafts, accepted = (
            sample(engine.metrics(), f"runtime_{kind}_tokens_total") for kind in ("draft", "accepted_draft")
        )
        assert drafts > 0
        if algorithm == "STANDALONE":
            share = 0.25 if "speculative_eagle_topk" in options else 0.6  # of a tree a way at most is right
            assert accepted > share * drafts, "it drafts what it will sample"
        core = engine._core
        found = footprint(core.plan, core.model, this_machine(), stored_weights(folder))
        readies = core.replicas[0].supervisor.readies
        assert max(ready.weights_bytes for ready in readies) == found.weights_bytes
        assert {ready.pages_bytes // ready.num_pages for ready in readies} == {4 * found.token_bytes}


async def test_a_head_without_an_output_wants_one_in_each_group(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=4)
    head = make_eagle3(tmp_path / "head", has_vocab=False)
    written = json.loads((head / "config.json").read_text())
    del written["draft_vocab_size"]
    (head / "config.json").write_text(json.dumps(written))
    tensors = load_file(head / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "lm_head" not in name}, head / "model.safetensors")
    draft = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}
    with pytest.raises(StartError, match="divided over all attention groups; add --enable-dp-lm-head"):
        async with Engine(model_path=str(target), **(OPTIONS | draft)):
            pass


@pytest.mark.usefixtures("drafts_pay")
@pytest.mark.parametrize("draft", [{}, {"speculative_algorithm": "NGRAM"}], ids=["plain", "drafts"])
async def test_a_rank_that_is_killed_changes_no_answer(
    draft: dict[str, Any], checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    """A rank of one group, then of the other, dies: both groups pause and go on."""
    expected = [reference("llama", prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(checkpoint("llama")), **(OPTIONS | draft)) as engine:
        supervisor = engine._core.replicas[0].supervisor
        assert supervisor is engine._core.replicas[1].supervisor
        for victim in (0, 1):
            found: list[list[list[int]]] = []

            async def put(found: list[list[list[int]]] = found) -> None:
                found.append(await greedy_at_once(engine, PROMPTS, COUNT))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put)
                while engine.load().running < len(PROMPTS):
                    await anyio.sleep(0.001)
                os.kill(supervisor.ranks.pids[victim], signal.SIGKILL)
            assert found == [expected]
        assert sample(engine.metrics(), "runtime_rank_restarts_total") == 2


def numbers(logprobs: Sequence[TokenLogprob]) -> list[float]:
    return [one.logprob for one in logprobs if one.logprob is not None]


async def test_log_probabilities_of_both_groups(checkpoint: Callable[[str], Path]) -> None:
    """They are as on one rank, by a head that all ranks share and by one of each group."""
    one = {"enable_dp_attention": False, "data_parallel_size": 1, "tensor_parallel_size": 1}
    found = []
    for options in (one, {}, {"enable_dp_lm_head": True}):
        async with Engine(model_path=str(checkpoint("llama")), **(OPTIONS | options)) as engine:
            each = []
            for prompt in PROMPTS[:2]:  # one in each group
                answer = await engine.generate(
                    prompt, temperature=0, ignore_eos=True, max_new_tokens=4, logprobs=True, prompt_logprobs=2
                )
                assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(prompt)
                each += [answer.token_ids, numbers(answer.logprobs), numbers(answer.prompt_logprobs[1:])]
            found.append(each)
    for other in found[1:]:
        for ours, alone in zip(other, found[0], strict=True):
            assert ours == pytest.approx(alone, abs=1e-4) and len(ours) > 3


async def test_what_groups_do_not_have_is_refused(checkpoint: Callable[[str], Path]) -> None:
    for options, why in (
        ({"tensor_parallel_size": 3}, "does not divide --tensor-parallel-size 3"),
        ({"data_parallel_size": 1}, "requires groups of ranks"),
        ({"moe_dense_tp_size": 1}, "this model has none"),
    ):
        with pytest.raises(OptionsError, match=why):
            async with Engine(model_path=str(checkpoint("llama")), **(OPTIONS | options)):
                pass
