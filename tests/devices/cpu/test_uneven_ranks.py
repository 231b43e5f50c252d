"""Ranks that do not divide what a model has: heads, key/value heads, channels, experts' inner sizes and the
vocabulary. Tokens are those of transformers, in fp32, over gloo."""

from pathlib import Path
from typing import Any

import pytest

from tests.devices.cpu.ranks import RunRanks
from tests.devices.cpu.tp_rank import PROMPTS
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise
from tests.models.reference import Reference

NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 72}
SIX = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
INNER = {"intermediate_size": 90}
MAMBA2 = {"mamba_n_heads": 9, "mamba_n_groups": 3, "mamba_d_head": 16}
DELTA = {"linear_num_key_heads": 5, "linear_num_value_heads": 10}
ZAMBA = {"hidden_size": 96, "intermediate_size": 100, "num_attention_heads": 6, "num_key_value_heads": 6}
ONE = {"num_hidden_layers": 1}
TWO = {"num_hidden_layers": 2}
MODELS: list[tuple[str, dict[str, Any]]] = [
    # heads as Qwen2.5 0.5B has them: 14, of which 7 share keys and values
    ("qwen2", INNER | {"num_attention_heads": 14, "hidden_size": 112, "num_key_value_heads": 2}),
    ("qwen2", {"num_attention_heads": 5, "hidden_size": 80, "num_key_value_heads": 1, "vocab_size": 261}),
    ("llama", SIX | INNER | {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", NINE | INNER),
    ("gemma2", NINE | ONE),
    ("starcoder2", SIX | INNER | ONE),
]
NORMED: list[tuple[str, dict[str, Any]]] = [  # sums over the heads of all ranks
    ("olmo2", SIX | ONE),
    ("minimax_m2", NINE | {"num_hidden_layers": 1, "intermediate_size": 20}),
    ("cohere", SIX | ONE),
    ("step3", {}),
    ("gemma3n", SIX),
    ("gemma4", {"num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 1}),
]
EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_moe", SIX | ONE | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 36}),
    ("gpt_oss", NINE | ONE | {"intermediate_size": 20}),
    ("deepseek_v2", TWO | {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}),
    ("deepseek_v3", TWO | {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 50}),
]
RECURRENT: list[tuple[str, dict[str, Any]]] = [
    ("bamba", MAMBA2 | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 72}),
    ("qwen3_next", DELTA | NINE),
    ("falcon_mamba", {"hidden_size": 45}),
    ("lfm2", SIX),
    ("zamba2", ZAMBA),
]


def same_as_transformers(sizes: tuple[int, ...], models: list[Any], folder: Path, run: RunRanks) -> None:
    """Two greedy prompts of each model, in the company of a random one, on as many ranks."""
    folders = [make_checkpoint(family, folder / str(i), **more) for i, (family, more) in enumerate(models)]
    references = [Reference(one) for one in folders]
    for size in sizes:
        ranks = run(size, folders, folder)
        for reference, (first, *others) in zip(references, zip(*ranks, strict=True), strict=True):
            for prompt, tokens in zip(PROMPTS[:2], first["tokens"], strict=False):
                found = tokens[len(prompt) :]
                assert len(found) > 8 and found == reference.greedy(prompt, len(found))
            assert all(other["last"] == first["last"] for other in others)
            assert all(0 < other["bytes"] <= first["bytes"] for other in others), "rank 0 has most"


def test_heads_channels_and_vocabularies(tmp_path: Path, run_ranks: RunRanks) -> None:
    same_as_transformers((2, 3, 4), MODELS, tmp_path, run_ranks)


@pytest.mark.full
def test_norms_over_the_heads_of_all_ranks(tmp_path: Path, run_ranks: RunRanks) -> None:
    same_as_transformers((2, 4), NORMED, tmp_path, run_ranks)


def test_experts(tmp_path: Path, run_ranks: RunRanks) -> None:
    same_as_transformers((3, 4), EXPERTS, tmp_path, run_ranks)


def test_recurrent_layers(tmp_path: Path, run_ranks: RunRanks) -> None:
    same_as_transformers((2, 4), RECURRENT, tmp_path, run_ranks)


@pytest.mark.parametrize("name", ["awq", "gptq order", "ct fp8 weights", "ct int4 zeros"])
def test_quantized_weights(name: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    """Groups that a split cuts become smaller ones of the same scale."""
    plain = make_checkpoint("qwen2", tmp_path / "plain", **SIX, intermediate_size=400)
    quantise(plain, tmp_path, name)
    reference = Reference(tmp_path / "meant")
    for size in (2, 3):
        first = run_ranks(size, [tmp_path / "quantised"], tmp_path)[0][0]
        for prompt, tokens in zip(PROMPTS[:2], first["tokens"], strict=False):
            found = tokens[len(prompt) :]
            assert found == reference.greedy(prompt, len(found))
