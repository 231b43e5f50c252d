"""Checkpoints in the layout that Mistral AI publishes: params.json and consolidated.safetensors."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = (  # of the Hugging Face layout -> Mistral's, in this order
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.embed_tokens.", "tok_embeddings."),
    ("model.norm.", "norm."),
    ("lm_head.", "output."),
    ("model.", ""),
    ("vision_tower.", "vision_encoder."),
    ("multi_modal_projector.", "vision_language_adapter."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.q_a_proj.", ".attention.wq_a."),
    (".self_attn.q_a_layernorm.", ".attention.q_a_norm."),
    (".self_attn.q_b_proj.", ".attention.wq_b."),
    (".self_attn.kv_a_proj_with_mqa.", ".attention.wkv_a_with_mqa."),
    (".self_attn.kv_a_layernorm.", ".attention.kv_a_norm."),
    (".self_attn.kv_b_proj.", ".attention.wkv_b."),
    (".self_attn.q_proj.", ".attention.wq."),
    (".self_attn.k_proj.", ".attention.wk."),
    (".self_attn.v_proj.", ".attention.wv."),
    (".self_attn.o_proj.", ".attention.wo."),
    (".block_sparse_moe.", ".feed_forward."),
    (".mlp.experts.", ".experts."),
    (".mlp.shared_experts.", ".shared_experts."),
    (".mlp.gate.", ".gate."),
    (".mlp.", ".feed_forward."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
    (".weight_scale", ".qscale_weight"),
    (".input_scale", ".qscale_act"),
)
HEADS = re.compile(r"\.self_attn\.([qk])_proj\.weight$")


def write_mistral(folder: Path, target: Path, **params: Any) -> None:
    """Writes a checkpoint of the Hugging Face layout to `target`, with no config.json; `params`: fields of
    params.json, in place of those that follow from config.json."""
    target.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            shutil.copy(folder / name, target)
    fields = json.loads((folder / "config.json").read_text())
    text = fields.get("text_config", fields)
    written = params_of(text)
    if "vision_config" in fields:
        written["vision_encoder"] = {"hidden_size": fields["vision_config"]["hidden_size"]}
    (target / "params.json").write_text(json.dumps(written | params))
    found = {}
    for name, tensor in unstacked(load_file(folder / "model.safetensors")).items():
        heads = HEADS.search(name)
        if heads and "vision" not in name:  # the two numbers of a rotary pair next to each other
            count = text["num_attention_heads" if heads[1] == "q" else "num_key_value_heads"]
            octets = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            halves = octets.reshape(count, 2, -1, tensor.shape[-1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous().view(tensor.dtype)
        for old, new in NAMES:
            name = name.replace(old, new)
        found[name] = tensor
    save_file(found, target / "consolidated.safetensors")


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of stacks one by one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, module = name.rpartition(".")
        if not path.endswith(".experts"):
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if module == "gate_up_proj" else (module,)
        for i, expert in enumerate(tensor):
            chunks = expert.chunk(len(parts))
            found |= {
                f"{path}.{i}.{part}.weight": one.contiguous() for part, one in zip(parts, chunks, strict=True)
            }
    return found


def params_of(text: dict[str, Any]) -> dict[str, Any]:
    """params.json of a text model's config.json."""
    rope = text["rope_parameters"]
    params = {
        "dim": text["hidden_size"],
        "n_layers": text["num_hidden_layers"],
        "head_dim": text["head_dim"],
        "hidden_dim": text["intermediate_size"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "norm_eps": text["rms_norm_eps"],
        "rope_theta": rope["rope_theta"],
        "vocab_size": text["vocab_size"],
        "sliding_window": text.get("sliding_window"),
        "tied_embeddings": text["tie_word_embeddings"],
        "max_seq_len": text["max_position_embeddings"],
    }
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        params["yarn"] = {
            "factor": rope["factor"],
            "original_max_position_embeddings": original,
            "beta": rope.get("beta_fast", 32.0),
            "alpha": rope.get("beta_slow", 1.0),
            "apply_scale": False,
        }
        params["llama_4_scaling"] = {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": original,
        }
    if "kv_lora_rank" in text:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        params |= {name: text[name] for name in names}
        params["moe"] = {
            "num_experts": text["n_routed_experts"],
            "num_experts_per_tok": text["num_experts_per_tok"],
            "first_k_dense_replace": text["first_k_dense_replace"],
            "num_shared_experts": text["n_shared_experts"],
            "expert_hidden_dim": text["moe_intermediate_size"],
            "routed_scale": text["routed_scaling_factor"],
            "num_expert_groups": text["n_group"],
            "num_expert_groups_per_tok": text["topk_group"],
            "route_every_n": 1,
            "renorm_strategy": "WEIGHTS",
            "use_load_balancing_bias": False,
        }
    elif "num_local_experts" in text:
        params["moe"] = {
            "num_experts": text["num_local_experts"],
            "num_experts_per_tok": text["num_experts_per_tok"],
        }
    return params
