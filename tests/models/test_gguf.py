"""GGUF files against transformers on the numbers that they hold: config, tensors, types, tokenizer."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from runtime.errors import ModelError
from runtime.layers.quantization.ggml import READERS, dequantize_rows
from runtime.models.config.gguf.types import TYPES
from runtime.models.config.model_config import read_config
from runtime.models.gpt_oss import is_mxfp4
from tests.devices.drive import Planner, sampling, start
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.make_gguf import LLAMAS, write_gguf
from tests.models.reference import Reference

PROMPTS = [
    np.random.default_rng(i).integers(0, VOCAB_SIZE, size).tolist() for i, size in enumerate((5, 40, 17))
]


def greedy(path: Path, num_tokens: int, dtype: str = "float32", **options: object) -> list[list[int]]:
    """Continuations of the prompts in company, the longest one in chunks."""
    executor, ready = start(path, dtype=dtype, **options)
    planner = Planner(executor, ready, 4)
    rows = [planner.row(i, prompt, sampling(top_logprobs=0)) for i, prompt in enumerate(PROMPTS)]
    for row in rows:
        while row.computed < row.prompt_len:
            planner.run([], [(row, min(24, row.prompt_len - row.computed))])
    for _ in range(num_tokens - 1):
        planner.run(rows, [])
    return [row.tokens[row.prompt_len :] for row in rows]


@pytest.mark.parametrize(
    "kind", [kind for kind in TYPES.values() if kind.name in READERS], ids=lambda kind: kind.name
)
def test_types_mean_what_ggml_says(kind: object) -> None:
    """Random bytes, whose scales are infinite and worse, by an independent implementation."""
    number = Type[kind.name]  # type: ignore[attr-defined]
    octets = np.random.default_rng(0).integers(
        0, 256, (300, gguf.GGML_QUANT_SIZES[number][1]), dtype=np.uint8
    )
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(octets, number)
    found = dequantize_rows(number.name, torch.from_numpy(octets)).numpy()
    assert np.array_equal(wanted, found, equal_nan=True)


def test_sizes_are_those_of_ggml() -> None:
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert all(sizes[number] == (kind.name, kind.block, kind.num_bytes) for number, kind in TYPES.items())


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
YARN_PLAIN = {name: value for name, value in YARN.items() if not name.startswith("mscale")}
CASES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama tied, head_dim": {"tie_word_embeddings": True, "head_dim": 24},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "arcee": {},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "deepseek_v2": {},
    "deepseek_v2, groups": {
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": {},
    "deepseek_v3, yarn": {"rope_parameters": YARN},
    "dots1": {},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {},
    "exaone": {},
    "exaone4": {},
    "glm4": {},
    "glm4_moe": {},
    "gpt_oss": {"rope_parameters": {**YARN_PLAIN, "truncate": False}, "intermediate_size": 32},
    "granite": {},
    "granite_moe": {},
    "granite_moe_shared": {},
    "hunyuan": {},
    "internlm2": {},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"tie_word_embeddings": True},
    "minimax_m2": {},
    "nemotron": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "phi3": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 4},
    "starcoder2": {"sliding_window": None},
}
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}


# of each kind of change that files make one
QUANTIZED = (
    *("llama", "llama biases", "llama tied, head_dim", "mistral", "qwen2", "qwen2 tied", "qwen3", "gemma2"),
    *("qwen2_moe", "qwen3_moe", "cohere", "glm4", "granite_moe_shared", "lfm2", "olmo3"),
)


@pytest.mark.parametrize(
    ("case", "kind"),
    [*((case, Type.F32) for case in CASES), *((case, Type.Q8_0) for case in QUANTIZED)],
    ids=lambda one: one.name if isinstance(one, Type) else one,
)
def test_a_family_is_what_its_file_holds(case: str, kind: Type, tmp_path: Path) -> None:
    """In float32 token for token, with quantized matrices as well: they are dequantized exactly."""
    family, sizes = case.split()[0].rstrip(","), {} if kind == Type.F32 else WIDE
    if "moe" in family or family in ("deepseek_v2", "deepseek_v3", "dots1"):
        sizes = sizes | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    if kind != Type.F32 and family == "granite_moe_shared":
        sizes = sizes | {"shared_intermediate_size": 64}
    folder = make_checkpoint(
        "llama" if family in LLAMAS else family, tmp_path / "hf", **(sizes | CASES[case])
    )
    path = tmp_path / "model.gguf"
    model = write_gguf(folder, path, family, lambda name: Type.F32 if "norm" in name else kind)
    model.save_pretrained(tmp_path / "read")
    reference = Reference(tmp_path / "read")
    states = {"num_states": 12} if family.startswith("lfm2") else {}
    assert greedy(path, 6, **states) == [reference.greedy(prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("others", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
def test_experts_in_mxfp4(others: Type, tmp_path: Path) -> None:
    """Files of gpt-oss, whose experts are in MXFP4 whatever the type of other matrices."""
    folder = make_checkpoint("gpt_oss", tmp_path / "hf", intermediate_size=32)
    path = tmp_path / "model.gguf"

    def kind_of(name: str) -> Type:
        if name.endswith(".bias"):
            return Type.F32
        return Type.MXFP4 if "_exps." in name else others

    write_gguf(folder, path, "gpt_oss", kind_of).save_pretrained(tmp_path / "read")
    reference = Reference(tmp_path / "read")
    expected = [reference.greedy(prompt, 6) for prompt in PROMPTS]
    assert greedy(path, 6) == expected
    config = read_config(path)
    assert is_mxfp4(config)


@pytest.mark.parametrize(
    "kind", [Type.IQ2_XXS, Type.IQ3_S, Type.IQ1_S, Type.TQ1_0, Type.TQ2_0], ids=lambda kind: kind.name
)
def test_types_of_tables(kind: Type, tmp_path: Path) -> None:
    """Those that the package `gguf` computes, and ternary ones."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    folder = make_checkpoint("llama", tmp_path / "hf", **sizes)
    path = tmp_path / "model.gguf"
    model = write_gguf(folder, path, "llama", lambda name: kind if name.startswith("blk.") else Type.F32)
    model.save_pretrained(tmp_path / "read")
    reference = Reference(tmp_path / "read")
    assert greedy(path, 6) == [reference.greedy(prompt, 6) for prompt in PROMPTS]


def test_types_of_tables_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    folder = make_checkpoint("llama", tmp_path / "hf", **sizes)
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, "llama", lambda name: Type.IQ1_S if "ffn_up" in name else Type.F32)
    monkeypatch.setattr("runtime.models.config.gguf.tensors.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ffn_up.weight is of type IQ1_S.*runtime-serve.gguf"):
        read_config(path)


def test_the_config_is_that_of_the_folder(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3", "gemma2", "qwen2_moe", "qwen3_moe"):
        own = {"query_pre_attn_scalar": 24} if family == "gemma2" else {}
        folder = make_checkpoint(family, tmp_path / family, **own)
        path = tmp_path / f"{family}.gguf"
        write_gguf(folder, path, family)
        wanted, found = read_config(folder), read_config(path)
        differing = {
            name for name in wanted.__struct_fields__ if getattr(wanted, name) != getattr(found, name)
        }
        assert differing <= {"eos_ids", "rope", "sampling_defaults", "rms_norm_eps"}, (family, differing)
        assert found.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)  # stored as float32
        assert set(wanted.eos_ids) <= set(found.eos_ids) and wanted.rope.rope_theta == found.rope.rope_theta
