"""What Gemma 3n and Gemma 4 have in config.json beyond Gemma 3. Torch-free."""

from statistics import NormalDist
from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import sizes
from runtime.models.config.families import HfLayers, decoded, gemma, two_ropes
from runtime.models.config.rope_config import HfRope, read_rope

Whole = A[int, Meta(ge=0, le=4096)]
Share = A[float, Meta(ge=0, lt=1)]


class AltUp(Struct, frozen=True, kw_only=True):
    """Alternating updates (Baykal et al., 2023): several hidden states of a token, of which a layer computes
    one and predicts the others; and what else Gemma 3n's layers have."""

    num_states: int
    active: int  # the state that layers compute
    scales_output: bool  # the active state has a scale before the layer's own embedding
    residual_rank: int  # of the low-rank residual around attention (LAuReL)
    # of each layer: by how many standard deviations the gate must exceed its mean; None: all of it passes
    cutoffs: tuple[float | None, ...]

    def layer_count(self, hidden: int) -> int:
        """Numbers that a rank holds of a layer because of all this."""
        states = self.num_states
        updates = hidden * (states + 2) + states**2 + states**3
        return updates + hidden * (2 * self.residual_rank + 1)

    def model_count(self, hidden: int) -> int:
        """Numbers that a rank holds outside of layers because of all this."""
        return 2 * (self.num_states - 1) * hidden**2


class LayerEmbeddings(Struct, frozen=True, kw_only=True):
    """Numbers that a token has for each layer, which multiply a gate behind the layer's feed-forward."""

    width: int  # numbers for a layer
    vocab: int  # tokens that have them; others have those of token 0

    def layer_count(self, hidden: int) -> int:
        """Numbers that a rank holds of a layer because of them."""
        return hidden * (2 * self.width + 1)

    def model_count(self, hidden: int, num_layers: int, ranks: int) -> int:
        """Numbers that one of `ranks` holds outside of layers because of them."""
        return (-(-self.vocab // ranks) + hidden) * num_layers * self.width + self.width


class GlobalHeads(Struct, frozen=True, kw_only=True):
    """Heads of layers without a window, where they differ from those with one. They have no sinks."""

    head_dim: int
    num_kv_heads: int
    shares_values: bool  # values are the keys, before those are normalized and rotated


class HfAltUp(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here, with the defaults of Gemma 3n E4B."""

    num_hidden_layers: sizes.Layers
    altup_num_inputs: A[int, Meta(ge=1, le=64)] = 4
    altup_active_idx: Whole = 0
    altup_correct_scale: bool = True
    laurel_rank: sizes.Width = 64
    hidden_size_per_layer_input: sizes.Width = 256
    vocab_size_per_layer_input: sizes.Tokens = 262144
    num_kv_shared_layers: Whole = 15
    activation_sparsity_pattern: Share | list[Share] | None = None


def gemma3n(raw: Fields) -> Fields:
    """Alternating updates, low-rank residuals, per-layer embeddings, sparse gates, and the layers whose keys
    and values are those of an earlier one. Raises ModelError."""
    hf = decoded(raw, HfAltUp)
    count, local = hf.num_hidden_layers, decoded(raw, HfLayers).local_layers()
    if hf.altup_active_idx >= hf.altup_num_inputs:
        raise ModelError(
            f"config.json: altup_active_idx {hf.altup_active_idx} is not below altup_num_inputs "
            f"{hf.altup_num_inputs}"
        )
    pattern = hf.activation_sparsity_pattern
    if pattern is None:
        pattern = [0.95 if count > 10 and i < 10 else 0.0 for i in range(count)]
    shares = pattern if isinstance(pattern, list) else [pattern] * count
    if len(shares) != count:
        raise ModelError(
            f"config.json: activation_sparsity_pattern must have a number for each of the {count} layers"
        )
    altup = AltUp(
        num_states=hf.altup_num_inputs,
        active=hf.altup_active_idx,
        scales_output=hf.altup_correct_scale,
        residual_rank=hf.laurel_rank,
        cutoffs=tuple(NormalDist().inv_cdf(share) if share > 0 else None for share in shares),
    )
    ropes = two_ropes({"rope_theta": 1e6, "rope_local_base_freq": 1e4} | raw)
    sources = kv_sources(local, hf.num_kv_shared_layers)
    own = LayerEmbeddings(width=hf.hidden_size_per_layer_input, vocab=hf.vocab_size_per_layer_input)
    return (
        gemma(raw)
        | ropes
        | {"altup": altup, "layer_embeddings": own, "kv_sources": sources, "score_factor": 1.0}
    )


class HfGemma4(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here, with the defaults of transformers."""

    num_hidden_layers: sizes.Layers
    num_key_value_heads: sizes.Heads
    layer_types: list[str] | None = None
    global_head_dim: sizes.Width = 512
    num_global_key_value_heads: sizes.Heads | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    hidden_size_per_layer_input: Whole = 256
    vocab_size_per_layer_input: sizes.Tokens = 262144
    num_kv_shared_layers: Whole = 0
    per_layer_config: dict[str, Fields] = {}
    rope_parameters_by_type: dict[str, Fields] | None = None  # rope_parameters, which gemma4_keys renames


ROPES4: dict[str, Fields] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def gemma4_keys(raw: Fields) -> Fields:
    """Images alone are seen in both directions; the last layer has no window, whatever the file says. Raises
    ModelError for layer_types that are no list."""
    if raw.get("use_bidirectional_attention") == "all":
        raise ModelError("config.json: use_bidirectional_attention all is not supported in this family")
    layers = decoded({"sliding_window_pattern": 6} | raw, HfLayers)
    is_local = layers.local_layers()[:-1]
    names = ["sliding_attention" if one else "full_attention" for one in is_local]
    return {
        "use_bidirectional_attention": None,
        "layer_types": [*names, "full_attention"],
        "rope_parameters": None,
        "rope_parameters_by_type": raw.get("rope_parameters"),
    }


def gemma4(raw: Fields) -> Fields:
    """Heads of another size in layers without a window, of which few dimensions are rotated; per-layer
    embeddings, and layers whose keys and values are those of an earlier one. Raises ModelError for
    experts."""
    hf = decoded(raw, HfGemma4)
    if hf.enable_moe_block:
        raise ModelError(
            "config.json: enable_moe_block: experts of Gemma 4 are not supported; its dense models are"
        )
    layers = decoded(raw, HfLayers)
    local = layers.local_layers()
    given = next(
        (hf.per_layer_config[str(i)] for i, one in enumerate(local) if str(i) in hf.per_layer_config), {}
    )
    kv_heads = hf.num_global_key_value_heads if hf.attention_k_eq_v else None
    heads = decoded(
        {
            "head_dim": given.get("head_dim", hf.global_head_dim),
            "num_kv_heads": given.get("num_key_value_heads", kv_heads or hf.num_key_value_heads),
            "shares_values": hf.attention_k_eq_v,
        },
        GlobalHeads,
    )
    if heads.head_dim % 2 or heads.head_dim < 2 or heads.num_kv_heads < 1:
        raise ModelError("config.json: heads of layers without a window need an even, positive head_dim")
    ropes = hf.rope_parameters_by_type or ROPES4
    full = _proportional(ropes.get("full_attention", ROPES4["full_attention"]), heads.head_dim)
    base = {"max_position_embeddings": raw.get("max_position_embeddings")}
    kinds = [
        read_rope(decoded(base | {"rope_parameters": one}, HfRope))
        for one in (full, ropes.get("sliding_attention", ROPES4["sliding_attention"]))
    ]
    width = hf.hidden_size_per_layer_input
    return gemma(raw) | {
        "windows": layers.windows(),
        "rope": kinds[0],
        "context_len": kinds[0].max_position_embeddings,
        "layer_ropes": tuple(kinds[one] for one in local),
        "layer_embeddings": LayerEmbeddings(width=width, vocab=hf.vocab_size_per_layer_input)
        if width
        else None,
        "global_heads": heads,
        "kv_sources": kv_sources(local, hf.num_kv_shared_layers),
        "doubles_shared": hf.use_double_wide_mlp,
        "score_factor": 1.0,
    }


def _proportional(rope: Fields, head_dim: int) -> Fields:
    """A rope of type proportional as a plain one: the frequencies of whole heads, most of which are 0."""
    if rope.get("rope_type") != "proportional":
        return rope
    share, factor = rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)
    if not isinstance(share, int | float) or not isinstance(factor, int | float) or not 0 < share <= 1:
        raise ModelError("config.json: rope parameters: partial_rotary_factor must be above 0 and at most 1")
    rotated = int(share * head_dim // 2)
    divisors = (float(factor),) * rotated + (float("inf"),) * (head_dim // 2 - rotated)
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta"), "frequency_divisors": divisors}


def kv_sources(is_local: list[bool], num_shared: int) -> tuple[int, ...]:
    """The layer whose keys and values each layer reads: its own, or for the last `num_shared` those of the
    last layer of its kind before them. Raises ModelError where there is none."""
    first = len(is_local) - num_shared
    own = {kind: i for i, kind in enumerate(is_local[: max(first, 0)])}
    if missing := set(is_local) - own.keys():
        raise ModelError(
            f"config.json: num_kv_shared_layers {num_shared} leaves no layer that makes keys and values for "
            f"{'sliding_attention' if missing.pop() else 'full_attention'}"
        )
    return tuple(i if i < first else own[kind] for i, kind in enumerate(is_local))
