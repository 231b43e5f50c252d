"""Tiny checkpoints of Step 3.5. transformers has its layers, as the text model of Step 3.7, and no class that
generates with them alone: here they get a head."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, Step3p7TextConfig
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from tests.models.reference import cache_of

SIZES: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_sliding_attention_heads": 6,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 40,
    "moe_router_scaling_factor": 1.5,
    "swiglu_limits": [None, None, None, 0.2],
    "swiglu_limits_shared": [None, 0.25, None, 0.3],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3",
            "rope_theta": 5e4,
            "partial_rotary_factor": 0.5,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "pad_token_id": 0,
}


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """transformers' text model of Step 3.7 with a head."""

    config: Step3p7TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        out = self.model(input_ids=input_ids, position_ids=position_ids, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), **cache_of(out))


AutoModel.register(Step3p7TextConfig, Step3p7TextModel, exist_ok=True)
AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)


def with_experts_apart(folder: Path) -> None:
    """Gives each expert matrices of its own, [out, in]."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        path, found, matrix = name.rpartition(".experts.")
        if not found:
            tensors[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[matrix]
        for expert, both in enumerate(tensor):
            for part, one in zip(parts, both.chunk(len(parts)), strict=True):
                tensors[f"{path}.experts.{expert}.{part}.weight"] = one.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_experts_stacked(folder: Path, *, is_published: bool) -> None:
    """Undoes with_experts_apart; or stacks them as the makers do, with scales if there are any."""
    tensors: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        path, found, rest = name.partition(".mlp.experts.")
        if not found:
            tensors[name] = tensor
            continue
        stacks.setdefault(f"{path}.moe.{rest.partition('.')[2]}", []).append(tensor)
    whole = {name: torch.stack(each) for name, each in stacks.items()}
    for name, stack in () if is_published else list(whole.items()):
        path, _, matrix = name.removesuffix(".weight").rpartition(".moe.")
        del whole[name]
        if matrix == "down_proj":
            tensors[f"{path}.mlp.experts.down_proj"] = stack
        elif matrix == "gate_proj":
            both = torch.cat((stack, torch.stack(stacks[f"{path}.moe.up_proj.weight"])), dim=1)
            tensors[f"{path}.mlp.experts.gate_up_proj"] = both
    save_file(tensors | whole, folder / "model.safetensors", metadata={"format": "pt"})


def in_published_layout(folder: Path) -> None:
    """Rewrites a checkpoint of SIZES as its makers publish them: lists with an entry for each layer and for
    one that predicts further tokens, and experts of a layer in three tensors."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix("mlp.experts.gate_up_proj")
            gate, up = tensor.chunk(2, dim=1)
            tensors |= {f"{prefix}moe.gate_proj.weight": gate, f"{prefix}moe.up_proj.weight": up}
        else:
            name = name.replace(".mlp.experts.down_proj", ".moe.down_proj.weight")
            name = name.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
            name = name.replace(".mlp.gate.", ".moe.gate.").replace(".mlp.shared_experts.", ".share_expert.")
            tensors[name] = tensor
    tensors["model.layers.4.enorm.weight"] = torch.ones(64)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    ropes = fields.pop("rope_parameters")
    full = dict(ropes["full_attention"])
    types = [*fields["layer_types"], "sliding_attention"]
    for name in ("mlp_layer_types", "num_sliding_attention_heads", "n_routed_experts", "per_layer_config"):
        fields.pop(name)
    published = {
        "architectures": ["Step3p5ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "layer_types": types,
        "num_attention_groups": fields.pop("num_key_value_heads"),
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 16,
        },
        "moe_layers_enum": "2,3",
        "moe_num_experts": 8,
        "moe_top_k": fields.pop("num_experts_per_tok"),
        "norm_expert_weight": True,
        "swiglu_limits": [0.0, 0.0, 0.0, 0.2, 0.0],
        "swiglu_limits_shared": [0.0, 0.25, 0.0, 0.3, 0.0],
        "rope_theta": [ropes[kind]["rope_theta"] for kind in types],
        "partial_rotary_factors": [full.pop("partial_rotary_factor"), 1.0, 1.0, 0.5, 1.0],
        "rope_scaling": {name: value for name, value in full.items() if name != "rope_theta"},
        "yarn_only_types": ["full_attention"],
    }
    (folder / "config.json").write_text(json.dumps(fields | published))
