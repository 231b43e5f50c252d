"""config.json with all its aliases, and the errors of those that cannot be served."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ModelError
from runtime.models.config.model_config import ModelConfig, read_config
from runtime.models.config.moe_config import Routing

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
V2 = V3 | {"architectures": ["DeepseekV2ForCausalLM"]}
QWEN = {"architectures": ["Qwen2ForCausalLM"]}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(BASE | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            {
                "head_dim": 16,
                "num_kv_heads": 2,
                "qkv_bias": False,
                "windows": (0, 0, 0),
                "context_len": 128,
                "dtype": None,
                "is_tied": False,
            },
        ),
        ({"num_key_value_heads": None, "head_dim": None}, {"num_kv_heads": 4, "head_dim": 16}),
        ({"head_dim": 32, "torch_dtype": "bfloat16"}, {"head_dim": 32, "dtype": "bfloat16"}),
        ({"dtype": "float16"}, {"dtype": "float16"}),
        ({"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
        ({"sliding_window": 8}, {"windows": (0, 0, 0)}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, {"windows": (8, 8, 8)}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {"windows": (0, 0, 0)}),
        ({"architectures": ["MistralForCausalLM"]}, {"windows": (4096, 4096, 4096)}),
        (QWEN | {"sliding_window": 8}, {"qkv_bias": True, "o_bias": False, "windows": (0, 0, 0)}),
        (
            QWEN | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            {"windows": (0, 0, 8)},
        ),
        (
            QWEN
            | {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            {"windows": (8, 0, 8)},
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"qk_norm": "head", "head_dim": 128, "qkv_bias": False}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"context_len": 512}),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}},
            {"context_len": 256},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            {"context_len": 256},
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                }
            },
            {"context_len": 128},
        ),
        ({"eos_token_id": [2, 3], "bos_token_id": 1}, {"eos_ids": (2, 3), "bos_id": 1}),
        ({"eos_token_id": None}, {"eos_ids": (), "bos_id": None}),
    ],
)
def test_reads(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = read(tmp_path, **changes)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False)),
        ({"num_experts": None, "num_local_experts": 8}, (True, True, True)),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], layers: tuple[bool, ...], tmp_path: Path) -> None:
    moe = read(tmp_path, **(MOE | changes)).moe
    assert moe is not None and (moe.layers, moe.num_experts, moe.routing.top_k) == (layers, 8, 2)
    assert read(tmp_path, **(MOE | changes | {"architectures": ["Qwen3ForCausalLM"]})).moe is None


def test_latents_and_groups(tmp_path: Path) -> None:
    changes = {
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    }
    config = read(tmp_path, **(V3 | changes))
    assert config.moe is not None and config.mla is not None
    assert (config.num_kv_heads, config.head_dim, config.draft_layers, config.mla.is_interleaved) == (
        1,
        4,
        1,
        True,
    )
    assert config.moe.layers == (False, True, True) and config.moe.has_bias and config.moe.shared_size == 24
    assert config.moe.routing == Routing(
        top_k=2,
        score="sigmoid",
        num_groups=4,
        top_groups=2,
        group_score="two largest",
        normalizes=True,
        scale=2.5,
    )
    older = read(
        tmp_path, **(V2 | {"n_group": 4, "topk_group": 2, "topk_method": "greedy", "norm_topk_prob": False})
    ).moe
    assert older is not None and older.routing == Routing(top_k=2)
    grouped = read(
        tmp_path, **(V2 | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"})
    ).moe
    assert grouped is not None and grouped.routing == Routing(top_k=2, num_groups=4, top_groups=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_both_forms_of_rope(changes: dict[str, Any], tmp_path: Path) -> None:
    rope = read(tmp_path, **changes).rope
    assert (rope.rope_theta, rope.rope_type, rope.factor, rope.max_position_embeddings) == (
        5e5,
        "linear",
        4.0,
        128,
    )


def test_yarn_factor_follows_from_lengths(tmp_path: Path) -> None:
    rope = read(tmp_path, rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 32}).rope
    assert rope.factor == 4.0


def test_generation_config(tmp_path: Path) -> None:
    """Its eos ids come first, then those of config.json that are not among them."""
    config = read(
        tmp_path, {"eos_token_id": [7, 2], "temperature": 0.6, "top_k": 20, "do_sample": True}, eos_token_id=2
    )
    assert config.eos_ids == (7, 2)
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["NothingForCausalLM"]},
            ["NothingForCausalLM", "BertModel", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"],
        ),
        ({"architectures": None}, ["architectures", "LlamaForCausalLM"]),
        ({"hidden_size": "big"}, ["config.json", "hidden_size"]),
        ({"num_hidden_layers": 0}, ["config.json", "num_hidden_layers"]),
        ({"vocab_size": -1}, ["config.json", "vocab_size"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3", "num_attention_heads 4"]),
        ({"hidden_size": 66}, ["hidden_size 66", "head_dim"]),
        ({"head_dim": 15}, ["head_dim 15"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["bitsandbytes", "4 nor 8 bits"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "'bits'"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5, "group_size": 128}}, ["gptq", "5 bits"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["longrope", "short_factor", "long_factor"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, ["spiral", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, ["rope", "factor"]),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            ["partial_rotary_factor"],
        ),
        (QWEN | {"use_sliding_window": True, "layer_types": ["full_attention"]}, ["layer_types", "3"]),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, ["number of experts"]),
        (MOE | {"num_experts_per_tok": 9}, ["num_experts_per_tok 9", "8 experts"]),
        (V3 | {"kv_lora_rank": None}, ["kv_lora_rank"]),
        (V3 | {"qk_rope_head_dim": 7}, ["qk_rope_head_dim 7", "odd"]),
        (V3 | {"attention_bias": True, "q_lora_rank": None}, ["attention_bias", "q_lora_rank"]),
        (V3 | {"n_group": 3}, ["n_group", "8 experts"]),
        (
            V3 | {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            ["topk_group 1", "num_experts_per_tok 3"],
        ),
        (V3 | {"n_group": 8, "topk_group": 8}, ["n_group 8", "less than two"]),
        (V3 | {"moe_layer_freq": 2}, ["moe_layer_freq 2"]),
        (V3 | {"scoring_func": "softmax"}, ["scoring_func softmax", "sigmoid"]),
        (V3 | {"topk_method": "greedy"}, ["topk_method greedy", "noaux_tc"]),
        (V2 | {"topk_method": "noaux_tc"}, ["topk_method noaux_tc", "group_limited_greedy"]),
        (V2 | {"norm_topk_prob": True}, ["norm_topk_prob True"]),
        (MOE | {"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True}, ["layer_types"]),
    ],
)
def test_refuses(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, **changes)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_refuses_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_imports_no_torch() -> None:
    modules = "runtime.models.config.model_config, runtime.devices.cpu.facts"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_values_that_operators_put_in_place_of_others(tmp_path: Path) -> None:
    assert read(tmp_path).context_len == 128
    found = read_config(tmp_path, overrides={"max_position_embeddings": 64, "torch_dtype": "float16"})
    assert (found.context_len, found.dtype) == (64, "float16")
    with pytest.raises(ModelError, match=r"^--json-model-override-args \(num_attention_heads\): config.json"):
        read_config(tmp_path, overrides={"num_attention_heads": "many"})


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": ["full", "shared", "full"]},
        {"index_topk_freq": 2},
        {"index_topk_pattern": "FSF"},
        {"index_topk_pattern": ["full", "shared", "full"]},
    ],
)
def test_indexers_that_layers_share_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
    glm = V3 | sizes | {"architectures": ["GlmMoeDsaForCausalLM"]}
    mla = read(tmp_path, **glm).mla
    assert mla is not None and mla.indexer is not None and mla.indexer.is_interleaved
    with pytest.raises(ModelError, match="indexer_types"):
        read(tmp_path, **glm, **changes)
