"""Tiny random next-token layers (multi-token prediction) in the checkpoints of targets, under the names that
published ones have, and the blocks of them as models of transformers."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from tests.models.make import randomize

# names that published checkpoints have for the parts of next-token layer {k}, which is number {n} if the
# model's layers are counted before it
DEEPSEEK = {
    "block": "model.layers.{n}.",
    "enorm": "model.layers.{n}.enorm",
    "hnorm": "model.layers.{n}.hnorm",
    "fc": "model.layers.{n}.eh_proj",
    "norm": "model.layers.{n}.shared_head.norm",
    "embedding": "model.layers.{n}.embed_tokens",
    "head": "model.layers.{n}.shared_head.head",
}
MTP = {
    "block": "mtp.layers.{k}.",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "fc": "mtp.fc",
    "norm": "mtp.norm",
}
NAMES = {
    "ernie4_5": (
        ERNIE := {
            "block": "model.mtp_block.{k}.",
            "enorm": "model.mtp_emb_norm.{k}",
            "hnorm": "model.mtp_hidden_norm.{k}",
            "fc": "model.mtp_linear_proj.{k}",
        }
    ),
    "ernie4_5_moe": ERNIE,
    "step3p5": (
        STEP := {
            "block": "model.layers.{n}.",
            "enorm": "model.layers.{n}.enorm",
            "hnorm": "model.layers.{n}.hnorm",
            "fc": "model.layers.{n}.eh_proj",
            "norm": "model.layers.{n}.transformer.shared_head.norm",
            "output": "model.layers.{n}.transformer.shared_head.output",
        }
    ),
    "mimo": {
        "block": "model.mtp_layers.{k}.",
        "enorm": "model.mtp_layers.{k}.token_layernorm",
        "hnorm": "model.mtp_layers.{k}.hidden_layernorm",
        "fc": "model.mtp_layers.{k}.input_proj",
        "norm": "model.mtp_layers.{k}.final_layernorm",
    },
    "mimo_v2_flash": {
        "block": "model.mtp.layers.{k}.",
        "enorm": "model.mtp.layers.{k}.enorm",
        "hnorm": "model.mtp.layers.{k}.hnorm",
        "fc": "model.mtp.layers.{k}.eh_proj",
        "norm": "model.mtp.layers.{k}.final_layernorm",
    },
    "nemotron_h": {
        "block": "mtp.layers.{k}.",
        "enorm": "mtp.layers.0.enorm",
        "hnorm": "mtp.layers.0.hnorm",
        "fc": "mtp.layers.0.eh_proj",
        "norm": "mtp.layers.1.final_layernorm",
    },
    **dict.fromkeys(("exaone_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), MTP),
}
# names within blocks of published checkpoints, where they are not those of transformers
OWN_NAMES = {
    "mimo_v2_flash": (("post_attention_layernorm", "pre_mlp_layernorm"), (".sinks", ".attention_sink_bias"))
}
# what config.json says of next-token layers, where that is not num_nextn_predict_layers
KEYS: dict[str, dict[str, Any]] = {
    "exaone_moe": {"mtp_layer_types": ["full_attention"], "mtp_sliding_windows": [0]},
    "nemotron_h": {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    "qwen3_5_moe_text": {"mtp_num_hidden_layers": 1},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
    "qwen3_next": {},
    "step3p5": {
        "num_nextn_predict_layers": 1,
        "mtp_layer_types": ["sliding_attention"],
        "mtp_mlp_layer_types": ["dense"],
    },
}
# the target's configuration -> that of the blocks of one next-token layer
BLOCKS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"]},
    "ernie4_5_moe": {"moe_layer_start_index": 2},
    "exaone_moe": {"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
    "glm_moe_dsa": {
        "indexer_types": ["full"],
        "layer_types": ["indexed_attention"],
        "mlp_layer_types": ["sparse"],
    },
    "mimo_v2_flash": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    "nemotron_h": {"layer_types": ["full_attention", "moe"]},
    "step3p5": {
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["dense"],
        "swiglu_limits": [None],
        "swiglu_limits_shared": [None],
    },
    **dict.fromkeys(
        ("mimo", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), {"layer_types": ["full_attention"]}
    ),
}


def add_next_token_layers(folder: Path, count: int = 1) -> Path:
    """Adds next-token layers to a checkpoint. The blocks of layer k, with the norm behind them, are left as a
    model of transformers in `block_folder(folder, k)`."""
    fields = json.loads((folder / "config.json").read_text())
    family = fields["model_type"]
    names = NAMES.get(family, DEEPSEEK)
    tensors = load_file(folder / "model.safetensors")
    for k in range(count):
        torch.manual_seed(11 + k)
        tensors |= _layer(folder, family, names, k, target_config(folder).num_hidden_layers, tensors)
    fields |= {
        name: value * count if isinstance(value, list) or name == "num_nextn_predict_layers" else value
        for name, value in KEYS.get(family, {"num_nextn_predict_layers": 1}).items()
    }
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def block_folder(folder: Path, k: int) -> Path:
    """Where the blocks of next-token layer k of the checkpoint in `folder` are."""
    return folder.parent / f"{folder.name}-block-{k}"


def count_blocks(folder: Path) -> int:
    """How many next-token layers were added to the checkpoint in `folder`."""
    return len(list(folder.parent.glob(f"{folder.name}-block-*")))


def _layer(
    folder: Path, family: str, names: dict[str, str], k: int, num_layers: int, target: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    block, found = _block_model(folder, family), {}
    if "norm" not in names:
        for name, parameter in block.named_parameters():
            if name in ("norm.weight", "norm_f.weight"):
                parameter.data.fill_(1)  # the reference takes what is before it
    block.save_pretrained(block_folder(folder, k), save_original_format=True)
    own = load_file(block_folder(folder, k) / "model.safetensors")
    for name, tensor in own.items():
        name = name.removeprefix("model.").removeprefix("backbone.")
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            place = names["block"].format(n=num_layers + k, k=k + int(index))
            for theirs, own_name in OWN_NAMES.get(family, ()):
                rest = rest.replace(theirs, own_name)
            found[place + rest] = tensor
        elif name in ("norm.weight", "norm_f.weight") and "norm" in names:
            found[names["norm"].format(n=num_layers + k, k=k) + ".weight"] = tensor
    embedding = next(
        tensor
        for name, tensor in target.items()
        if name.endswith(("embed_tokens.weight", "embeddings.weight"))
    )
    hidden = embedding.shape[1]
    extras = {
        "enorm": torch.rand(hidden) + 0.5,
        "hnorm": torch.rand(hidden) + 0.5,
        "fc": torch.randn(hidden, 2 * hidden) * 0.15,
        "embedding": embedding.clone(),
        "head": target.get("lm_head.weight", embedding).clone(),
        "output": torch.randn(embedding.shape) * 0.15,
    }
    for part, tensor in extras.items():
        if part in names:
            found[names[part].format(n=num_layers + k, k=k) + ".weight"] = tensor
    return found


def _block_model(folder: Path, family: str) -> PreTrainedModel:
    config = deepcopy(target_config(folder))
    own = BLOCKS.get(family, {})
    own = own | {"first_k_dense_replace": 0, "num_hidden_layers": len(own.get("layer_types", [""]))}
    if config.is_heterogeneous:  # what differs between layers is made of the rest
        fields = json.loads((folder / "config.json").read_text()) | own
        config = type(config)(**{name: fields[name] for name in fields.keys() - {"per_layer_config"}})
    for name, value in own.items():
        setattr(config, name, value)
    return randomize(AutoModel.from_config(config, dtype=torch.float32).eval())


def target_config(folder: Path) -> PretrainedConfig:
    """The configuration of a target by transformers, which knows MiMo as Qwen 2."""
    fields = json.loads((folder / "config.json").read_text())
    if fields["model_type"] == "mimo":
        return AutoConfig.for_model(
            **(fields | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
        )
    return AutoConfig.from_pretrained(folder)
