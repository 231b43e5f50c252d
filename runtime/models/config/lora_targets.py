"""The linear layers of a model that LoRA adapters can change, and their sizes. Torch-free."""

from typing import NamedTuple

from runtime.models.config.family import LLAMA
from runtime.models.config.mla_config import MlaConfig
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.recurrent_config import (
    GatedDelta,
    KimiDelta,
    Mamba1,
    Mamba2,
    Mixer,
    ShortConv,
    mixer_renames,
)
from runtime.models.config.registry import MODELS, decoder_family
from runtime.models.config.renames import Renames
from runtime.models.config.shares import even_part, most_channels, most_heads

Modules = dict[str, tuple[int, int]]  # name -> inputs and outputs


class Split(NamedTuple):
    """Over how many ranks modules are divided, and for how many attention groups they have adapters."""

    dense: int = 1  # feed-forwards
    shared: int = 1  # shared experts
    heads: int = 1  # attention heads
    group: int = 1  # recurrent layers
    num_groups: int = 1  # whose tokens feed-forwards are given, where they are divided


WHOLE = Split()
# classes of models whose linear layers take adapters
CLASSES = (
    LLAMA,
    "runtime.models.bloom:Bloom",
    "runtime.models.deepseek:DeepSeek",
    "runtime.models.deepseek_sparse:SparseDeepSeek",
    "runtime.models.gpt_oss:GptOss",
    "runtime.models.hybrid:HybridDecoder",
    "runtime.models.hybrid:GraniteHybrid",
    "runtime.models.hybrid:OlmoHybrid",
    "runtime.models.kimi_linear:KimiLinear",
    "runtime.models.learned_positions:PositionedDecoder",
    "runtime.models.zamba2:Zamba2",
)
# names of feed-forwards without a gate
PLAIN: Renames = ((".mlp.up.", ".mlp.up_proj."), (".mlp.down.", ".mlp.down_proj."))
# names of the uses of a block that layers share
USE_RENAMES: Renames = (
    (".shared_transformer.self_attn.", ".self_attn."),
    (".shared_transformer.feed_forward.", ".self_attn."),
)


def lora_renames(config: ModelConfig) -> Renames:
    """Parts of modules' names in adapters of the model's family -> those that lora_modules has."""
    takes_adapters = MODELS.get(config.architecture) in CLASSES
    own: Renames = ()
    if config.recurrent is not None:
        own = mixer_renames(config.recurrent) if config.mla is not None else ()
        own += USE_RENAMES if config.recurrent.shared is not None else ()
    return (*own, *decoder_family(config.architecture).renames, *PLAIN) if takes_adapters else ()


def lora_names(given: str, config: ModelConfig) -> set[str]:
    """The last names of modules of lora_modules that an adapter of the family may call `given`."""
    names = {given}
    for theirs, ours in lora_renames(config):
        old, new = (part.strip(".").rpartition(".")[2] for part in (theirs, ours))
        if old in names:
            names.add(new)
    return names & {name.rpartition(".")[2] for name in lora_modules(config)}


def lora_modules(config: ModelConfig, split: Split = WHOLE) -> Modules:
    """(inputs, outputs) on one rank by name, as `layers.0.self_attn.q_proj`. Empty for families
    that take no adapters: those with attention of another kind, or with weights stored as [inputs, outputs].
    Experts take none, nor does kv_b_proj of latent attention, which is no product of its own when attention
    is computed on latents."""
    is_known = MODELS.get(config.architecture) in CLASSES
    if not is_known or decoder_family(config.architecture).transposed:
        return {}
    found: Modules = {}
    for index in range(config.num_layers):
        for block, modules in _layer(config, index, split).items():
            found |= {f"layers.{index}.{block}.{name}": sizes for name, sizes in modules.items()}
    return found


def _layer(config: ModelConfig, index: int, split: Split) -> dict[str, Modules]:
    """Modules of a layer by its block."""
    if (recurrent := config.recurrent) is None:
        return {"self_attn": _attention(config, split.heads), **_feed_forward(config, index, split)}
    kind, blocks = recurrent.kinds[index], {}
    if kind in ("recurrent", "parallel"):
        blocks["mixer"] = mixer_modules(recurrent.mixer, config.hidden_size, split.group)
    if kind == "parallel" and recurrent.shared is not None:
        blocks["self_attn"] = _block_use(config, split)
    elif kind in ("attention", "parallel"):
        blocks["self_attn"] = _attention(config, split.heads, 2 if recurrent.gates_attention else 1)
    if kind == "none" or recurrent.has_feed_forward:
        blocks |= _feed_forward(config, index, split)
    return blocks


def _attention(config: ModelConfig, ranks: int, width: int = 1) -> Modules:
    """`width`: outputs of the query projection for each number of a query: 2 with a gate."""
    if config.mla is not None:
        return _latent_attention(config, config.mla, ranks)
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = (dim * count for count in most_heads(config.num_heads, config.num_kv_heads, ranks))
    return {
        "q_proj": (hidden, width * queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }


def _block_use(config: ModelConfig, split: Split) -> Modules:
    """A use of a block that layers share (Zamba 2), without the low-rank products of the model itself."""
    hidden, inner = config.hidden_size, even_part(config.intermediate_size, split.dense).size
    attention = _attention(config, split.heads)
    given = {name: (2 * hidden, outs) for name, (_, outs) in attention.items()}
    queries = given["q_proj"][1]
    return given | {
        "o_proj": (queries, hidden),
        "gate_up_proj": (hidden, 2 * inner),
        "down_proj": (inner, hidden),
        "linear": (hidden, hidden),
    }


def _latent_attention(config: ModelConfig, mla: MlaConfig, ranks: int) -> Modules:
    heads, hidden = even_part(config.num_heads, ranks).size, config.hidden_size
    queries = heads * (mla.nope_dim + mla.rope_dim)
    found = (
        {"q_proj": (hidden, queries)}
        if mla.q_rank is None
        else {"q_a_proj": (hidden, mla.q_rank), "q_b_proj": (mla.q_rank, queries)}
    )
    keys = (hidden, mla.kv_rank + mla.rope_dim)
    return found | {"kv_a_proj_with_mqa": keys, "o_proj": (heads * mla.value_dim, hidden)}


def _feed_forward(config: ModelConfig, index: int, split: Split) -> dict[str, Modules]:
    block, inner, ranks = "mlp", config.intermediate_size, split.dense
    if (moe := config.moe) is not None and moe.layers[index]:
        if not moe.shared_size:
            return {}
        block = "mlp.shared_expert" if moe.has_shared_gate else "mlp.shared_experts"
        inner, ranks = moe.shared_size, split.shared
    hidden, inner = config.hidden_size, most_channels(inner, ranks)
    names = ("gate_proj", "up_proj") if config.is_gated else ("up_proj",)
    return {block: dict.fromkeys(names, (hidden, inner)) | {"down_proj": (inner, hidden)}}


def mixer_modules(mixer: Mixer, hidden: int, ranks: int) -> Modules:
    """Projections of a recurrent mixer. Convolutions, decays and the scan's own numbers are none."""
    match mixer:
        case ShortConv():
            width = most_channels(mixer.width, ranks)
            return {"in_proj": (hidden, 3 * width), "out_proj": (width, hidden)}
        case Mamba1():
            inner = most_channels(mixer.inner, ranks)
            return {
                "in_proj": (hidden, 2 * inner),
                "x_proj": (inner, mixer.projected),
                "dt_proj": (mixer.step_rank, inner),
                "out_proj": (inner, hidden),
            }
        case Mamba2():
            heads, groups = mixer.heads(ranks)
            inner = heads * mixer.head_dim
            outs = 2 * inner + 2 * groups * mixer.state_dim + heads
            return {"in_proj": (hidden, outs), "out_proj": (inner, hidden)}
        case GatedDelta():
            return _gated_delta(mixer, hidden, ranks)
        case KimiDelta():
            heads, low = even_part(mixer.num_heads, ranks).size, mixer.head_dim
            inner = heads * low
            return {
                **{f"in_{part}": (hidden, inner) for part in ("q", "k", "v")},
                **{f"low_{part}": (hidden, low) for part in ("f", "g")},
                "low_b": (hidden, heads),
                **{f"{part}_b_proj": (low, inner) for part in ("f", "g")},
                "out_proj": (inner, hidden),
            }


def _gated_delta(mixer: GatedDelta, hidden: int, ranks: int) -> Modules:
    key_heads, heads = mixer.heads(ranks)
    keys, values = key_heads * mixer.key_dim, heads * mixer.value_dim
    out: Modules = {"out_proj": (values, hidden)}
    if mixer.layout == "by_head":
        sizes = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    else:
        sizes = {"in_proj_z": values, "in_proj_a": heads, "in_proj_b": heads}
        sizes |= (
            {"in_proj_qkv": 2 * keys + values}
            if mixer.layout == "qkv"
            else {"in_q": keys, "in_k": keys, "in_v": values}
        )
    return {name: (hidden, size) for name, size in sizes.items()} | out
