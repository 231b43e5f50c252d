"""Decoders of GPT-2's line: layer norms, biases, feed-forwards without gates, and positions that are learned
(GPT-2, GPT-Neo, StarCoder 1, OPT) or rotated in pairs (GPT-J, CodeGen): readers of their config.json, and
their rows (family.py). Torch-free."""

from typing import Annotated as A

from msgspec import Meta, Struct, structs

from runtime.errors import ModelError, OwnCodeLacks
from runtime.json_value import Fields
from runtime.models.config import sizes
from runtime.models.config.block import ACTIVATIONS, LearnedPositions
from runtime.models.config.families import decoded
from runtime.models.config.family import Family
from runtime.models.config.renames import Renames
from runtime.models.config.rope_config import NO_ROPE

POSITIONED = "runtime.models.learned_positions:PositionedDecoder"
OPT_OFFSET = 2  # rows of OPT's table in front of that of position 0
KEYS = (
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_inner", "intermediate_size"),
    ("n_positions", "max_position_embeddings"),
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("activation_function", "hidden_act"),
)
GPT2_NAMES: Renames = (
    ("transformer.", ""),
    ("h.", "layers."),
    ("wte.", "embed_tokens."),
    ("wpe.", "embed_positions."),
    ("ln_f.", "norm."),
    (".attn.attention.", ".attn."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".attn.", ".self_attn."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".mlp.c_fc.", ".mlp.up."),
    (".mlp.c_proj.", ".mlp.down."),
    (".mlp.fc_in.", ".mlp.up."),
    (".mlp.fc_out.", ".mlp.down."),
)
OPT_NAMES: Renames = (
    ("decoder.final_layer_norm.", "norm."),
    ("decoder.", ""),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".self_attn_layer_norm.", ".input_layernorm."),
    (".final_layer_norm.", ".post_attention_layernorm."),
    (".fc1.", ".mlp.up."),
    (".fc2.", ".mlp.down."),
)


class HfGpt(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here, under our names."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    num_attention_heads: sizes.Heads
    intermediate_size: sizes.Width | None = None
    max_position_embeddings: sizes.Tokens
    hidden_act: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    multi_query: bool = True
    window_size: A[int, Meta(gt=0, le=2**31 - 1)] = 256
    attention_types: list[tuple[list[str], sizes.Layers]] | None = None


class HfOpt(Struct, frozen=True, kw_only=True):
    """What OPT may have in config.json besides."""

    hidden_size: sizes.Width
    word_embed_proj_dim: sizes.Width | None = None
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True


def gpt_keys(raw: Fields) -> Fields:
    """Sizes that follow from others. Raises ModelError for attention to an encoder."""
    hf = decoded(raw, HfGpt)
    if hf.add_cross_attention:
        raise ModelError("config.json: add_cross_attention: models with an encoder are not supported")
    return {
        "intermediate_size": hf.intermediate_size or 4 * hf.hidden_size,
        "num_key_value_heads": hf.num_attention_heads,
        "head_dim": hf.hidden_size // hf.num_attention_heads,
    }


def _activation(name: str) -> Fields:
    if name not in ACTIVATIONS:
        raise ModelError(
            f"config.json: activation_function {name} is not supported; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return {"activation": ACTIVATIONS[name]}


def _learned(hf: HfGpt, offset: int = 0) -> Fields:
    positions = LearnedPositions(count=hf.max_position_embeddings + offset, offset=offset)
    return _activation(hf.hidden_act) | {
        "positions": positions,
        "rope": NO_ROPE,
        "context_len": hf.max_position_embeddings,
        "score_factor": 0.0 if hf.scale_attn_weights else 1.0,
    }


def gpt2(raw: Fields) -> Fields:
    """Learned positions. Raises OwnCodeLacks for scores that are scaled by the layer's number."""
    hf = decoded(raw, HfGpt)
    if hf.scale_attn_by_inverse_layer_idx:
        raise OwnCodeLacks(
            "config.json: scale_attn_by_inverse_layer_idx is computed by transformers' own code alone; add "
            "--model-impl transformers"
        )
    return _learned(hf)


def big_code_keys(raw: Fields) -> Fields:
    """One key/value head. Raises OwnCodeLacks for a model with several."""
    hf = decoded(raw, HfGpt)
    if not hf.multi_query:
        raise OwnCodeLacks(
            "config.json: multi_query false is computed by transformers' own code alone; add --model-impl "
            "transformers"
        )
    return gpt_keys(raw) | {"num_key_value_heads": 1}


def gpt_neo_keys(raw: Fields) -> Fields:
    """The layers' numbers under our names."""
    names = (("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads"))
    return gpt_keys(raw | {ours: raw[theirs] for theirs, ours in names if theirs in raw})


def gpt_neo(raw: Fields) -> Fields:
    """Windows in layers that attention_types names, and scores that are not scaled. Raises ModelError."""
    hf = decoded(raw, HfGpt)
    kinds = [kind for names, count in hf.attention_types or () for _ in range(count) for kind in names]
    if len(kinds) != hf.num_hidden_layers or set(kinds) - {"global", "local"}:
        raise ModelError(
            "config.json: attention_types must name global or local for each of the "
            f"{hf.num_hidden_layers} layers"
        )
    windows = tuple(hf.window_size if kind == "local" else 0 for kind in kinds)
    return _learned(hf) | {"windows": windows, "score_factor": 1.0}


def opt(raw: Fields) -> Fields:
    """Learned positions behind two rows that no position has. Raises OwnCodeLacks for norms behind blocks and
    projected embeddings (OPT 350M), and for layers without biases."""
    hf = decoded(raw, HfOpt)
    is_plain = hf.word_embed_proj_dim in (None, hf.hidden_size) and hf.do_layer_norm_before
    if not (is_plain and hf.enable_bias and hf.layer_norm_elementwise_affine):
        raise OwnCodeLacks(
            "config.json: word_embed_proj_dim other than hidden_size, do_layer_norm_before false, and layers "
            "without biases are computed by transformers' own code alone; add --model-impl transformers"
        )
    return _learned(decoded(raw, HfGpt), OPT_OFFSET)


def rotated_pairs(raw: Fields) -> Fields:
    """A head with a bias."""
    return _activation(decoded(raw, HfGpt).hidden_act) | {"has_head_bias": True}


ROTATED = Family(
    norm="layer",
    placement="parallel",
    keys=KEYS,
    defaults={"rms_norm_eps": 1e-5, "rotary_dim": 64},
    prepare=gpt_keys,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=True,
    is_gated=False,
    is_rope_interleaved=True,
    activation="gelu_new",
    read=rotated_pairs,
    renames=GPT2_NAMES,
)
LEARNED = Family(
    model_class=POSITIONED,
    norm="layer",
    keys=KEYS,
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_new"},
    prepare=gpt_keys,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    is_gated=False,
    is_tied=True,
    activation="gelu_new",
    fused={"c_attn": "qkv"},
    read=gpt2,
    renames=GPT2_NAMES,
)
EXAONE_NAMES: Renames = (
    ("transformer.h.", "layers."),
    ("transformer.wte.", "embed_tokens."),
    ("transformer.ln_f.", "norm."),
    (".attn.attention.out_proj.", ".self_attn.o_proj."),
    (".attn.attention.", ".self_attn."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".mlp.c_fc_0.", ".mlp.gate_proj."),
    (".mlp.c_fc_1.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)
GPT = {
    "Exaone": Family(  # Llama's layers under GPT-2's names
        keys=(
            ("num_layers", "num_hidden_layers"),
            ("layer_norm_epsilon", "rms_norm_eps"),
            ("activation_function", "hidden_act"),
        ),
        qkv_bias=False,
        o_bias=False,
        renames=EXAONE_NAMES,
    ),
    "CodeGen": structs.replace(ROTATED, fused={"qkv_proj": "quarters"}),
    "GPT2": structs.replace(LEARNED, transposed=("c_attn", "c_proj", "c_fc")),
    "GPTBigCode": structs.replace(LEARNED, prepare=big_code_keys),
    "GPTJ": ROTATED,
    "GPTNeo": structs.replace(
        LEARNED,
        keys=(("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads"), *KEYS),
        prepare=gpt_neo_keys,
        qkv_bias=False,
        fused={},
        read=gpt_neo,
    ),
    "OPT": structs.replace(
        LEARNED,
        keys=(("ffn_dim", "intermediate_size"), *KEYS),
        fused={},
        read=opt,
        activation="relu",
        renames=OPT_NAMES,
    ),
}
