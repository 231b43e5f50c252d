"""Tiny configurations and checkpoints of any class of transformers that generates, made from its config
class: numbers that families name alike are small, the others are the class's own.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from runtime.models.config.registry import MODELS
from runtime.models.config.transformers_config import UNSERVED
from runtime.models.config.wrappers import WRAPPERS
from tests.models.make import VOCAB_SIZE, randomize, write_tokenizer

# numbers, and the names of fields that get them where a config class has them
FIELDS: tuple[tuple[int, str], ...] = (
    (VOCAB_SIZE, "vocab_size n_vocab unpadded_vocab_size"),
    (64, "hidden_size d_model n_embd emb_dim embedding_size embedding_dim lru_width"),
    (96, "intermediate_size dense_intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim ffn_hidden_size"),
    (96, "dff n_inner"),
    (4, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers zero_expert_num"),
    (4, "num_attention_heads swa_num_attention_heads n_head n_heads attention_heads"),
    (4, "encoder_attention_heads decoder_attention_heads"),
    (2, "num_key_value_heads swa_num_key_value_heads"),
    (16, "head_dim swa_head_dim kv_channels v_head_dim"),
    (512, "max_position_embeddings n_positions max_target_positions max_seq_len model_max_length"),
    (7, "sliding_window sliding_window_size attention_window_size"),
    (8, "num_experts n_routed_experts num_local_experts moe_num_experts qk_rope_head_dim"),
    (3, "num_experts_per_tok moe_topk num_experts_per_token"),
    (24, "moe_intermediate_size expert_ffn_hidden_size q_lora_rank"),
    (40, "shared_expert_intermediate_size shared_intermediate_size"),
    (1, "n_group topk_group num_expert_group"),
    (32, "kv_lora_rank"),
    (12, "qk_nope_head_dim index_topk"),
    (10, "pronunciation_vocab_size shape_vocab_size"),
    (0, "pad_token_id"),
    (256, "bos_token_id"),
    (258, "eos_token_id"),
    (True, "is_decoder"),
)
SMALL = {name: value for value, names in FIELDS for name in names.split()}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# what single classes need besides
OWN: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": {"head_dim": 8, "num_key_value_heads": 4},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "Dots3NoteForCausalLM": {"num_key_value_heads": 4},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}


def other_classes() -> dict[str, type[PreTrainedModel]]:
    """Classes of transformers' table of models that generate of which this runtime has no code, by name."""
    classes = {one.__name__: one for one in MODEL_FOR_CAUSAL_LM_MAPPING.values()}
    return {name: one for name, one in classes.items() if name not in MODELS and name not in WRAPPERS}


def small_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What to give a config's class so that its model is tiny."""
    fields: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in config.sub_configs and value is not None:
            fields[name] = small_fields(getattr(config, name))
        elif name in SMALL and value is not None:
            fields[name] = SMALL[name]
    return fields


def tiny_config(model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """The configuration of a tiny model."""
    kind, name = model_class.config_class, model_class.__name__
    config: PreTrainedConfig = kind(**(small_fields(kind()) | OWN.get(name, {})))
    config.architectures = [name]
    return config


def write_config(model_class: type[PreTrainedModel], folder: Path) -> None:
    """Writes config.json alone; with the name alone for a class that is refused by it."""
    if model_class.__name__ in UNSERVED:
        (folder / "config.json").write_text(json.dumps({"architectures": [model_class.__name__]}))
    else:
        tiny_config(model_class).save_pretrained(folder)


def write_checkpoint(model_class: type[PreTrainedModel], folder: Path) -> None:
    """Writes a random model with its tokenizer."""
    AutoModelForCausalLM.register(model_class.config_class, model_class, exist_ok=True)
    torch.manual_seed(0)
    model = model_class._from_config(tiny_config(model_class), dtype=torch.float32)
    randomize(model.eval()).save_pretrained(folder)
    write_tokenizer(folder)
