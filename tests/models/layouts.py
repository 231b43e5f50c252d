"""Families that transformers lacks: checkpoints of another family, rewritten in their layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}


# registered families whose checkpoints are made by a test of their own -> the test
ELSEWHERE = {
    **dict.fromkeys(("LLaDA2MoeModelLM", "SDAR", "SDARMoe"), "tests/e2e/test_diffusion.py"),
    "DeepseekOcr2Text": "tests/e2e/test_deepseek_ocr.py",
    "Qwen3VLMoeText": "tests/models/test_wrappers.py",
    "WhisperForConditionalGeneration": "tests/e2e/test_whisper.py",
}


class Layout(NamedTuple):
    """How a family is made of another one."""

    architecture: str
    base: str  # of make.FAMILIES
    rewrite: Callable[[Path], None]  # changes a checkpoint of `base`, and its config.json
    sizes: dict[str, Any] = {}  # of the checkpoint, in place of those of `base`


def in_internlm2_layout(folder: Path) -> None:
    """Rewrites a Llama checkpoint: 4 query heads, 2 key/value heads of size 16, in groups of 2 + 1 + 1."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        block = f"model.layers.{layer}."
        q, k, v = (tensors.pop(f"{block}self_attn.{one}_proj.weight") for one in "qkv")
        groups = [
            torch.cat((q[32 * i : 32 * i + 32], k[16 * i : 16 * i + 16], v[16 * i : 16 * i + 16]))
            for i in range(2)
        ]
        tensors[f"{block}attention.wqkv.weight"] = torch.cat(groups)
    for ours, theirs in INTERNLM2_NAMES.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    (folder / "config.json").write_text(json.dumps(config))


def in_internlm3_layout(folder: Path) -> None:
    """Rewrites the configuration of a Llama: transformers has no class of its own for InternLM 3."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    config |= {"qkv_bias": config.pop("attention_bias"), "bias": config.pop("mlp_bias")}
    (folder / "config.json").write_text(json.dumps(config))


def in_baichuan_layout(folder: Path) -> None:
    """Rewrites a Llama with as many key/value heads as query heads: the three projections are one tensor."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        block = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{block}{part}_proj.weight") for part in "qkv"]
        tensors[f"{block}W_pack.weight"] = torch.cat(parts)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_key_value_heads", "attention_bias", "mlp_bias"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BaichuanForCausalLM"]}))


EXAONE_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    ".self_attn.o_proj.": ".attn.attention.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".mlp.gate_proj.": ".mlp.c_fc_0.",
    ".mlp.up_proj.": ".mlp.c_fc_1.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}


def in_exaone_layout(folder: Path) -> None:
    """Rewrites names of a Llama: EXAONE 3 has the same layers under those of GPT-2."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for ours, theirs in EXAONE_NAMES.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["ExaoneForCausalLM"],
        "model_type": "exaone",
        "num_layers": config.pop("num_hidden_layers"),
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "activation_function": config.pop("hidden_act"),
    }
    (folder / "config.json").write_text(json.dumps(config))


def in_mimo_layout(folder: Path) -> None:
    """Rewrites the configuration of a Qwen 2, which MiMo is but for its next-token layers."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))


LAYOUTS = {
    "exaone": Layout("ExaoneForCausalLM", "llama", in_exaone_layout),
    "baichuan": Layout("BaichuanForCausalLM", "llama", in_baichuan_layout, {"num_key_value_heads": 4}),
    "internlm2": Layout("InternLM2ForCausalLM", "llama", in_internlm2_layout),
    "internlm3": Layout("InternLM3ForCausalLM", "llama", in_internlm3_layout),
    "mimo": Layout("MiMoForCausalLM", "qwen2", in_mimo_layout),
}
