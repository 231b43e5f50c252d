"""The operator calls of a model of any size, from its config.json alone."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.ascend_operators import LAUNCHES

pytestmark = pytest.mark.ascend

QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = {  # 235B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_key_value_heads": 4,
    "num_hidden_layers": 94,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
ONE_LAYER = {"first_k_dense_replace": 0, "num_hidden_layers": 1}
SPREAD = ("--tp-size", "16", "--ep-size", "16")
INT8 = ("--quantization", "w8a8_int8")
INDEXER = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
WINDOWS = {
    "sliding_window": 1024,
    "use_sliding_window": True,
    "num_hidden_layers": 6,
    "layer_types": ["full_attention", "sliding_attention"] * 3,
}


def shown(folder: Path, config: dict[str, Any], *options: str) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.ascend.simulate",
            "--shapes",
            sys.executable,
            "-m",
            "tests.ascend.show_calls",
            str(folder),
            *options,
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_a_model_that_would_not_fit(tmp_path: Path) -> None:
    text = shown(tmp_path, QWEN3_32B, "--batch", "2", "--tp-size", "2")
    assert "a decode step of 2 sequences, 1001 tokens each\n# rank 0 of 2\n" in text
    assert (
        text.count("npu.npu_fused_infer_attention_score(") == 1
        and "actual_seq_lengths_kv=[1001,1001]" in text
    )
    layer = text[text.index("# 64 layers: full attention, dense\n") : text.index("\n\n# behind the layers")]
    assert layer.endswith("aten.mm(bf16[2,12800], bf16[12800,5120]nz~)\nhccl.all_reduce(bf16[2,5120])")
    assert "computed on the CPU" not in text


@pytest.mark.parametrize(
    ("config", "options", "launches"),
    [
        (QWEN3_32B, ("--tp-size", "16"), LAUNCHES["heads", "dense", False]),
        (QWEN3_32B, ("--npu-nz-cache", "--tp-size", "16"), 11),
        pytest.param(QWEN3_32B, (*INT8, "--npu-nz-cache", "--tp-size", "16"), 12, marks=pytest.mark.full),
        pytest.param(QWEN3_32B | QWEN3_MOE, ("--npu-nz-cache", *SPREAD), 15, marks=pytest.mark.full),
        (QWEN3_32B, (*INT8, "--tp-size", "16"), LAUNCHES["heads", "dense", True]),
        (QWEN3_32B | QWEN3_MOE, SPREAD, LAUNCHES["heads", "experts", False]),
        (DEEPSEEK_V3 | ONE_LAYER, SPREAD, LAUNCHES["latents", "experts", False]),
        (DEEPSEEK_V3 | ONE_LAYER, (*INT8, *SPREAD), LAUNCHES["latents", "experts", True]),
        (DEEPSEEK_V3 | ONE_LAYER | INDEXER, SPREAD, LAUNCHES["sparse latents", "experts", False]),
        (DEEPSEEK_V3 | ONE_LAYER, ("--npu-mla-prolog", *SPREAD), 18),
    ],
    ids=[
        "dense",
        "dense, NZ",
        "W8A8, NZ",
        "experts, NZ",
        "W8A8",
        "experts",
        "latents",
        "latents, W8A8",
        "sparse latents",
        "fused latents",
    ],
)
def test_launches_of_a_layer(
    config: dict[str, Any],
    options: tuple[str, ...],
    launches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collectives included, in a decode step, within the documented limits."""
    monkeypatch.setenv("SIM_NPU_STRICT", "1")
    text = shown(tmp_path, config, *options)
    layer = text[text.index(" layers: ") : text.index("\n\n# behind the layers")].splitlines()[1:]
    count = times = 0
    for line in layer:
        repeats = re.fullmatch(r"(\d+) times:", line)
        times = int(repeats[1]) if repeats else times if line.startswith(" ") else 1
        count += 0 if repeats else times
    assert count == launches, "\n".join(layer)


def test_each_kind_of_layer_is_reported_once(tmp_path: Path) -> None:
    text = shown(tmp_path, QWEN3_32B | WINDOWS, "--context", "3000")
    assert text.index("# 3 layers: full attention, dense") < text.index("# 3 layers: a window of 1024, dense")
    assert text.count("npu.npu_fused_infer_attention_score(") == 2 and text.count("atten_mask=") == 1


@pytest.mark.full
def test_671_billion_weights(tmp_path: Path) -> None:
    text = shown(tmp_path, DEEPSEEK_V3, "--batch", "4", "--tp-size", "16", "--ep-size", "16")
    assert (
        "# 3 layers: latent attention, dense\n" in text and "# 58 layers: latent attention, experts\n" in text
    )
    assert "npu.npu_grouped_matmul([bf16[32,7168]], [bf16[16,7168,4096]nz], group_list=i64[16]" in text, (
        "16 of the 256 experts"
    )
    assert "computed on the CPU" not in text


def test_latents_in_fused_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 128 heads on one rank; what is documented for A2 and A3 only, sizes included."""
    monkeypatch.setenv("SIM_NPU_STRICT", "1")
    layer = []
    for flags in ((), ("--npu-mla-prolog", "--npu-nz-cache")):
        text = shown(tmp_path, DEEPSEEK_V3 | {"num_hidden_layers": 1}, "--batch", "2", *flags)
        layer.append(
            text[text.index("# 1 layers: latent attention, dense") : text.index("# behind the layers")]
        )
    plain, whole = layer
    assert (
        "npu.npu_kv_rmsnorm_rope_cache(bf16[1,1,2,576], bf16[512]" in plain
        and "cache_mode='PA_BNSD'" in plain
    )
    assert (
        "npu.npu_mla_prolog_v3(bf16[2,7168], bf16[7168,1536]nz, bf16[1536,24576]nz, bf16[128,128,512], "
        "bf16[7168,576]nz" in whole
    )
    assert re.search(r"query_rope=bf16\[2,1,128,64\], key_rope=bf16\[\d+,1,4,128,16\]", whole)
    assert [text.count("\n") for text in (plain, whole)] == [18, 12]
