"""Dense families that differ from Llama in norms, biases, parallel blocks and names: readers of their
config.json, and their rows (family.py). Torch-free."""

from typing import Annotated as A

from msgspec import Meta, Struct, structs

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import sizes
from runtime.models.config.block import ACTIVATIONS, Alibi
from runtime.models.config.families import HfLayers, Positive, decoded, gemma, granite
from runtime.models.config.family import Family
from runtime.models.config.renames import NEOX_MLP, Renames
from runtime.models.config.rope_config import NO_ROPE, HfRope, read_rope

UP_DOWN: Renames = ((".mlp.up_proj.", ".mlp.up."), (".mlp.down_proj.", ".mlp.down."))
ROPE_SHARES = (("rotary_pct", "partial_rotary_factor"), ("rope_pct", "partial_rotary_factor"))
BAICHUAN2_VOCAB = 125696  # of Baichuan 2, whose head is normalized; config.json says it in no other way


class HfActivation(Struct, frozen=True, kw_only=True):
    """The activation of a feed-forward without a gate."""

    hidden_act: str = "gelu"


def activation(raw: Fields) -> Fields:
    """Raises ModelError for an activation that is not supported."""
    name = decoded(raw, HfActivation).hidden_act
    if name not in ACTIVATIONS:
        raise ModelError(
            f"config.json: hidden_act {name} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return {"activation": ACTIVATIONS[name]}


class HfGraniteSwa(HfLayers, frozen=True, kw_only=True):
    """Keys of Granite with windows. A base of 0: a layer without positions."""

    layer_rope_theta: list[A[float, Meta(ge=0)]] | None = None


def granite_swa(raw: Fields) -> Fields:
    """Granite's multipliers, windows by layer, and rotary positions of another base in each. Raises
    ModelError."""
    hf = decoded(raw, HfGraniteSwa)
    if hf.layer_types is None:
        raise ModelError("config.json has no layer_types; name full_attention or sliding_attention by layer")
    rope = read_rope(decoded(raw, HfRope))
    bases = hf.layer_rope_theta or [rope.rope_theta] * hf.num_hidden_layers
    if len(bases) != hf.num_hidden_layers:
        raise ModelError(
            f"config.json: layer_rope_theta has {len(bases)} numbers for {hf.num_hidden_layers} layers"
        )
    ropes = tuple(structs.replace(rope, rope_theta=base) if base else NO_ROPE for base in bases)
    return granite(raw) | {"windows": hf.windows(), "layer_ropes": ropes}


class HfFalcon(Struct, frozen=True, kw_only=True):
    """Keys of Falcon."""

    hidden_size: sizes.Width
    num_attention_heads: sizes.Heads
    num_kv_heads: sizes.Heads | None = None
    ffn_hidden_size: sizes.Width | None = None
    activation: str = "gelu"
    alibi: bool = False
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    num_ln_in_parallel_attn: A[int, Meta(ge=1, le=2)] | None = None


def falcon_keys(raw: Fields) -> Fields:
    """One key/value head, groups of them in the new decoder, or as many as queries."""
    hf = decoded(raw, HfFalcon)
    kv_heads = hf.num_kv_heads or hf.num_attention_heads
    if not hf.new_decoder_architecture and hf.multi_query:
        kv_heads = 1
    return {
        "num_key_value_heads": kv_heads,
        "intermediate_size": hf.ffn_hidden_size or 4 * hf.hidden_size,
        "hidden_act": hf.activation,
    }


def falcon(raw: Fields) -> Fields:
    """Where norms are: one or two before both halves of a block, or one before each. Biases by distance in
    place of rotary positions in some models, whose scores are scaled behind them."""
    hf = decoded(raw, HfFalcon)
    num_norms = hf.num_ln_in_parallel_attn or 2
    if hf.new_decoder_architecture and num_norms == 2:
        placement = "parallel_two_norms"
    else:
        placement = "parallel" if hf.new_decoder_architecture or hf.parallel_attn else "pre"
    alibi = Alibi(factor=(hf.hidden_size // hf.num_attention_heads) ** -0.5)
    biased: Fields = {"rope": NO_ROPE, "alibi": alibi} if hf.alibi else {}
    return activation(raw) | {"placement": placement} | biased


class HfParallel(Struct, frozen=True, kw_only=True):
    """Keys of GPT-NeoX, StableLM and Phi."""

    use_parallel_residual: bool | None = None
    use_qkv_bias: bool = False
    qk_layernorm: bool = False


def neox(raw: Fields) -> Fields:
    """Blocks in parallel, with a norm for each half, or one behind the other."""
    is_parallel = decoded(raw, HfParallel).use_parallel_residual is not False
    return activation(raw) | {"placement": "parallel_two_norms" if is_parallel else "pre"}


def neox_keys(raw: Fields) -> Fields:
    """All query heads have keys and values of their own."""
    return {"num_key_value_heads": raw.get("num_attention_heads")}


def _without_head_norms(raw: Fields) -> HfParallel:
    hf = decoded(raw, HfParallel)
    if hf.qk_layernorm:
        raise ModelError(
            "config.json: qk_layernorm is computed by transformers' own code alone; add --model-impl "
            "transformers"
        )
    return hf


def stablelm(raw: Fields) -> Fields:
    """Blocks in parallel with one norm, or one behind the other; biases of queries, keys and values. Raises
    ModelError for norms of heads."""
    hf = _without_head_norms(raw)
    return {"qkv_bias": hf.use_qkv_bias, "placement": "parallel" if hf.use_parallel_residual else "pre"}


def phi(raw: Fields) -> Fields:
    """A head with a bias. Raises ModelError for norms of heads."""
    _without_head_norms(raw)
    return activation(raw) | {"has_head_bias": True}


class HfOlmo(Struct, frozen=True, kw_only=True):
    """Keys of OLMo 1."""

    clip_qkv: Positive | None = None


def olmo(raw: Fields) -> Fields:
    """Queries, keys and values are clamped in some models."""
    return {"qkv_clip": decoded(raw, HfOlmo).clip_qkv or 0.0}


def ministral(raw: Fields) -> Fields:
    """Windows in layers that layer_types names; without it in all."""
    layers = decoded({"sliding_window": None} | raw, HfLayers)
    if layers.layer_types is None:
        return {"windows": (layers.sliding_window or 0,) * layers.num_hidden_layers}
    return {"windows": layers.windows()}


class HfHyperClovaX(Struct, frozen=True, kw_only=True):
    """Keys of HyperCLOVA X."""

    logits_scaling: Positive = 1.0
    attention_multiplier: Positive | None = None
    use_post_norm: bool = True


def hyperclovax(raw: Fields) -> Fields:
    """Multipliers of Granite, of which that of logits multiplies; norms behind blocks."""
    hf = decoded(raw, HfHyperClovaX)
    known = {name: value for name, value in raw.items() if name != "attention_multiplier" or value}
    return granite(known) | {
        "logit_scale": hf.logits_scaling,
        "score_factor": hf.attention_multiplier or 0.0,
        "placement": "both" if hf.use_post_norm else "pre",
    }


class HfBaichuan(Struct, frozen=True, kw_only=True):
    """Keys of Baichuan."""

    vocab_size: sizes.Tokens
    max_position_embeddings: sizes.Tokens | None = None
    model_max_length: sizes.Tokens = 4096


def baichuan(raw: Fields) -> Fields:
    """Baichuan 2 has a normalized head. Models with 13B weights, whose files have model_max_length in place
    of max_position_embeddings, have biases by distance in place of rotary positions."""
    hf = decoded(raw, HfBaichuan)
    head: Fields = {"has_normed_head": hf.vocab_size == BAICHUAN2_VOCAB}
    if hf.max_position_embeddings is not None:
        return head
    return head | {"rope": NO_ROPE, "alibi": Alibi(), "context_len": hf.model_max_length}


DENSE = {
    "Apertus": Family(
        qk_norm="head",
        activation="xielu",
        is_gated=False,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 12e6},
        read=activation,
        renames=(
            *UP_DOWN,
            (".attention_layernorm.", ".input_layernorm."),
            (".feedforward_layernorm.", ".post_attention_layernorm."),
        ),
    ),
    "Baichuan": Family(qkv_bias=False, o_bias=False, fused={"W_pack": "qkv"}, read=baichuan),
    "Cwm": Family(qkv_bias=False, o_bias=False, window="named", defaults={"sliding_window": 8192}),
    "Falcon": Family(
        norm="layer",
        keys=(("layer_norm_epsilon", "rms_norm_eps"), ("bias", "attention_bias"), ("bias", "mlp_bias")),
        defaults={"rms_norm_eps": 1e-5},
        prepare=falcon_keys,
        mlp_bias=None,
        is_gated=False,
        activation="gelu",
        is_tied=True,
        fused={"query_key_value": "groups"},
        read=falcon,
        renames=(
            *NEOX_MLP,
            ("transformer.h.", "layers."),
            ("transformer.word_embeddings.", "embed_tokens."),
            ("transformer.ln_f.", "norm."),
            (".self_attention.dense.", ".self_attn.o_proj."),
            (".self_attention.", ".self_attn."),
            (".ln_attn.", ".input_layernorm."),
            (".ln_mlp.", ".post_attention_layernorm."),
        ),
    ),
    "GPTNeoX": Family(
        norm="layer",
        keys=(("layer_norm_eps", "rms_norm_eps"), ("rotary_emb_base", "rope_theta"), *ROPE_SHARES),
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "attention_bias": True},
        prepare=neox_keys,
        mlp_bias=True,
        is_gated=False,
        activation="gelu",
        fused={"query_key_value": "groups"},
        read=neox,
        renames=(
            *NEOX_MLP,
            ("gpt_neox.", ""),
            ("embed_in.", "embed_tokens."),
            ("embed_out.", "lm_head."),
            ("final_layer_norm.", "norm."),
            (".attention.dense.", ".self_attn.o_proj."),
            (".attention.", ".self_attn."),
        ),
    ),
    "GraniteSWA": Family(mlp_bias=None, is_tied=True, has_sinks=True, read=granite_swa),
    "Helium": Family(o_bias=False, mlp_bias=None, is_rope_interleaved=True),
    "HyperCLOVAX": Family(
        mlp_bias=None,
        read=hyperclovax,
        renames=((".post_norm1.", ".attention_output_norm."), (".post_norm2.", ".mlp_output_norm.")),
    ),
    "Jais2": Family(
        norm="layer",
        keys=(("layer_norm_eps", "rms_norm_eps"),),
        defaults={"rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
        mlp_bias=None,
        is_gated=False,
        activation="relu2",
        renames=UP_DOWN,
    ),
    "Ministral": Family(qkv_bias=False, o_bias=False, read=ministral),
    "Nemotron": Family(
        norm="layer_offset",
        keys=(("norm_eps", "rms_norm_eps"), ("rope_percent", "partial_rotary_factor")),
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        mlp_bias=None,
        is_gated=False,
        activation="relu2",
        renames=UP_DOWN,
    ),
    "Olmo": Family(norm="layer_plain", defaults={"rms_norm_eps": 1e-5}, read=olmo),
    "Phi": Family(
        norm="layer",
        placement="parallel",
        keys=(("layer_norm_eps", "rms_norm_eps"),),
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        is_gated=False,
        activation="gelu_new",
        read=phi,
        renames=(
            (".mlp.fc1.", ".mlp.up."),
            (".mlp.fc2.", ".mlp.down."),
            (".self_attn.dense.", ".self_attn.o_proj."),
            ("final_layernorm.", "norm."),
        ),
    ),
    "StableLm": Family(
        norm="layer",
        o_bias=False,
        keys=(("layer_norm_eps", "rms_norm_eps"), *ROPE_SHARES),
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        read=stablelm,
    ),
    "VaultGemma": Family(
        norm="rms_offset",
        activation="gelu_pytorch_tanh",
        is_tied=True,
        window="alternating",
        read=gemma,
        renames=(("pre_feedforward_layernorm.", "post_attention_layernorm."),),
    ),
    "Youtu": Family(model_class="runtime.models.deepseek:DeepSeek", is_mla=True, is_tied=True),
}
