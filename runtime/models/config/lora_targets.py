"""The linear layers of a model that LoRA adapters can change, and their sizes. Torch-free."""

from runtime.models.config.model_config import ModelConfig
from runtime.models.config.registry import MODELS


def lora_modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) by name, as `layers.0.self_attn.q_proj`. Empty for families that take no adapters:
    those with attention or a feed-forward of another kind, and those whose rows of queries and keys are
    reordered when they are loaded."""
    if MODELS.get(config.architecture) != "runtime.models.llama:Llama" or not config.is_gated:
        return {}
    if config.is_rope_interleaved or config.rope.partial_rotary_factor < 1:
        return {}
    hidden, queries, keys = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    attention = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }
    found: dict[str, tuple[int, int]] = {}
    for index in range(config.num_layers):
        found |= {f"layers.{index}.self_attn.{name}": sizes for name, sizes in attention.items()}
        block, inner = f"layers.{index}.mlp", config.intermediate_size
        if (moe := config.moe) is not None and moe.layers[index]:
            if not moe.shared_size:
                continue
            block, inner = (
                f"{block}.{'shared_expert' if moe.has_shared_gate else 'shared_experts'}",
                moe.shared_size,
            )
        found |= {f"{block}.{name}": (hidden, inner) for name in ("gate_proj", "up_proj")}
        found[f"{block}.down_proj"] = inner, hidden
    return found
