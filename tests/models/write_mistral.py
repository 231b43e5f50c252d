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
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.", "vision_tower."),
    ("multi_modal_projector.patch_merger.", "patch_merger."),
    ("multi_modal_projector.norm.", "pre_mm_projector_norm."),
    ("multi_modal_projector.linear_1.", "vision_language_adapter.w_in."),
    ("multi_modal_projector.linear_2.", "vision_language_adapter.w_out."),
    ("vision_tower.", "vision_encoder."),
    (".attention.q_proj.", ".attention.wq."),
    (".attention.k_proj.", ".attention.wk."),
    (".attention.v_proj.", ".attention.wv."),
    (".attention.o_proj.", ".attention.wo."),
    ("model.embed_tokens.", "tok_embeddings."),
    ("model.norm.", "norm."),
    ("lm_head.", "output."),
    ("model.", ""),
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
HEADS = re.compile(r"\.(?:self_attn|attention)\.([qk])_proj\.weight$")


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
    written["tied_embeddings"] = any(one.get("tie_word_embeddings") for one in (fields, text))
    if "vision_config" in fields:
        written["vision_encoder"] = tower_of(fields)
    (target / "params.json").write_text(json.dumps(written | params))
    found = {}
    for name, tensor in unstacked(load_file(folder / "model.safetensors")).items():
        heads = HEADS.search(name)
        if heads:  # the two numbers of a rotary pair next to each other
            count = text["num_attention_heads" if heads[1] == "q" else "num_key_value_heads"]
            if "vision" in name:
                count = fields["vision_config"]["num_attention_heads"]
            octets = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            halves = octets.reshape(count, 2, -1, tensor.shape[-1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous().view(tensor.dtype)
        for old, new in NAMES:
            name = name.replace(old, new)
        found[name] = tensor
    save_file(found, target / "consolidated.safetensors")


def tower_of(fields: dict[str, Any]) -> dict[str, Any]:
    """`vision_encoder` of params.json, of a config.json with Pixtral's tower."""
    vision, merge = fields["vision_config"], fields.get("spatial_merge_size", 1)
    if vision["model_type"] != "pixtral":
        return {"hidden_size": vision["hidden_size"]}
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads patch_size"
    merges = {"mm_projector_id": "patch_merge", "add_pre_mm_projector_layer_norm": True}
    return (
        {name: vision[name] for name in names.split()}
        | {"image_token_id": fields.get("image_token_id", fields.get("image_token_index"))}
        | {"rope_theta": vision["rope_parameters"]["rope_theta"], "image_size": 40}
        | {"spatial_merge_size": merge, "adapter_bias": fields["multimodal_projector_bias"]}
        | (merges if merge > 1 else {})
    )


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
