"""The model families: which class serves which architecture of config.json, and how a family differs from
plain Llama. Torch-free.

A new family is a row of FAMILIES, a reader in families.py for keys of config.json that only it has, and a
file next to this one where data alone does not describe it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict
from runtime.models.config import families
from runtime.models.config import hybrid_config as hybrids
from runtime.models.config import moe_families as experts
from runtime.models.config.block import NormKind, Placement, QkNorm
from runtime.models.config.encoder_config import ENCODERS
from runtime.models.config.moe_config import HfMoeConfig, MoeConfig
from runtime.models.config.renames import (
    GLM4_NAMES,
    GRANITE_NAMES,
    INTERNLM2_NAMES,
    MIXTRAL_NAMES,
    POST_NAMES,
    REWARD_NAMES,
    SANDWICH_NAMES,
    Renames,
)
from runtime.models.config.tasks import GENERATES, REWARDS, family_of

if TYPE_CHECKING:
    from runtime.models.base import Model
    from runtime.models.config.model_config import ModelConfig

LLAMA, BERT = "runtime.models.llama:Llama", "runtime.models.bert:Bert"
HYBRID = "runtime.models.hybrid:HybridDecoder"
MODERN_BERT = "runtime.models.modern_bert:ModernBert"
POOLING_CLASSES = (LLAMA, BERT, MODERN_BERT)  # classes whose `pool` is served
POOLED_ARCHITECTURES = (
    "Model",
    "ForSequenceClassification",
)  # ends of names of models that embed or classify

# Which layers have a sliding window:
#   none            no layer
#   all             every layer
#   all_if_enabled  every layer, where use_sliding_window is true
# by_layer_types  where use_sliding_window is true, layers that layer_types names; without layer_types, those
# from
#                   max_window_layers on
#   layer_types     as by_layer_types, but layer_types must be there
#   alternating     layers that layer_types names; without layer_types every second layer, from the first on
#   named           layers that layer_types names; without layer_types none
WindowRule = Literal["none", "all", "all_if_enabled", "by_layer_types", "layer_types", "alternating", "named"]


# What lies in a fused tensor, one below the other:
#   halves  gate, up
#   qkv     all query heads, all key heads, all value heads
#   groups  for each key/value head: its query heads, the key head, the value head
FusedLayout = Literal["halves", "qkv", "groups"]


class Family(Struct, frozen=True, kw_only=True):
    """How a family differs from Llama. Bias flags: None means that config.json decides."""

    model_class: str = LLAMA  # module:class
    renames: Renames = ()
    keys: tuple[tuple[str, str], ...] = ()  # names in config.json -> those of HfConfig
    defaults: Fields = {}  # of config.json, where they are not those of HfConfig
    fused: dict[str, FusedLayout] = {}  # modules of checkpoints that hold several (models/fused_tensors.py)
    # from config.json to further fields of ModelConfig: what only this family has
    read: Callable[[Fields], Fields] | None = None
    norm: NormKind = "rms"
    placement: Placement = "pre"
    is_pooled: bool = False  # there are architectures of it that embed or classify (POOLED_ARCHITECTURES)
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: QkNorm = "none"
    is_rope_interleaved: bool = False  # dimensions 2i and 2i + 1 of a head rotate together
    is_gated: bool = True  # the feed-forward has a gate
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_attention_heads
    window: WindowRule = "none"
    moe: Callable[[HfMoeConfig], MoeConfig] | None = None  # reads the experts from config.json; None: dense
    is_mla: bool = False  # multi-head latent attention
    hybrid: Callable[[JsonDict], hybrids.Hybrid] | None = None  # reads recurrent layers; None: there are none
    activation: str = "silu"
    has_sinks: bool = False  # attention heads have sinks
    is_tied: bool = False  # the head shares the embedding, where config.json does not say


FAMILIES = {
    "Arcee": Family(
        mlp_bias=None,
        activation="relu2",
        is_gated=False,
        renames=((".mlp.up_proj.", ".mlp.up."), (".mlp.down_proj.", ".mlp.down.")),
    ),
    "Cohere": Family(
        norm="layer_unbiased",
        placement="parallel",
        keys=(("layer_norm_eps", "rms_norm_eps"),),
        is_rope_interleaved=True,
        is_tied=True,
        read=families.cohere,
    ),
    "Cohere2": Family(
        norm="layer_unbiased",
        placement="parallel",
        keys=(("layer_norm_eps", "rms_norm_eps"),),
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
        is_rope_interleaved=True,
        is_tied=True,
        read=families.cohere2,
    ),
    "DeepseekV2": Family(model_class="runtime.models.deepseek:DeepSeek", moe=experts.deepseek2, is_mla=True),
    "DeepseekV3": Family(model_class="runtime.models.deepseek:DeepSeek", moe=experts.deepseek3, is_mla=True),
    "DeepseekV32": Family(
        model_class="runtime.models.deepseek_sparse:SparseDeepSeek", moe=experts.deepseek32, is_mla=True
    ),
    "Ernie4_5": Family(
        keys=(("use_bias", "attention_bias"), ("use_bias", "mlp_bias")),
        defaults={"rope_theta": 500000.0},
        mlp_bias=None,
        is_rope_interleaved=True,
        is_tied=True,
    ),
    "Exaone4": Family(
        qkv_bias=False,
        o_bias=False,
        qk_norm="head",
        placement="post",
        renames=POST_NAMES,
        defaults={"sliding_window_pattern": 4},
        read=families.rope_in_local_layers,
    ),
    "Gemma": Family(
        norm="rms_offset", activation="gelu_pytorch_tanh", head_dim=256, is_tied=True, read=families.gemma
    ),
    "Gemma2": Family(
        renames=SANDWICH_NAMES,
        norm="rms_offset",
        placement="both",
        activation="gelu_pytorch_tanh",
        is_tied=True,
        window="alternating",
        read=families.gemma,
    ),
    "Gemma3": Family(
        renames=SANDWICH_NAMES,
        norm="rms_offset",
        placement="both",
        qk_norm="head",
        activation="gelu_pytorch_tanh",
        head_dim=256,
        defaults={"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6},
        is_tied=True,
        read=families.gemma3,
    ),
    "Glm": Family(
        o_bias=False,
        is_rope_interleaved=True,
        defaults={"partial_rotary_factor": 0.5, "attention_bias": True},
        fused={"gate_up_proj": "halves"},
    ),
    "Glm4": Family(
        o_bias=False,
        is_rope_interleaved=True,
        defaults={"partial_rotary_factor": 0.5, "attention_bias": True},
        fused={"gate_up_proj": "halves"},
        placement="both",
        renames=GLM4_NAMES,
    ),
    "Dots1": Family(qk_norm="head", window="named", moe=experts.deepseek3),
    "Ernie4_5_Moe": Family(
        qkv_bias=False,
        o_bias=False,
        is_rope_interleaved=True,
        is_tied=True,
        moe=experts.ernie,
        read=families.ernie_moe,
        renames=((".mlp.moe_statics.", ".mlp.gate."), (".gate.moe_statics.", ".gate.")),
    ),
    "ExaoneMoe": Family(
        qkv_bias=False,
        o_bias=False,
        qk_norm="head",
        defaults={"sliding_window_pattern": 4},
        moe=experts.deepseek3_behind_one,
        read=families.rope_in_local_layers,
        renames=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
    ),
    "FlexOlmo": Family(placement="post", qk_norm="projection", moe=experts.olmoe, renames=SANDWICH_NAMES),
    "Glm4Moe": Family(o_bias=False, moe=experts.deepseek3_behind_one, read=families.glm4_moe),
    "Glm4MoeLite": Family(
        model_class="runtime.models.deepseek:DeepSeek", moe=experts.deepseek3_behind_one, is_mla=True
    ),
    "GraniteMoe": Family(moe=experts.granite, read=families.granite, renames=GRANITE_NAMES),
    "GraniteMoeShared": Family(moe=experts.granite, read=families.granite, renames=GRANITE_NAMES),
    "HunYuanMoEV1": Family(
        qk_norm="rotated",
        moe=experts.hunyuan,
        read=families.hunyuan,
        renames=(
            (".query_layernorm.", ".q_norm."),
            (".key_layernorm.", ".k_norm."),
            (".gate.wg.", ".gate."),
            (".shared_mlp.", ".shared_experts."),
        ),
    ),
    "MiniMaxM2": Family(
        qkv_bias=False,
        o_bias=False,
        qk_norm="projection",
        moe=experts.minimax,
        renames=(*MIXTRAL_NAMES, (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")),
    ),
    "Olmoe": Family(qk_norm="projection", moe=experts.olmoe, read=families.olmoe),
    **dict.fromkeys(  # under the name in the checkpoint, and under that of transformers
        ("PhiMoE", "Phimoe"),
        Family(
            norm="layer",
            window="all",
            moe=experts.phi,
            read=families.phi_moe,
            renames=(*MIXTRAL_NAMES, (".mlp.router.", ".mlp.gate.")),
        ),
    ),
    "GptOss": Family(
        model_class="runtime.models.gpt_oss:GptOss",
        window="alternating",
        moe=experts.gpt_oss,
        has_sinks=True,
        renames=(("_proj_blocks", "_proj.blocks"), ("_proj_scales", "_proj.scales")),
    ),
    "Granite": Family(mlp_bias=None, read=families.granite),
    "HunYuanDenseV1": Family(
        qk_norm="rotated",
        renames=(("query_layernorm.", "q_norm."), ("key_layernorm.", "k_norm.")),
        read=families.hunyuan,
    ),
    "InternLM2": Family(
        keys=(("bias", "attention_bias"),), fused={"wqkv": "groups"}, renames=INTERNLM2_NAMES
    ),
    "InternLM3": Family(keys=(("qkv_bias", "attention_bias"), ("bias", "mlp_bias")), mlp_bias=None),
    "Llama": Family(is_pooled=True, mlp_bias=None),
    "Llama4": Family(
        is_rope_interleaved=True,
        moe=experts.llama4,
        read=families.llama4,
        renames=(
            (".feed_forward.", ".mlp."),
            (".mlp.router.", ".mlp.gate."),
            (".shared_expert.", ".shared_experts."),
        ),
    ),
    "MiniCPM3": Family(
        model_class="runtime.models.deepseek:DeepSeek",
        is_mla=True,
        is_tied=True,
        defaults={"rope_interleave": False},
        read=families.minicpm3,
    ),
    "Ministral3": Family(
        qkv_bias=False,
        o_bias=False,
        window="all",
        defaults={"sliding_window": None},
        read=families.ministral3,
    ),
    "Bamba": Family(model_class=HYBRID, hybrid=hybrids.bamba, mlp_bias=None, renames=hybrids.BAMBA_NAMES),
    "Lfm2": Family(
        model_class=HYBRID,
        hybrid=hybrids.lfm2,
        qkv_bias=False,
        o_bias=False,
        qk_norm="head",
        is_tied=True,
        renames=hybrids.LFM2_NAMES,
    ),
    "Qwen3Next": Family(
        model_class=HYBRID,
        hybrid=hybrids.qwen3_next,
        norm="rms_offset",
        qk_norm="head",
        moe=experts.qwen2,
        renames=hybrids.QWEN3_NEXT_NAMES,
    ),
    "Mamba2": Family(model_class=HYBRID, hybrid=hybrids.mamba2, renames=hybrids.MAMBA2_NAMES),
    "Mistral": Family(is_pooled=True, qkv_bias=False, o_bias=False, window="all"),
    "Mixtral": Family(qkv_bias=False, o_bias=False, window="all", moe=experts.mixtral, renames=MIXTRAL_NAMES),
    "Olmo2": Family(qk_norm="projection", placement="post", renames=POST_NAMES),
    "Olmo3": Family(
        qk_norm="projection",
        placement="post",
        renames=POST_NAMES,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
        read=families.two_ropes,
    ),
    "Phi3": Family(
        qkv_bias=False,
        o_bias=False,
        window="all",
        defaults={"sliding_window": None},
        fused={"qkv_proj": "qkv", "gate_up_proj": "halves"},
    ),
    "Qwen2": Family(
        is_pooled=True, renames=REWARD_NAMES, qkv_bias=True, o_bias=False, window="by_layer_types"
    ),
    "Qwen2Moe": Family(qkv_bias=True, o_bias=False, window="layer_types", moe=experts.qwen2),
    "Qwen3": Family(is_pooled=True, qk_norm="head", head_dim=128, window="by_layer_types"),
    "Qwen3Moe": Family(qk_norm="head", window="all_if_enabled", moe=experts.qwen3),
    "SeedOss": Family(mlp_bias=None, defaults={"attention_bias": True}, read=families.seed_oss),
    "SmolLM3": Family(mlp_bias=None, defaults={"rope_theta": 2000000.0}, is_tied=True, read=families.smollm3),
    "Starcoder2": Family(
        norm="layer",
        keys=(("norm_epsilon", "rms_norm_eps"), ("use_bias", "attention_bias"), ("use_bias", "mlp_bias")),
        defaults={"use_bias": True, "sliding_window": None},
        mlp_bias=None,
        activation="gelu_pytorch_tanh",
        is_gated=False,
        window="all",
        is_tied=True,
        renames=((".mlp.c_fc.", ".mlp.up."), (".mlp.c_proj.", ".mlp.down.")),
    ),
}

TRANSFORMERS = Family(model_class="runtime.models.transformers_model:TransformersModel", window="alternating")

# architecture -> module:class
MODELS = {
    **{name + GENERATES: family.model_class for name, family in FAMILIES.items()},
    **{
        name + end: family.model_class
        for name, family in FAMILIES.items()
        if family.is_pooled
        for end in POOLED_ARCHITECTURES
    },
    **{"Qwen2" + end: LLAMA for end in REWARDS},
    **{
        name + end: MODERN_BERT if name == "ModernBert" else BERT
        for name in ENCODERS
        for end in (*POOLED_ARCHITECTURES, "ForMaskedLM")
    },
}


def decoder_family(architecture: str) -> Family:
    """The row of a decoder's architecture, whatever its task."""
    return FAMILIES[family_of(architecture)]


def check_architecture(name: str) -> None:
    """Raises ModelError, listing what is served, for an architecture that is not."""
    if name not in MODELS:
        raise ModelError(
            f"config.json names the architecture {name}, which is not supported; supported are "
            f"{', '.join(sorted(MODELS))}"
        )


def check_pools(name: str) -> None:
    """Raises ModelError for an architecture that cannot embed."""
    if MODELS.get(name) not in POOLING_CLASSES:
        able = sorted(
            model
            for model, model_class in MODELS.items()
            if model_class in POOLING_CLASSES and model.endswith(GENERATES)
        )
        raise ModelError(
            f"{name} cannot make embeddings here (--is-embedding); of the models that generate, these can: "
            f"{', '.join(able)}"
        )


def model_class(config: "ModelConfig") -> "type[Model]":
    """The class of a model. Imports torch, so only ranks call it."""
    name = MODELS[config.architecture] if config.transformers_json is None else TRANSFORMERS.model_class
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
