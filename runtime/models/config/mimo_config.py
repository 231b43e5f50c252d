"""What MiMo-V2-Flash (Xiaomi, 2025) has in config.json, under its makers' names or those of transformers.
Torch-free."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import moe_families as experts
from runtime.models.config import sizes
from runtime.models.config.altup_config import GlobalHeads
from runtime.models.config.block import DraftBlock
from runtime.models.config.families import decoded, two_ropes
from runtime.models.config.family import Family

ROTATED = 0.334  # the part of a head that rotates, where config.json does not say
DRAFT_LAYERS = 3  # next-token layers, where config.json does not say
FULL_THETA, WINDOW_THETA = 5e6, 1e4
Kind = Literal["full_attention", "sliding_attention"]
Flag = A[int, Meta(ge=0, le=1)]


class HfMimo(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here; lists have an entry for each layer."""

    num_hidden_layers: sizes.Layers
    num_attention_heads: sizes.Heads
    num_key_value_heads: sizes.Heads  # of layers without a window
    head_dim: sizes.Width = 192
    v_head_dim: sizes.Width = 128
    swa_num_attention_heads: sizes.Heads | None = None
    swa_num_key_value_heads: sizes.Heads | None = None  # of layers with one
    swa_head_dim: sizes.Width | None = None
    swa_v_head_dim: sizes.Width | None = None
    layer_types: list[Kind] | None = None
    hybrid_layer_pattern: list[Flag] | None = None  # 1 for layers with a window
    mlp_layer_types: list[str] | None = None
    moe_layer_freq: list[Flag] | int | None = None  # 1 for layers with experts
    sliding_window: A[int, Meta(ge=1, le=2**31 - 2)] = 129
    sliding_window_size: A[int, Meta(ge=1, le=2**31 - 2)] | None = None  # tokens before the query's own
    rope_parameters: Fields | None = None
    rope_theta: float = FULL_THETA
    swa_rope_theta: float = WINDOW_THETA
    partial_rotary_factor: float = ROTATED
    routed_scaling_factor: float | None = None
    n_shared_experts: int | None = None
    attention_value_scale: float | None = None
    add_swa_attention_sink_bias: bool = True
    add_full_attention_sink_bias: bool = False
    num_nextn_predict_layers: A[int, Meta(ge=0, le=64)] | None = None

    def types(self) -> list[Kind]:
        """Which layers have a window: where nothing says, all but the first and every sixth."""
        count = self.num_hidden_layers
        if self.layer_types is not None:
            return self.layer_types
        windows = self.hybrid_layer_pattern
        if windows is None:
            windows = [int(i > 0 and (i + 1) % 6 != 0) for i in range(count)]
        return ["sliding_attention" if one else "full_attention" for one in windows]

    def feed_forwards(self) -> list[str]:
        """Which layers have experts: where nothing says, all but the first."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types
        if isinstance(self.moe_layer_freq, list):
            return ["sparse" if one else "dense" for one in self.moe_layer_freq]
        return ["dense"] + ["sparse"] * (self.num_hidden_layers - 1)


def mimo_keys(raw: Fields) -> Fields:
    """Keys of HfConfig and HfMoeConfig. Heads are those of layers with a window. Raises ModelError."""
    hf = decoded(raw, HfMimo)
    kv_heads = hf.swa_num_key_value_heads or 2 * hf.num_key_value_heads
    _check(hf)
    window = hf.sliding_window if hf.sliding_window_size is None else hf.sliding_window_size + 1
    partial = {"partial_rotary_factor": hf.partial_rotary_factor}
    ropes = hf.rope_parameters or {
        "full_attention": partial | {"rope_theta": hf.rope_theta},
        "sliding_attention": partial | {"rope_theta": hf.swa_rope_theta},
    }
    return {
        "num_key_value_heads": kv_heads,
        "full_key_value_heads": hf.num_key_value_heads,
        "head_dim": hf.head_dim,
        "layer_types": hf.types(),
        "mlp_layer_types": hf.feed_forwards(),
        "moe_layer_freq": 1,
        "sliding_window": window,
        "rope_parameters": ropes,
        "routed_scaling_factor": hf.routed_scaling_factor or 1.0,
        "n_shared_experts": hf.n_shared_experts or 0,
    }


def _check(hf: HfMimo) -> None:
    """Raises ModelError for what no published model has."""
    own = (hf.swa_num_attention_heads, hf.swa_head_dim, hf.swa_v_head_dim)
    usual = (hf.num_attention_heads, hf.head_dim, hf.v_head_dim)
    if any(one not in (None, other) for one, other in zip(own, usual, strict=True)):
        raise ModelError(
            "config.json: swa_num_attention_heads, swa_head_dim and swa_v_head_dim must be those of the "
            "other layers; others are not supported"
        )
    if hf.v_head_dim > hf.head_dim:
        raise ModelError(
            f"config.json: v_head_dim {hf.v_head_dim} above head_dim {hf.head_dim} is not supported"
        )
    if not hf.add_swa_attention_sink_bias or hf.add_full_attention_sink_bias:
        raise ModelError(
            "config.json: attention sinks are supported in layers with a window, and in no others "
            "(add_swa_attention_sink_bias, add_full_attention_sink_bias)"
        )


def mimo(raw: Fields) -> Fields:
    """Windows and rotary positions by layer, heads of layers without a window, values, and next-token
    layers, which are as layers with a window."""
    hf, found = decoded(raw, HfMimo), two_ropes(raw)
    ropes = zip(found["layer_ropes"], found["windows"], strict=True)
    local = next((rope for rope, window in ropes if window), found["rope"])
    block = DraftBlock(window=raw["sliding_window"], rope=local)
    heads = GlobalHeads(head_dim=hf.head_dim, num_kv_heads=raw["full_key_value_heads"], shares_values=False)
    return found | {
        "draft_blocks": (block,) * (hf.num_nextn_predict_layers or DRAFT_LAYERS),
        "global_heads": heads,
        "value_dim": 0 if hf.v_head_dim == hf.head_dim else hf.v_head_dim,
        "value_scale": 0.707 if "attention_value_scale" not in raw else hf.attention_value_scale or 1.0,
    }


MIMO = Family(
    model_class="runtime.models.mimo:MiMoV2",
    o_bias=False,
    keys=(("layernorm_epsilon", "rms_norm_eps"),),
    defaults={"rms_norm_eps": 1e-5, "head_dim": 192},
    prepare=mimo_keys,
    moe=experts.deepseek3,
    read=mimo,
    has_sinks=True,
    renames=((".attention_sink_bias", ".sinks"),),
)
