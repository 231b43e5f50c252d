"""Zamba 2: mixers of Mamba 2, and blocks of attention and a feed-forward that layers share. See
hybrid_config.py. Torch-free."""

from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict
from runtime.models.config import sizes
from runtime.models.config.families import decoded
from runtime.models.config.hybrid_config import Eps, Hybrid, Kernel, without_positions
from runtime.models.config.mamba_config import checked
from runtime.models.config.recurrent_config import LayerKind, Mamba2, Recurrent, SharedBlocks, kinds_of
from runtime.models.config.renames import Renames

LONG_CONTEXT = 16384  # tokens, of models with use_long_context
KINDS: dict[str, LayerKind] = {"hybrid": "parallel", "linear_attention": "recurrent", "mamba": "recurrent"}


class HfZamba2(Struct, frozen=True, kw_only=True):
    """Keys of Zamba 2."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    layers_block_type: list[str] | None = None
    layer_types: list[str] | None = None
    num_attention_heads: sizes.Heads
    num_key_value_heads: sizes.Heads | None = None
    intermediate_size: sizes.Width | None = None
    hidden_act: str = "gelu"
    add_bias_linear: bool = False
    n_mamba_heads: sizes.Heads = 8
    mamba_expand: A[int, Meta(ge=1, le=64)] = 2
    mamba_ngroups: sizes.Heads = 1
    mamba_d_state: sizes.Width = 64
    mamba_d_conv: Kernel = 4
    time_step_min: A[float, Meta(ge=0)] = 0.001
    num_mem_blocks: sizes.Heads = 1
    use_shared_attention_adapter: bool = False
    adapter_rank: sizes.Width = 128
    use_mem_rope: bool = False
    use_long_context: bool = False
    rms_norm_eps: Eps = 1e-5

    def block_types(self) -> list[str]:
        """The kind of each layer by its name in the file. Raises ModelError where it has none."""
        names = self.layers_block_type or self.layer_types
        if names is None:
            raise ModelError(
                "config.json has no layers_block_type; name linear_attention or hybrid for each of the "
                f"{self.num_hidden_layers} layers"
            )
        return names


def zamba2(raw: JsonDict) -> Hybrid:
    """A mixer in each layer, and blocks that some layers use before it. Raises ModelError."""
    hf = decoded(raw, HfZamba2)
    for name, is_other in (
        ("hidden_act", hf.hidden_act != "gelu"),
        ("add_bias_linear", hf.add_bias_linear),
        ("n_mamba_heads", hf.mamba_expand * hf.hidden_size % hf.n_mamba_heads != 0),
    ):
        if is_other:
            raise ModelError(f"config.json: {name} {getattr(hf, name)} is not supported for Zamba 2")
    heads = hf.num_key_value_heads or hf.num_attention_heads
    if hf.use_shared_attention_adapter and heads != hf.num_attention_heads:
        raise ModelError(
            "config.json: use_shared_attention_adapter needs as many num_key_value_heads as "
            f"num_attention_heads, and they are {heads} and {hf.num_attention_heads}"
        )
    mixer = checked(
        Mamba2(
            num_heads=hf.n_mamba_heads,
            head_dim=hf.mamba_expand * hf.hidden_size // hf.n_mamba_heads,
            state_dim=hf.mamba_d_state,
            num_groups=hf.mamba_ngroups,
            kernel=hf.mamba_d_conv,
            step_limits=(hf.time_step_min, float("inf")),
        )
    )
    shared = SharedBlocks(
        count=hf.num_mem_blocks, rank=hf.adapter_rank, adapts_attention=hf.use_shared_attention_adapter
    )
    kinds = kinds_of(hf.block_types(), KINDS, "layers_block_type", hf.num_hidden_layers)
    keys: JsonDict = {
        "head_dim": 2 * hf.hidden_size // hf.num_attention_heads,
        "num_key_value_heads": heads,
        "intermediate_size": hf.intermediate_size or 4 * hf.hidden_size,
        "rms_norm_eps": hf.rms_norm_eps,
        "layer_types": None,
    }
    if hf.use_long_context:
        keys["max_position_embeddings"] = LONG_CONTEXT
    return Hybrid(Recurrent(kinds=kinds, mixer=mixer, has_feed_forward=False, shared=shared), keys)


def zamba2_fields(raw: Fields) -> Fields:
    """Scores are scaled as if heads had half their size; some models have no positions."""
    hf = decoded(raw, HfZamba2)
    scale: Fields = {"score_factor": (hf.hidden_size / hf.num_attention_heads) ** -0.5}
    return scale if hf.use_mem_rope else scale | without_positions(raw)


def _uses(recurrent: Recurrent) -> list[int]:
    """The layers that use a block, in order."""
    return [index for index, kind in enumerate(recurrent.kinds) if kind == "parallel"]


def block_renames(recurrent: Recurrent) -> Renames:
    """Names of blocks, which checkpoints have below the first layer that uses each, and of the low-rank
    products of all uses, which they have in lists of the blocks."""
    uses, found = _uses(recurrent), []
    count = 1 if recurrent.shared is None else recurrent.shared.count
    for number, layer in enumerate(uses):
        block = f"layers.{uses[number % count]}.shared_transformer"
        use = f"layers.{layer}.self_attn"
        for part in ("q", "k", "v"):
            old = f"{block}.self_attn.linear_{part}_adapter_list.{number}"
            found += [
                (f"{old}.0.", f"{use}.adapter.{part}_down."),
                (f"{old}.1.", f"{use}.adapter.{part}_up."),
            ]
        old = f"{block}.feed_forward.gate_up_proj_adapter_list.{number}"
        found += [(f"{old}.0.", f"{use}.mlp_down."), (f"{old}.1.", f"{use}.mlp_up.")]
    for number, layer in enumerate(uses[:count]):
        block = f"layers.{layer}.shared_transformer."
        found += [(f"{block}{name}", f"blocks.{number}.") for name in ("self_attn.", "feed_forward.", "")]
    return tuple(found)


def tied_names(recurrent: Recurrent) -> tuple[str, ...]:
    """Patterns of tensors that some checkpoints have again below later uses of a block."""
    count = 1 if recurrent.shared is None else recurrent.shared.count
    return tuple(rf"\.layers\.{layer}\.shared_transformer\." for layer in _uses(recurrent)[count:])
