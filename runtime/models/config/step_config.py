"""Step 3.5 (StepFun, 2026) in config.json, as its makers publish it and as transformers writes it.
Torch-free.

Lists have a number for each layer, and more for the layers that predict further tokens, which draft heads
load.
"""

from collections.abc import Sequence
from typing import Annotated as A
from typing import Literal, TypeVar

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import sizes
from runtime.models.config.block import DraftBlock
from runtime.models.config.families import Positive, decoded
from runtime.models.config.rope_config import NO_ROPE, HfRope, Rope, read_rope

T = TypeVar("T")
Share = A[float, Meta(gt=0, le=1)]
Limit = A[float, Meta(ge=0)]
Kind = Literal["full_attention", "sliding_attention"]
DENSE_LAYERS = 3  # the first ones, where config.json names no layers with experts


class HfOtherHeads(Struct, frozen=True, kw_only=True):
    """attention_other_setting: the heads of layers of one type."""

    attention_type: str = "sliding_attention"
    num_attention_heads: sizes.Heads
    num_attention_groups: sizes.Heads | None = None
    head_dim: sizes.Width | None = None


class HfStep(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here."""

    num_hidden_layers: sizes.Layers
    num_nextn_predict_layers: A[int, Meta(ge=0, le=4096)] | None = None
    mtp_layer_types: list[Kind] | None = None  # of these; else layer_types has them behind the others
    num_attention_heads: sizes.Heads
    num_key_value_heads: sizes.Heads
    head_dim: sizes.Width
    sliding_window: A[int, Meta(ge=0, le=2**31 - 1)] | None = None
    layer_types: list[Kind] | None = None
    mlp_layer_types: list[str] | None = None
    moe_layers_enum: str | list[int] | None = None  # layers with experts, also as text with commas
    attention_other_setting: HfOtherHeads | None = None
    num_sliding_attention_heads: sizes.Heads | None = None
    use_head_wise_attn_gate: bool = True
    query_pre_attn_scalar: Positive | None = None
    swiglu_limits_shared: list[Limit | None] | None = None
    use_rope_layers: list[bool] | None = None
    zero_centered: bool = True
    moe_router_activation: str = "sigmoid"


class HfStepRopes(Struct, frozen=True, kw_only=True):
    """Rotary positions of each layer, or of each type of layers as transformers has them."""

    num_hidden_layers: sizes.Layers
    rope_theta: Positive | list[Positive] = 10000.0
    partial_rotary_factors: list[Share] | None = None
    rope_scaling: Fields | None = None
    yarn_only_types: list[str] | None = None  # types of layers that rope_scaling is for; None: all
    rope_parameters: dict[str, Fields | None] | None = None
    max_position_embeddings: int | None = None


def step_keys(raw: Fields) -> Fields:
    """Layers with experts by type, and rotary positions under a key of their own: those of config.json have
    other forms than in other families. Raises ModelError."""
    hf = decoded(raw, HfStep)
    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factors", "yarn_only_types")
    ropes = {name: raw[name] for name in names if raw.get(name) is not None}
    return {
        "mlp_layer_types": _feed_forward_types(hf),
        "layer_types": None,
        "step_layer_types": hf.layer_types,
        "step_ropes": ropes,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": None,
    }


def _feed_forward_types(hf: HfStep) -> list[str]:
    count = hf.num_hidden_layers
    if hf.mlp_layer_types is not None:
        return hf.mlp_layer_types[:count]
    given = hf.moe_layers_enum
    if isinstance(given, str):
        texts = [text.strip() for text in given.split(",") if text.strip()]
        if not all(text.isdecimal() for text in texts):
            raise ModelError(
                f"config.json: moe_layers_enum {given!r} is no list of layers; write numbers and commas"
            )
        given = [int(text) for text in texts]
    sparse = set(range(DENSE_LAYERS, count) if given is None else given)
    return ["sparse" if i in sparse else "dense" for i in range(count)]


def step(raw: Fields) -> Fields:
    """Heads, windows, rotary positions and clamps by layer; a gate for each head. Raises ModelError."""
    types = raw["step_layer_types"]
    hf = decoded(raw | {"layer_types": types}, HfStep)
    count = hf.num_hidden_layers
    if not hf.zero_centered or hf.moe_router_activation != "sigmoid":
        raise ModelError(
            f"config.json: zero_centered {hf.zero_centered} with moe_router_activation "
            f"{hf.moe_router_activation} is not supported; supported is true with sigmoid"
        )
    kinds: list[Kind] = _of_layers(hf.layer_types, "full_attention", count, "layer_types")
    given: list[float | None] = _of_layers(hf.swiglu_limits_shared, 0.0, count, "swiglu_limits_shared")
    limits = tuple(limit or 0.0 for limit in given)
    rotates = _of_layers(hf.use_rope_layers, True, count, "use_rope_layers")
    ropes = _ropes(raw, kinds, rotates)
    full = next((one for one, kind in zip(ropes, kinds, strict=True) if kind == "full_attention"), ropes[0])
    return {
        "windows": tuple((hf.sliding_window or 0) * (kind == "sliding_attention") for kind in kinds),
        "window_heads": _window_heads(hf),
        "gate_dim": int(hf.use_head_wise_attn_gate),
        "limits": limits if any(limits) else (),
        "rope": full,
        "layer_ropes": tuple(ropes),
        "context_len": full.context_len,
        "score_factor": 0.0 if hf.query_pre_attn_scalar is None else hf.query_pre_attn_scalar**-0.5,
        "draft_blocks": _draft_blocks(hf, raw, kinds),
    }


def _draft_blocks(hf: HfStep, raw: Fields, kinds: list[Kind]) -> tuple[DraftBlock, ...]:
    """The blocks of next-token layers; (): config.json does not say what they are. Raises ModelError."""
    wanted, count = hf.num_nextn_predict_layers or 0, len(kinds)
    own = (hf.mtp_layer_types or (hf.layer_types or [])[count:])[:wanted]
    if len(own) < wanted:
        return ()
    rotates = _of_layers(hf.use_rope_layers, True, count, "use_rope_layers", wanted)
    limits = [*(hf.swiglu_limits_shared or [0.0] * count), *[0.0] * wanted][count : count + wanted]
    ropes = _ropes(raw, [*kinds, *own], rotates, wanted)
    window = hf.sliding_window or 0
    return tuple(
        DraftBlock(window=window * (kind == "sliding_attention"), rope=rope, limit=limit or 0.0)
        for kind, rope, limit in zip(own, ropes[count:], limits, strict=True)
    )


def _window_heads(hf: HfStep) -> int:
    other = hf.attention_other_setting
    if other is None:
        return hf.num_sliding_attention_heads or hf.num_attention_heads
    if (
        other.attention_type != "sliding_attention"
        or other.num_attention_groups not in (None, hf.num_key_value_heads)
        or other.head_dim not in (None, hf.head_dim)
    ):
        raise ModelError(
            "config.json: attention_other_setting may give layers with sliding_attention other "
            "num_attention_heads; other types of layers, groups and head_dim are not supported"
        )
    if other.num_attention_heads % hf.num_key_value_heads:
        raise ModelError(
            f"config.json: attention_other_setting: num_attention_heads {other.num_attention_heads} is not a "
            f"multiple of the {hf.num_key_value_heads} key/value heads"
        )
    return other.num_attention_heads


def _ropes(raw: Fields, kinds: list[Kind], rotates: list[bool], num_drafts: int = 0) -> list[Rope]:
    """Rotary positions of each layer, the last `num_drafts` being next-token layers. Raises ModelError."""
    count, names = len(kinds) - num_drafts, ("num_hidden_layers", "max_position_embeddings")
    given = {name: raw[name] for name in names if name in raw}
    hf = decoded(given | raw["step_ropes"], HfStepRopes)
    theta = hf.rope_theta
    thetas: list[float] = theta[:] if isinstance(theta, list) else [theta] * count
    thetas = _of_layers(thetas, 1.0, count, "rope_theta", num_drafts)
    shares = _of_layers(hf.partial_rotary_factors, 1.0, count, "partial_rotary_factors", num_drafts)
    found = []
    for i, kind in enumerate(kinds):
        is_scaled = hf.yarn_only_types is None or kind in hf.yarn_only_types
        own: Fields = {"rope_theta": thetas[i], "partial_rotary_factor": shares[i]}
        own |= (hf.rope_scaling or {}) if is_scaled else {}
        own |= (hf.rope_parameters or {}).get(kind) or {}
        base = {"max_position_embeddings": hf.max_position_embeddings, "rope_parameters": own}
        found.append(read_rope(decoded(base, HfRope)) if rotates[i] else NO_ROPE)
    return found


def _of_layers(
    given: Sequence[T] | None, otherwise: T, count: int, name: str, num_drafts: int = 0
) -> list[T]:
    """A list's entries of the model's layers, and of next-token layers behind them, for which its last entry
    stands where it has none; `otherwise` for each where there is no list. Raises ModelError where the layers
    are more."""
    if not given:
        return [otherwise] * (count + num_drafts)
    if len(given) < count:
        raise ModelError(f"config.json: {name} has {len(given)} entries for {count} layers")
    return [given[min(i, len(given) - 1)] for i in range(count + num_drafts)]
