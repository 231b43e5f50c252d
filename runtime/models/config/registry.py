"""The model families: which class serves which architecture of config.json, and how a family differs from
plain Llama. Torch-free.

A new family is a row of FAMILIES, a reader in families.py for keys of config.json that only it has, and a
file next to this one where data alone does not describe it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from runtime.errors import ModelError
from runtime.models.config import families
from runtime.models.config import moe_families as experts
from runtime.models.config.alibi_families import ALIBI
from runtime.models.config.dense_families import DENSE
from runtime.models.config.diffusion_families import DIFFUSION, LLADA2
from runtime.models.config.dual_config import DUALS
from runtime.models.config.encoder_config import ENCODERS
from runtime.models.config.family import LLAMA, OF_TRANSFORMERS, Family
from runtime.models.config.gemma_families import GEMMA
from runtime.models.config.gpt_families import GPT
from runtime.models.config.hybrid_families import HYBRIDS
from runtime.models.config.recent_families import RECENT
from runtime.models.config.renames import (
    GLM4_NAMES,
    GRANITE_NAMES,
    INTERNLM2_NAMES,
    MIXTRAL_NAMES,
    POST_NAMES,
    REWARD_NAMES,
    SANDWICH_NAMES,
    STEP_NAMES,
)
from runtime.models.config.step_config import step, step_keys
from runtime.models.config.tasks import GENERATES, REWARDS, family_of
from runtime.models.config.whisper_config import FAMILY as WHISPER_FAMILY
from runtime.models.config.whisper_config import WHISPER
from runtime.models.config.wrappers import WRAPPERS

if TYPE_CHECKING:
    from runtime.models.base import Model
    from runtime.models.config.model_config import ModelConfig

BERT = "runtime.models.bert:Bert"
MODERN_BERT = "runtime.models.modern_bert:ModernBert"
POOLING_CLASSES = (LLAMA, BERT, MODERN_BERT)  # classes whose `pool` is served
BIDIRECTIONAL = ("Gemma3", "Gemma3Text")  # families that may attend in both directions
POOLED_ARCHITECTURES = (
    "Model",
    "ForSequenceClassification",
)  # ends of names of models that embed or classify

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
    "DeepseekOcr2Text": Family(moe=experts.deepseek2),
    "DeepseekV2": Family(model_class="runtime.models.deepseek:DeepSeek", moe=experts.deepseek2, is_mla=True),
    "DeepseekV3": Family(model_class="runtime.models.deepseek:DeepSeek", moe=experts.deepseek3, is_mla=True),
    "DeepseekV32": Family(
        model_class="runtime.models.deepseek_sparse:SparseDeepSeek", moe=experts.deepseek32, is_mla=True
    ),
    "Dots1": Family(qk_norm="head", window="named", moe=experts.deepseek3),
    "Ernie4_5": Family(
        keys=(("use_bias", "attention_bias"), ("use_bias", "mlp_bias")),
        defaults={"rope_theta": 500000.0},
        mlp_bias=None,
        is_rope_interleaved=True,
        is_tied=True,
    ),
    "Ernie4_5_Moe": Family(
        qkv_bias=False,
        o_bias=False,
        is_rope_interleaved=True,
        is_tied=True,
        moe=experts.ernie,
        read=families.ernie_moe,
        renames=((".mlp.moe_statics.", ".mlp.gate."), (".gate.moe_statics.", ".gate.")),
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
    "ExaoneMoe": Family(
        qkv_bias=False,
        o_bias=False,
        qk_norm="head",
        defaults={"sliding_window_pattern": 4},
        moe=experts.deepseek3_behind_one,
        read=families.exaone_moe,
        renames=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
    ),
    "FlexOlmo": Family(placement="post", qk_norm="projection", moe=experts.olmoe, renames=SANDWICH_NAMES),
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
    "Glm4Moe": Family(o_bias=False, moe=experts.deepseek3_behind_one, read=families.glm4_moe),
    "Glm4MoeLite": Family(
        model_class="runtime.models.deepseek:DeepSeek", moe=experts.deepseek3_behind_one, is_mla=True
    ),
    "GlmMoeDsa": Family(
        model_class="runtime.models.deepseek_sparse:SparseDeepSeek",
        moe=experts.deepseek32,
        is_mla=True,
        defaults={"indexer_rope_interleave": True, "rms_norm_eps": 1e-5},
    ),
    "GptOss": Family(
        model_class="runtime.models.gpt_oss:GptOss",
        window="alternating",
        moe=experts.gpt_oss,
        has_sinks=True,
        renames=(("_proj_blocks", "_proj.blocks"), ("_proj_scales", "_proj.scales")),
    ),
    "Granite": Family(mlp_bias=None, read=families.granite),
    "GraniteMoe": Family(moe=experts.granite, read=families.granite, renames=GRANITE_NAMES),
    "GraniteMoeShared": Family(moe=experts.granite, read=families.granite, renames=GRANITE_NAMES),
    "HunYuanDenseV1": Family(
        qk_norm="rotated",
        renames=(("query_layernorm.", "q_norm."), ("key_layernorm.", "k_norm.")),
        read=families.hunyuan,
    ),
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
    "Mellum": Family(qk_norm="head", moe=experts.mellum, read=families.two_ropes),
    # Qwen 2 with next-token layers (next_token_layers.py)
    "MiMo": Family(qkv_bias=True, o_bias=False, window="by_layer_types"),
    "MiniCPM3": Family(
        model_class="runtime.models.deepseek:DeepSeek",
        is_mla=True,
        is_tied=True,
        defaults={"rope_interleave": False},
        read=families.minicpm3,
    ),
    "MiniMaxM2": Family(
        qkv_bias=False,
        o_bias=False,
        qk_norm="projection",
        moe=experts.minimax,
        renames=(*MIXTRAL_NAMES, (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")),
    ),
    "Ministral3": Family(
        qkv_bias=False,
        o_bias=False,
        window="all",
        defaults={"sliding_window": None},
        read=families.ministral3,
    ),
    "Mistral": Family(is_pooled=True, qkv_bias=False, o_bias=False, window="all"),
    "Mistral4": Family(
        model_class="runtime.models.deepseek:DeepSeek",
        moe=experts.mistral4,
        is_mla=True,
        prepare=families.mistral4_keys,
        read=families.ministral3,
    ),
    "Mixtral": Family(qkv_bias=False, o_bias=False, window="all", moe=experts.mixtral, renames=MIXTRAL_NAMES),
    "Olmo2": Family(qk_norm="projection", placement="post", renames=POST_NAMES),
    "Olmo3": Family(
        qk_norm="projection",
        placement="post",
        renames=POST_NAMES,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
        read=families.two_ropes,
    ),
    "Olmoe": Family(qk_norm="projection", moe=experts.olmoe, read=families.olmoe),
    "Phi3": Family(
        qkv_bias=False,
        o_bias=False,
        window="all",
        defaults={"sliding_window": None},
        fused={"qkv_proj": "qkv", "gate_up_proj": "halves"},
    ),
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
    "Qwen2": Family(
        is_pooled=True, renames=REWARD_NAMES, qkv_bias=True, o_bias=False, window="by_layer_types"
    ),
    "Qwen2Moe": Family(qkv_bias=True, o_bias=False, window="layer_types", moe=experts.qwen2),
    "Qwen3": Family(is_pooled=True, qk_norm="head", head_dim=128, window="by_layer_types"),
    "Qwen3Moe": Family(qk_norm="head", window="all_if_enabled", moe=experts.qwen3),
    "Qwen3VLMoeText": Family(qk_norm="head", moe=experts.qwen3_vl),
    "SeedOss": Family(mlp_bias=None, defaults={"attention_bias": True}, read=families.seed_oss),
    "SmolLM3": Family(mlp_bias=None, defaults={"rope_theta": 2000000.0}, is_tied=True, read=families.smollm3),
    "SolarOpen": Family(
        o_bias=False, moe=experts.deepseek3, keys=(("moe_intermediate_size", "intermediate_size"),)
    ),
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
    "Step3p5": Family(
        model_class="runtime.models.step3:Step3",
        norm="rms_offset",
        qk_norm="head",
        keys=(
            ("num_attention_groups", "num_key_value_heads"),
            ("moe_top_k", "num_experts_per_tok"),
            ("norm_expert_weight", "norm_topk_prob"),
            ("moe_router_scaling_factor", "routed_scaling_factor"),
            ("share_expert_dim", "moe_shared_expert_intermediate_size"),
            ("share_expert_dims", "moe_shared_expert_intermediate_size"),
        ),
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
        prepare=step_keys,
        moe=experts.step,
        read=step,
        renames=STEP_NAMES,
    ),
    **ALIBI,
    **DENSE,
    **DIFFUSION,
    **GEMMA,
    **GPT,
    **HYBRIDS,
    **RECENT,
    WHISPER: WHISPER_FAMILY,
}

TRANSFORMERS = Family(model_class=OF_TRANSFORMERS, window="alternating")

# architectures that generate and have another name than family + ForCausalLM
GENERATING = {"GPT2": "GPT2LMHeadModel", LLADA2: LLADA2, WHISPER: WHISPER}
# architecture -> module:class
MODELS = {
    **{GENERATING.get(name, name + GENERATES): family.model_class for name, family in FAMILIES.items()},
    **{
        name + end: family.model_class
        for name, family in FAMILIES.items()
        if family.is_pooled
        for end in POOLED_ARCHITECTURES
    },
    **{"Qwen2" + end: LLAMA for end in REWARDS},
    "InternLM2ForRewardModel": LLAMA,
    **dict.fromkeys(DUALS, "runtime.models.dual_encoder:DualEncoder"),
    **{
        name + end: MODERN_BERT if name == "ModernBert" else BERT
        for name in ENCODERS
        for end in (*POOLED_ARCHITECTURES, "ForMaskedLM")
    },
}


# architectures that no code here computes, and why
REFUSED = {
    "Phi4MMForCausalLM": "its weights for text, images and sound are adapters of their own; take Phi-4-mini",
    "Phi4MultimodalForCausalLM": "its weights for text, images and sound are adapters of their own; take "
    "Phi-4-mini",
    "RWForCausalLM": "it is Falcon under an old name; take the files that name FalconForCausalLM",
}


def check_refused(name: str) -> None:
    """Raises ModelError for an architecture that is known and not served."""
    if name in REFUSED:
        raise ModelError(
            f"config.json names the architecture {name}, which is not supported: {REFUSED[name]}"
        )


def decoder_family(architecture: str) -> Family:
    """The row of a decoder's architecture, whatever its task."""
    return FAMILIES[family_of(architecture)]


def check_architecture(name: str) -> None:
    """Raises ModelError, listing what is served, for an architecture that is not."""
    if name not in MODELS:
        raise ModelError(
            f"config.json names the architecture {name}, which is not supported; supported are "
            f"{', '.join(sorted((*MODELS, *WRAPPERS)))}"
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


def check_bidirectional(name: str, *, is_pooled: bool) -> None:
    """Raises ModelError for a model whose tokens see the whole text and that is to generate, or whose family
    has something that such attention lacks."""
    if not is_pooled:
        raise ModelError(
            f"config.json: use_bidirectional_attention: {name} makes embeddings; add --is-embedding"
        )
    if family_of(name) not in BIDIRECTIONAL:
        raise ModelError(
            f"config.json: use_bidirectional_attention is not supported for {name}; it is for "
            f"{', '.join(BIDIRECTIONAL)}"
        )


def class_path(config: "ModelConfig") -> str:
    """Module and name of a model's class, as module:class."""
    name = MODELS[config.architecture] if config.transformers_json is None else TRANSFORMERS.model_class
    return "runtime.models.bidirectional:BidirectionalDecoder" if config.is_bidirectional else name


def model_class(config: "ModelConfig") -> "type[Model]":
    """The class of a model. Imports torch, so only ranks call it."""
    module, _, attribute = class_path(config).partition(":")
    return getattr(import_module(module), attribute)
