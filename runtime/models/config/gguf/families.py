"""The architectures of GGUF files that are served: a row says how a file differs from Llama's. Torch-free.

llama.cpp's converter changes some tensors, and rows say which: of families whose heads rotate by halves and
that llama.cpp rotates in pairs it reorders the rows of queries and keys (`is_permuted`), and of families
whose norms are stored less 1 it adds 1 (`norms_less`).
"""

from collections.abc import Callable

from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config.gguf.container import Gguf
from runtime.models.config.gguf.metadata import Metadata

Names = dict[str, str]


class GgufFamily(Struct, frozen=True, kw_only=True):
    """How the files of an architecture are read."""

    architecture: str  # of config.json
    names: Names = {}  # of a layer's modules, in place of those of LAYER (tensors.py)
    outer: Names = {}  # of what is in no layer, besides those of OUTER (tensors.py)
    keys: Names = {}  # config.json's name -> GGUF's, behind the architecture and a dot
    fields: Fields = {}  # of config.json, which files do not say
    is_permuted: bool = False
    is_latent: bool = False  # keys and values follow from latents, and heads of both may differ in size
    is_paired: bool = False  # heads rotate in pairs in the Hugging Face layout too
    norms_less: int = 0  # taken from the weights of norms
    # from metadata and the fields so far to further fields of config.json
    read: Callable[[Metadata, Fields], Fields] | None = None


LAYER_EPS = {"layer_norm_eps": "attention.layer_norm_epsilon"}
WINDOW = {"sliding_window": "attention.sliding_window"}
SANDWICH: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
POST: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SHARED: Names = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
BIASED = {"exp_probs_b": "mlp.gate.e_score_correction"}  # behind which `.bias` becomes `_bias`
DEEPSEEK = {
    "first_k_dense_replace": "leading_dense_block_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62  # whose scores are scaled by hidden_size / num_attention_heads
GEMMA3_LOCAL_BASE = 10000.0  # of rotary positions in layers with a window


def family_of(gguf: Gguf) -> GgufFamily:
    """The row of a file. Raises ModelError where it is not served."""
    arch = gguf.metadata.get("general.architecture")
    family = FAMILIES.get(str(arch))
    if family is None:
        raise ModelError(
            f"{gguf.paths[0].name} has the architecture {arch}, which is not served from GGUF files; served "
            f"are {', '.join(FAMILIES)}: take the model in Hugging Face layout"
        )
    return family


def _llama(meta: Metadata, fields: Fields) -> Fields:
    """Files of Mixtral name the same architecture."""
    if not meta.number("expert_count"):
        return {}
    return {"architectures": ["MixtralForCausalLM"], "sliding_window": None}


def _gemma2(meta: Metadata, fields: Fields) -> Fields:
    return {"query_pre_attn_scalar": _scalar(fields, GEMMA2_27B_LAYERS)}


def _gemma3(meta: Metadata, fields: Fields) -> Fields:
    """Rotary positions of layers with a window have a base of their own, and no scaling."""
    local = {"rope_theta": meta.number("rope.freq_base_swa") or GEMMA3_LOCAL_BASE}
    ropes = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    found: Fields = {"query_pre_attn_scalar": _scalar(fields, GEMMA3_27B_LAYERS), "rope_parameters": ropes}
    types = meta.layer_types()
    return found if types is None else found | {"layer_types": types}


def _scalar(fields: Fields, layers_of_largest: int) -> float:
    """query_pre_attn_scalar of Gemma 2 and 3: the size of a head, but in the largest models."""
    is_largest = fields["num_hidden_layers"] == layers_of_largest
    heads = fields["hidden_size"] / fields["num_attention_heads"]
    return float(heads if is_largest else fields.get("head_dim", 256))


def _windows(meta: Metadata, fields: Fields) -> Fields:
    """Layers with a window, where the file names them."""
    types = meta.layer_types()
    return {} if types is None else {"layer_types": types}


def _olmo2(meta: Metadata, fields: Fields) -> Fields:
    """Files of OLMo 3 name the same architecture."""
    if fields.get("sliding_window") is None:
        return {}
    rope = fields["rope_parameters"]
    plain = {"rope_theta": rope["rope_theta"]}
    ropes = {"full_attention": rope, "sliding_attention": plain}
    return {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": ropes} | _windows(meta, fields)


def _qwen_moe(meta: Metadata, fields: Fields) -> Fields:
    return {"moe_intermediate_size": fields.get("moe_intermediate_size", fields["intermediate_size"])}


def _phi3(meta: Metadata, fields: Fields) -> Fields:
    """longrope, whose factors are tensors."""
    names = ("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")
    factors = {name: numbers for name, tensor in names if (numbers := meta.floats(tensor)) is not None}
    if not factors:
        return {}
    original = meta.number("rope.scaling.original_context_length")
    rope = fields["rope_parameters"] | factors | {"rope_type": "longrope"}
    return {"rope_parameters": rope | {"original_max_position_embeddings": original}}


def _cohere(meta: Metadata, fields: Fields) -> Fields:
    return {"use_qk_norm": meta.has("blk.0.attn_q_norm.weight")}


def _starcoder2(meta: Metadata, fields: Fields) -> Fields:
    return {"use_bias": meta.has("blk.0.attn_q.bias")}


def _granite(meta: Metadata, fields: Fields) -> Fields:
    """Models with a shared expert have another class, and the same architecture."""
    if meta.has("blk.0.ffn_up_shexp.weight"):
        return {"architectures": ["GraniteMoeSharedForCausalLM"]}
    return {"shared_intermediate_size": 0}


def _normalizes(meta: Metadata, fields: Fields) -> Fields:
    """Whether the weights of a token's experts are divided by their sum."""
    return {"norm_topk_prob": bool(meta.value("expert_weights_norm"))}


def _glm4_moe(meta: Metadata, fields: Fields) -> Fields:
    """Next-token layers stand behind the others, and are not loaded."""
    drafts = int(meta.number("nextn_predict_layers") or 0)
    return _normalizes(meta, fields) | {
        "use_qk_norm": meta.has("blk.0.attn_q_norm.weight"),
        "num_hidden_layers": fields["num_hidden_layers"] - drafts,
        "num_nextn_predict_layers": 0,
    }


def _ernie_moe(meta: Metadata, fields: Fields) -> Fields:
    """Experts in every so many layers from one on."""
    first = int(meta.needed("leading_dense_block_count"))
    return {"moe_layer_start_index": first, "moe_layer_end_index": fields["num_hidden_layers"] - 1}


def _deepseek2(meta: Metadata, fields: Fields) -> Fields:
    """DeepSeek V2 and V3, and what is built like them. Newer files describe what is cached, and have the
    sizes of heads apart; yarn's scale of scores stands there as a tenth of itself."""
    rotary = int(meta.needed("rope.dimension_count"))
    keys, values = (
        int(meta.number(f"attention.{part}_length_mla") or meta.needed(f"attention.{part}_length"))
        for part in ("key", "value")
    )
    rope = dict(fields["rope_parameters"])
    del rope["partial_rotary_factor"]
    if scale := meta.number("rope.scaling.yarn_log_multiplier"):
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * scale, 6))
    found: Fields = {
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,
        "v_head_dim": values,
        "head_dim": rotary,
        "num_key_value_heads": fields["num_attention_heads"],
        "rope_parameters": rope,
        "norm_topk_prob": bool(meta.value("expert_weights_norm")),
    }
    if meta.number("expert_gating_func") == SIGMOID:
        return found | {"n_group": fields.get("n_group", 1), "topk_group": fields.get("topk_group", 1)}
    has_groups = fields.get("n_group", 1) > 1
    return found | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy" if has_groups else "greedy",
    }


def _gpt_oss(meta: Metadata, fields: Fields) -> Fields:
    """Every second layer has a window, from the first on; yarn's bounds are not cut to whole numbers."""
    return {
        "num_local_experts": fields["num_experts"],
        "intermediate_size": fields.get("moe_intermediate_size", fields["intermediate_size"]),
        "rope_parameters": fields["rope_parameters"] | {"truncate": False},
    }


SIGMOID = 2  # expert_gating_func


def _lfm2(meta: Metadata, fields: Fields) -> Fields:
    """Layers without heads of keys are short convolutions."""
    heads = meta.value("attention.head_count_kv")
    if not isinstance(heads, tuple) or len(heads) != fields["num_hidden_layers"]:
        raise ModelError(
            f"{meta.gguf.paths[0].name}: {meta.arch}.attention.head_count_kv has no number for each layer; "
            "convert the model again with a newer llama.cpp"
        )
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": meta.needed("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": meta.needed("attention.layer_norm_rms_epsilon"),
        "norm_topk_prob": True,
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in meta.gguf.tensors),
    }


LFM2_OUTER: Names = {"token_embd_norm": "norm"}  # behind the layers, whatever its name
LFM2_NAMES: Names = {f"shortconv.{part}": f"mixer.{part}" for part in ("conv", "in_proj", "out_proj")}


FAMILIES: dict[str, GgufFamily] = {
    "arcee": GgufFamily(architecture="ArceeForCausalLM", is_permuted=True),
    "cohere2": GgufFamily(
        architecture="Cohere2ForCausalLM",
        is_paired=True,
        keys=LAYER_EPS | WINDOW | {"logit_scale": "logit_scale"},
        read=_windows,
    ),
    "command-r": GgufFamily(
        architecture="CohereForCausalLM",
        is_paired=True,
        keys=LAYER_EPS | {"logit_scale": "logit_scale"},
        read=_cohere,
    ),
    "deepseek2": GgufFamily(
        architecture="DeepseekV3ForCausalLM",
        is_latent=True,
        names=SHARED
        | BIASED
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
        keys=DEEPSEEK | {"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"},
        read=_deepseek2,
    ),
    "dots1": GgufFamily(
        architecture="Dots1ForCausalLM", names=SHARED | BIASED, keys=DEEPSEEK, read=_normalizes
    ),
    "ernie4_5": GgufFamily(architecture="Ernie4_5ForCausalLM", is_paired=True),
    "ernie4_5-moe": GgufFamily(
        architecture="Ernie4_5_MoeForCausalLM",
        is_paired=True,
        names=SHARED | BIASED,
        keys={
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_num_shared_experts": "expert_shared_count",
        },
        read=_ernie_moe,
    ),
    "exaone": GgufFamily(architecture="ExaoneForCausalLM"),
    "exaone4": GgufFamily(architecture="Exaone4ForCausalLM", names=POST, keys=WINDOW, read=_windows),
    "gemma": GgufFamily(architecture="GemmaForCausalLM", norms_less=1),
    "gemma2": GgufFamily(
        architecture="Gemma2ForCausalLM", names=SANDWICH, keys=WINDOW, norms_less=1, read=_gemma2
    ),
    "gemma3": GgufFamily(
        architecture="Gemma3ForCausalLM", names=SANDWICH, keys=WINDOW, norms_less=1, read=_gemma3
    ),
    "glm4": GgufFamily(
        architecture="Glm4ForCausalLM",
        is_paired=True,
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": GgufFamily(
        architecture="Glm4MoeForCausalLM",
        names=SHARED | BIASED | {"post_attention_norm": "post_attention_layernorm"},
        keys=DEEPSEEK,
        read=_glm4_moe,
    ),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        keys=WINDOW,
        read=_gpt_oss,
    ),
    "granite": GgufFamily(
        architecture="GraniteForCausalLM",
        is_permuted=True,
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "granitemoe": GgufFamily(
        architecture="GraniteMoeForCausalLM",
        is_permuted=True,
        names=SHARED,
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
        read=_granite,
    ),
    "hunyuan-dense": GgufFamily(architecture="HunYuanDenseV1ForCausalLM"),
    "internlm2": GgufFamily(architecture="InternLM2ForCausalLM", is_permuted=True, fields={"bias": False}),
    "lfm2": GgufFamily(architecture="Lfm2ForCausalLM", outer=LFM2_OUTER, names=LFM2_NAMES, read=_lfm2),
    "lfm2moe": GgufFamily(
        architecture="Lfm2MoeForCausalLM",
        outer=LFM2_OUTER,
        names=LFM2_NAMES | BIASED,
        keys={
            "num_dense_layers": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
        },
        read=_lfm2,
    ),
    "llama": GgufFamily(architecture="LlamaForCausalLM", is_permuted=True, read=_llama),
    "minimax-m2": GgufFamily(architecture="MiniMaxM2ForCausalLM", names=BIASED),
    "nemotron": GgufFamily(
        architecture="NemotronForCausalLM", keys={"norm_eps": "attention.layer_norm_epsilon"}, norms_less=1
    ),
    "olmo2": GgufFamily(architecture="Olmo2ForCausalLM", names=POST, keys=WINDOW, read=_olmo2),
    "olmoe": GgufFamily(architecture="OlmoeForCausalLM", fields={"norm_topk_prob": False}),
    "phi3": GgufFamily(
        architecture="Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys=WINDOW,
        read=_phi3,
    ),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily(
        architecture="Qwen2MoeForCausalLM", fields={"norm_topk_prob": False}, read=_qwen_moe
    ),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily(
        architecture="Qwen3MoeForCausalLM", fields={"norm_topk_prob": True}, read=_qwen_moe
    ),
    "seed_oss": GgufFamily(
        architecture="SeedOssForCausalLM", names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "smollm3": GgufFamily(architecture="SmolLM3ForCausalLM", is_permuted=True),
    "starcoder2": GgufFamily(
        architecture="Starcoder2ForCausalLM",
        keys={"norm_epsilon": "attention.layer_norm_epsilon"},
        read=_starcoder2,
    ),
}
