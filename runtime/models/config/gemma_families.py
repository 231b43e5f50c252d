"""The rows of the Gemma families (family.py). Torch-free."""

from msgspec import structs

from runtime.models.config.altup_config import gemma3n, gemma4, gemma4_keys
from runtime.models.config.families import gemma, gemma3
from runtime.models.config.family import Family
from runtime.models.config.renames import SANDWICH_NAMES

# Gemma 3 and later: norms before and behind both halves of a block, and of each head
LATER = Family(
    renames=SANDWICH_NAMES,
    placement="both",
    activation="gelu_pytorch_tanh",
    qk_norm="head",
    head_dim=256,
    is_tied=True,
)
GEMMA = {
    "Gemma": Family(
        norm="rms_offset", activation="gelu_pytorch_tanh", head_dim=256, is_tied=True, read=gemma
    ),
    "Gemma2": Family(
        renames=SANDWICH_NAMES,
        norm="rms_offset",
        placement="both",
        activation="gelu_pytorch_tanh",
        is_tied=True,
        window="alternating",
        read=gemma,
    ),
    **dict.fromkeys(  # Gemma3TextModel is the body of Gemma3ForCausalLM
        ("Gemma3", "Gemma3Text"),
        structs.replace(
            LATER,
            is_pooled=True,
            norm="rms_offset",
            defaults={"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6},
            read=gemma3,
        ),
    ),
    "Gemma3n": structs.replace(
        LATER,
        model_class="runtime.models.gemma3n:Gemma3n",
        defaults={"sliding_window": 512, "sliding_window_pattern": 5, "final_logit_softcapping": 30.0},
        read=gemma3n,
    ),
    **dict.fromkeys(
        ("Gemma4", "Gemma4Unified"),
        structs.replace(
            LATER,
            model_class="runtime.models.gemma4:Gemma4",
            defaults={"sliding_window": 512},
            prepare=gemma4_keys,
            read=gemma4,
        ),
    ),
}
