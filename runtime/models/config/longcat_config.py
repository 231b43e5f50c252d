"""What LongCat Flash (Meituan, 2025) has in config.json. Torch-free."""

from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import moe_families as experts
from runtime.models.config import sizes
from runtime.models.config.families import decoded
from runtime.models.config.family import Family
from runtime.models.config.mla_config import HfMlaConfig, read_mla


class HfLongcat(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here."""

    num_layers: sizes.Layers  # of two attentions and two feed-forwards each
    hidden_size: sizes.Width
    expert_ffn_hidden_size: sizes.Width  # of an expert
    mla_scale_q_lora: bool = True
    mla_scale_kv_lora: bool = True
    zero_expert_type: str = "identity"
    router_bias: bool = False
    attention_method: str = "MLA"


def longcat_keys(raw: Fields) -> Fields:
    """A layer counts as two, each with an attention and a feed-forward. Raises ModelError."""
    hf = decoded(raw, HfLongcat)
    own = (hf.attention_method, hf.zero_expert_type, hf.router_bias)
    if own != ("MLA", "identity", False):
        raise ModelError(
            f"config.json: attention_method {own[0]} with zero_expert_type {own[1]} and router_bias {own[2]} "
            "is not supported; supported are MLA, identity and false"
        )
    return {"num_hidden_layers": 2 * hf.num_layers}


def longcat(raw: Fields) -> Fields:
    """Latents of queries, and of keys and values, are scaled by the root of how much narrower they are."""
    hf, mla = decoded(raw, HfLongcat), read_mla(decoded(raw, HfMlaConfig))
    hidden = hf.hidden_size
    query = (hidden / mla.q_rank) ** 0.5 if hf.mla_scale_q_lora and mla.q_rank is not None else 1.0
    latent = (hidden / mla.kv_rank) ** 0.5 if hf.mla_scale_kv_lora else 1.0
    return {"mla": structs.replace(mla, query_scale=query, latent_scale=latent)}


LONGCAT = Family(
    model_class="runtime.models.longcat:Longcat",
    is_mla=True,
    keys=(("ffn_hidden_size", "intermediate_size"), ("expert_ffn_hidden_size", "moe_intermediate_size")),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e7},
    prepare=longcat_keys,
    moe=experts.longcat,
    read=longcat,
)
