"""Files of GPT-2's line as they were published, and what their config.json may not say. Their other tests are
those of all families (test_llama.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from tests.devices.drive import Planner, start
from tests.models.compare import expected_of, in_company, random_prompts
from tests.models.make import make_checkpoint

PROMPTS = random_prompts(9, 30)
NUM_TOKENS = 12


def test_old_files_have_masks_and_no_prefix(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt2", tmp_path)
    expected = expected_of(folder, PROMPTS, NUM_TOKENS).tokens
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): one for name, one in load_file(path).items()}
    assert "wte.weight" in tensors and "h.1.attn.c_attn.weight" in tensors
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path)
    executor, ready = start(folder)
    assert in_company(Planner(executor, ready, 4), PROMPTS, NUM_TOKENS, chunk=7) == expected


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "--model-impl transformers"),
        ("gpt2", {"activation_function": "mish"}, "activation_function mish"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query false"),
        ("gpt_neo", {"attention_types": [[["global"], 3]]}, "attention_types must name"),
        ("gpt_neo", {"attention_types": [[["round"], 2]]}, "attention_types must name"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"enable_bias": False}, "without biases"),
        ("gptj", {"rotary_dim": 7}, "partial_rotary_factor"),
    ],
)
def test_what_config_json_may_not_say(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path)
    found = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(found))
    with pytest.raises(ModelError, match=message):
        read_config(folder, model_impl="runtime")
        start(folder, model_impl="runtime")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt_bigcode", {"multi_query": False}),
        ("opt", {"word_embed_proj_dim": 32}),
        ("opt", {"do_layer_norm_before": False}),
    ],
)
def test_variants_that_transformers_computes(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Without an option: what this runtime's own code lacks is no reason to refuse them."""
    folder = make_checkpoint(family, tmp_path, num_key_value_heads=4, **fields)
    assert read_config(folder).transformers_json is not None
    expected = expected_of(folder, PROMPTS, NUM_TOKENS).tokens
    executor, ready = start(folder)
    assert in_company(Planner(executor, ready, 4), PROMPTS, NUM_TOKENS, chunk=7) == expected


def test_published_sizes(tmp_path: Path) -> None:
    """config.json of gpt2 and opt-1.3b, which leave most to defaults."""
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    config = read_config(tmp_path)
    assert (config.intermediate_size, config.num_kv_heads, config.head_dim) == (3072, 12, 64)
    assert config.is_tied and config.context_len == 1024 and config.positions is not None
    opt = {
        "architectures": ["OPTForCausalLM"],
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "ffn_dim": 8192,
        "hidden_size": 2048,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "vocab_size": 50272,
        "word_embed_proj_dim": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(opt))
    config = read_config(tmp_path)
    assert config.activation == "relu" and config.positions is not None
    assert (config.positions.count, config.positions.offset) == (2050, 2)
