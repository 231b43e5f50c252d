"""Two ranks over gloo, in processes of their own, against one rank: the same tokens in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.devices.single_rank import SingleRank
from runtime.models.config.model_config import read_config
from runtime.options.model_sizes import float_bytes, weight_count
from tests.devices.cpu.ranks import RunRanks
from tests.models.make import make_checkpoint

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    # one key/value head on both ranks; an odd vocabulary
    ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen3", {"num_hidden_layers": 1}),
    ("gemma2", {"num_hidden_layers": 1}),
    ("gpt_oss", {"num_hidden_layers": 1}),
    ("cohere", {"num_hidden_layers": 1}),
    ("glm4", {"num_hidden_layers": 1}),
    ("olmo2", {"num_hidden_layers": 1}),
    ("olmo2", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    ("phi3", {"num_hidden_layers": 1}),
    ("starcoder2", {"num_hidden_layers": 1}),
    ("gemma3n", {}),
    ("gemma4", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("falcon", {"num_hidden_layers": 1}),
    ("nemotron", {"num_hidden_layers": 1}),
    ("stablelm", {"num_hidden_layers": 1}),
]
MOE_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_moe", {"num_hidden_layers": 1}),
    ("deepseek_v3", {"num_hidden_layers": 2}),
    ("deepseek_v2", {"num_hidden_layers": 1, "q_lora_rank": None, "first_k_dense_replace": 0}),
    ("qwen3_moe", {"num_key_value_heads": 1, "decoder_sparse_step": 2, "stacked": True}),
    ("phimoe", {"num_hidden_layers": 1}),  # routing, norms and a head of its own
    ("minimax_m2", {"num_hidden_layers": 1}),  # norms of whole projections
    ("deepseek_v32", {"num_hidden_layers": 2}),
]


def test_each_method_on_two_ranks(tmp_path: Path, run_ranks: RunRanks) -> None:
    assert run_ranks(2, [], tmp_path) == [[], []], (
        "ranks that have no models try them, and say what was wrong"
    )


def test_two_ranks_equal_one(tmp_path: Path, run_ranks: RunRanks) -> None:
    folders = [
        make_checkpoint(family, tmp_path / str(i), **overrides)
        for i, (family, overrides) in enumerate(MODELS)
    ]
    (alone,), (first, second) = run_ranks(1, folders, tmp_path), run_ranks(2, folders, tmp_path)
    assert len(alone) == len(first) == len(second) == len(MODELS)
    for one, zero, other in zip(alone, first, second, strict=True):
        assert zero["tokens"] == one["tokens"] and zero["logprobs"] == pytest.approx(
            one["logprobs"], abs=2e-3
        )
        assert zero["last"] == other["last"] == one["last"] == [tokens[-1] for tokens in one["tokens"]]
        assert zero["bytes"] == other["bytes"] < 0.75 * one["bytes"]


def test_experts_are_spread_and_split(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Whole experts on each rank, halves of each on both, and both at once on four ranks."""
    folders = [
        make_checkpoint(family, tmp_path / str(i), **overrides)
        for i, (family, overrides) in enumerate(MOE_MODELS)
    ]
    (alone,) = run_ranks(1, folders, tmp_path)
    for size, ep_size in ((2, 1), (2, 2), (4, 2)):
        ranks = run_ranks(size, folders, tmp_path, ep_size)
        for one, *others in zip(alone, *ranks, strict=True):
            assert others[0]["tokens"] == one["tokens"] and others[0]["logprobs"] == pytest.approx(
                one["logprobs"], abs=2e-3
            )
            assert others[0]["counts"] == one["counts"] and sum(one["counts"])
            assert all(rank["last"] == one["last"] and rank["bytes"] == others[0]["bytes"] for rank in others)
            assert others[0]["bytes"] < (0.8 if size == 2 else 0.6) * one["bytes"]


@pytest.mark.parametrize(("size", "mode"), [(2, "normal"), (4, "auto")])
def test_tokens_travel_to_their_experts(size: int, mode: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    """One of the three sequences goes on alone, so some parts are empty."""
    folders = [
        make_checkpoint(family, tmp_path / str(i), **overrides)
        for i, (family, overrides) in enumerate(MOE_MODELS[:3])
    ]
    folders.append(make_checkpoint("qwen3_moe", tmp_path / "dense", mlp_only_layers=[0], attention_bias=True))
    (alone,), ranks = run_ranks(1, folders, tmp_path), run_ranks(size, folders, tmp_path, size, mode=mode)
    for one, *others in zip(alone, *ranks, strict=True):
        assert others[0]["tokens"] == one["tokens"] and others[0]["logprobs"] == pytest.approx(
            one["logprobs"], abs=2e-3
        )
        assert others[0]["counts"] == one["counts"] and sum(one["counts"])
        assert all(rank["last"] == one["last"] and rank["bytes"] == others[0]["bytes"] for rank in others)
    for folder, found in zip(folders, ranks[0], strict=True):  # shared experts are whole
        config = read_config(folder)
        assert found["bytes"] == 4 * weight_count(config, size, size, 1) + float_bytes(config)


def test_two_ranks_with_graphs_equal_one_without(tmp_path: Path, run_ranks: RunRanks) -> None:
    folders = [make_checkpoint(family, tmp_path / family) for family in ("llama", "qwen3_moe")]
    (alone,) = run_ranks(1, folders, tmp_path)
    for pair in (
        run_ranks(2, folders, tmp_path, 2, "taped"),
        run_ranks(2, folders, tmp_path, 2, "taped", "auto"),
    ):
        for one, *others in zip(alone, *pair, strict=True):
            assert (
                others[0]["tokens"] == one["tokens"] and others[0]["last"] == others[1]["last"] == one["last"]
            )
            assert others[0]["counts"] == one["counts"]


def test_alone() -> None:
    x = torch.arange(3)
    ranks = SingleRank()
    results = (
        ranks.all_reduce(x),
        ranks.all_gather(x, 0),
        ranks.reduce_scatter(x),
        ranks.all_to_all(x),
        ranks.broadcast(x),
    )
    assert all(torch.equal(x, y) for y in results)
