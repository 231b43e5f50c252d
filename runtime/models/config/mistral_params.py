"""params.json, the configuration that Mistral AI publishes with consolidated.safetensors, as config.json
would say it. The correspondence is that of transformers' converters of Ministral 3 and Mistral 4."""

from typing import Literal

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields

PARAMS_FILE = "params.json"
BOS_ID, EOS_ID = 1, 2  # of all of Mistral AI's tokenizers
CONTEXT = 128_000  # where the file has no length, as vLLM takes it
WRAPPER = "Mistral3ForConditionalGeneration"  # takes images too
UNMERGED = "LlavaForConditionalGeneration"  # the same without a merger of patches: Pixtral
# architecture -> model_type, as text_config of WRAPPER names the text model
TEXT_TYPES = {
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral4ForCausalLM": "mistral4",
}
# sizes of latent attention, which have the same names in config.json
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Experts(Struct, frozen=True, kw_only=True):
    """`moe`: experts, chosen by softmax."""

    num_experts: int
    num_experts_per_tok: int
    expert_hidden_dim: int | None = None  # None: hidden_dim of the model
    num_shared_experts: int = 0
    first_k_dense_replace: int = 0
    routed_scale: float = 1.0
    num_expert_groups: int = 1
    num_expert_groups_per_tok: int = 1
    route_every_n: int = 1
    use_load_balancing_bias: bool = False


class Yarn(Struct, frozen=True, kw_only=True):
    """`yarn`: rotary positions that are stretched over a longer context."""

    factor: float
    original_max_position_embeddings: int
    beta: float = 32.0
    alpha: float = 1.0
    apply_scale: bool = False


class QueryScale(Struct, frozen=True, kw_only=True):
    """`llama_4_scaling`: queries are scaled by their position."""

    original_max_position_embeddings: int
    beta: float


class Stored(Struct, frozen=True, kw_only=True):
    """`quantization`: weights in 8 bits, with a scale for each matrix, or as compressed-tensors says."""

    qformat_weight: str | None = None
    qscheme_act: Literal["TENSOR", "NO_SCALES"] | None = None
    quant_method: str | None = None


class Tower(Struct, frozen=True, kw_only=True):
    """`vision_encoder`: Pixtral's tower."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    image_token_id: int
    image_size: int = 1024
    max_image_size: int | None = None
    rope_theta: float = 10000.0
    spatial_merge_size: int = 1
    adapter_bias: bool = True
    add_pre_mm_projector_layer_norm: bool = False
    mm_projector_id: str = ""

    @property
    def longest_edge(self) -> int:
        """Pixels of the longest edge of an image."""
        return self.max_image_size or self.image_size

    @property
    def merges(self) -> bool:
        """Whether neighbouring patches become one row."""
        return self.mm_projector_id == "patch_merge"


class Params(Struct, frozen=True, kw_only=True):
    """The part of params.json that is read here."""

    dim: int
    n_layers: int
    hidden_dim: int
    n_heads: int
    vocab_size: int
    model_type: str = "transformer"
    n_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    sliding_window: int | str | list[int | None] | None = None
    tied_embeddings: bool = False
    max_position_embeddings: int | None = None
    max_seq_len: int | None = None
    kv_lora_rank: int | None = None
    moe: Experts | None = None
    yarn: Yarn | None = None
    llama_4_scaling: QueryScale | None = None
    quantization: Stored | None = None
    vision_encoder: Fields | None = None
    multimodal: Fields | None = None


def config_of_params(params: Params, given: Fields) -> tuple[Fields, Fields]:
    """What config.json and generation_config.json would say. `given`: the whole file. Raises ModelError for a
    model that has more than that."""
    _check(params)
    architecture = _architecture(params)
    config: Fields = {
        "hidden_size": params.dim,
        "num_hidden_layers": params.n_layers,
        "intermediate_size": params.hidden_dim,
        "num_attention_heads": params.n_heads,
        "num_key_value_heads": params.n_kv_heads or params.n_heads,
        "vocab_size": params.vocab_size,
        "head_dim": params.head_dim or params.dim // params.n_heads,
        "rms_norm_eps": params.norm_eps,
        "tie_word_embeddings": params.tied_embeddings,
        "max_position_embeddings": params.max_position_embeddings or params.max_seq_len or CONTEXT,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "bfloat16",
        "rope_parameters": _rope(params),
    }
    config |= _windows(params)
    if params.moe is not None:
        config |= _experts(params, params.moe)
    if architecture == "Mistral4ForCausalLM":
        config |= {name: given.get(name) for name in LATENT}
    if params.quantization is not None:
        config["quantization_config"] = _quantization(params.quantization, given)
    if _has_images(params):
        text = config | {"model_type": TEXT_TYPES.get(architecture, architecture)}
        config = {"text_config": text} | _with_images(tower_of(params))
    else:
        config["architectures"] = [architecture]
    return config, {"eos_token_id": EOS_ID}


def _has_images(params: Params) -> bool:
    return bool(params.vision_encoder or (params.multimodal or {}).get("vision_encoder_args"))


def tower_of(params: Params) -> Tower | None:
    """The vision tower; None: the model has none, or another than Pixtral's."""
    given = params.vision_encoder or (params.multimodal or {}).get("vision_encoder_args")
    try:
        tower = msgspec.convert(given, Tower)
    except msgspec.ValidationError:
        return None
    is_known = tower.merges == tower.add_pre_mm_projector_layer_norm and (
        tower.merges or tower.spatial_merge_size == 1
    )
    return tower if is_known else None


def _with_images(tower: Tower | None) -> Fields:
    """What config.json would say of images. Without a tower that is known, text alone is served."""
    if tower is None:
        return {"architectures": [WRAPPER], "vision_config": {"model_type": "vision_encoder"}}
    vision: Fields = {
        "model_type": "pixtral",
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_hidden_layers": tower.num_hidden_layers,
        "num_attention_heads": tower.num_attention_heads,
        "patch_size": tower.patch_size,
        "hidden_act": "silu",
        "rope_theta": tower.rope_theta,
    }
    fields: Fields = {
        "vision_config": vision,
        "image_token_id": tower.image_token_id,
        "multimodal_projector_bias": tower.adapter_bias,
        "vision_feature_layer": -1,
    }
    if tower.merges:
        return fields | {"architectures": [WRAPPER], "spatial_merge_size": tower.spatial_merge_size}
    return fields | {"architectures": [UNMERGED], "vision_feature_select_strategy": "full"}


def _check(params: Params) -> None:
    """Raises ModelError for what this reader does not know."""
    moe, yarn, scale = params.moe, params.yarn, params.llama_4_scaling
    reasons = {
        "model_type": params.model_type != "transformer",
        "multimodal.whisper_model_args": "whisper_model_args" in (params.multimodal or {}),
        "moe.route_every_n": moe is not None and moe.route_every_n != 1,
        "moe.use_load_balancing_bias": moe is not None and moe.use_load_balancing_bias,
        "moe.num_shared_experts": moe is not None
        and (moe.num_shared_experts > 0) != (params.kv_lora_rank is not None),
        "kv_lora_rank": params.kv_lora_rank is not None and moe is None,
        "yarn.apply_scale": yarn is not None and yarn.apply_scale,
        "llama_4_scaling.original_max_position_embeddings": yarn is not None
        and scale is not None
        and yarn.original_max_position_embeddings != scale.original_max_position_embeddings,
        "llama_4_scaling": scale is not None
        and (isinstance(params.sliding_window, list) or _is_mixtral(params)),
    }
    if wrong := [name for name, is_wrong in reasons.items() if is_wrong]:
        raise ModelError(
            f"{PARAMS_FILE}: {', '.join(wrong)}: this value, or its company, is read from config.json alone; "
            "take the model in Hugging Face layout"
        )


def _is_mixtral(params: Params) -> bool:
    return params.moe is not None and params.kv_lora_rank is None


def _architecture(params: Params) -> str:
    if params.kv_lora_rank is not None:
        return "Mistral4ForCausalLM"
    if _is_mixtral(params):
        return "MixtralForCausalLM"
    if isinstance(params.sliding_window, list):
        return "MinistralForCausalLM"
    return "MistralForCausalLM" if params.llama_4_scaling is None else "Ministral3ForCausalLM"


def _rope(params: Params) -> Fields:
    rope: Fields = {"rope_type": "default", "rope_theta": params.rope_theta}
    if params.yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": params.yarn.factor,
            "original_max_position_embeddings": params.yarn.original_max_position_embeddings,
            "beta_fast": params.yarn.beta,
            "beta_slow": params.yarn.alpha,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    if params.llama_4_scaling is not None:
        rope["llama_4_scaling_beta"] = params.llama_4_scaling.beta
        rope["original_max_position_embeddings"] = params.llama_4_scaling.original_max_position_embeddings
    return rope


def _windows(params: Params) -> Fields:
    """The sliding window, of all layers or in a pattern that repeats, with null for layers without. Raises
    ModelError."""
    given, count = params.sliding_window, params.n_layers
    if isinstance(given, str):
        if not given.isdecimal():
            raise ModelError(f"{PARAMS_FILE}: sliding_window {given!r} is no number of tokens")
        given = int(given)
    if not isinstance(given, list):
        return {"sliding_window": given}
    sizes = {size for size in given if size is not None}
    if not given or count % len(given) or len(sizes) > 1:
        raise ModelError(
            f"{PARAMS_FILE}: sliding_window {given} must be a pattern that divides the {count} layers, with "
            "one size, and null for layers without a window"
        )
    kinds = ["full_attention" if size is None else "sliding_attention" for size in given]
    return {"sliding_window": next(iter(sizes), None), "layer_types": kinds * (count // len(given))}


def _experts(params: Params, moe: Experts) -> Fields:
    inner = moe.expert_hidden_dim or params.hidden_dim
    fields: Fields = {"num_experts_per_tok": moe.num_experts_per_tok}
    if _is_mixtral(params):
        return fields | {"num_local_experts": moe.num_experts, "intermediate_size": inner}
    return fields | {
        "n_routed_experts": moe.num_experts,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "n_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": inner,
        "routed_scaling_factor": moe.routed_scale,
        "n_group": moe.num_expert_groups,
        "topk_group": moe.num_expert_groups_per_tok,
        "norm_topk_prob": True,
    }


def _quantization(stored: Stored, given: Fields) -> Fields:
    """quantization_config. Raises ModelError for a format that is not known."""
    if (stored.quant_method or "").lower().replace("_", "-") == "compressed-tensors":
        own = given["quantization"]
        assert isinstance(own, dict)
        return own | {"quant_method": "compressed-tensors"}
    if stored.qformat_weight != "fp8_e4m3":
        raise ModelError(
            f"{PARAMS_FILE}: quantization with qformat_weight {stored.qformat_weight} is not supported; "
            "supported are fp8_e4m3 and compressed-tensors"
        )
    scheme = "dynamic" if stored.qscheme_act == "NO_SCALES" else "static"
    return {"quant_method": "fp8", "activation_scheme": scheme}
