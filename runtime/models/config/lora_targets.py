"""The linear layers of a model that LoRA adapters can change, and their sizes. Torch-free."""

from runtime.models.config.family import LLAMA
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.registry import MODELS, decoder_family
from runtime.models.config.renames import Renames

# classes of models whose linear layers take adapters
CLASSES = (LLAMA, "runtime.models.gpt_oss:GptOss", "runtime.models.learned_positions:PositionedDecoder")
# names of feed-forwards without a gate
PLAIN: Renames = ((".mlp.up.", ".mlp.up_proj."), (".mlp.down.", ".mlp.down_proj."))


def lora_renames(config: ModelConfig) -> Renames:
    """Parts of modules' names in adapters of the model's family -> those that lora_modules has."""
    takes_adapters = MODELS.get(config.architecture) in CLASSES
    return (*decoder_family(config.architecture).renames, *PLAIN) if takes_adapters else ()


def lora_modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) by name, as `layers.0.self_attn.q_proj`. Empty for families that take no adapters:
    those with attention of another kind, or with weights stored as [inputs, outputs]. Experts take none."""
    is_known = MODELS.get(config.architecture) in CLASSES
    if not is_known or decoder_family(config.architecture).transposed:
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
        names = ("gate_proj", "up_proj") if config.is_gated else ("up_proj",)
        found |= {f"{block}.{name}": (hidden, inner) for name in names}
        found[f"{block}.down_proj"] = inner, hidden
    return found
