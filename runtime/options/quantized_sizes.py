"""What quantization changes in the bytes of a rank's weights, from config.json alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from runtime.models.config.lora_targets import mixer_modules
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.moe_config import MoeConfig
from runtime.models.config.quantization_config import Quantization
from runtime.models.config.quantization_schemes import Full, Scheme, WeightFormat, held_bytes
from runtime.models.config.recurrent_config import Recurrent
from runtime.models.config.shares import even_part, most_channels, most_heads

BITS_OF_FOUR = 4.5  # bits of a number of bitsandbytes: 4, and a float32 for 64 numbers


class Ranks(NamedTuple):
    """Ranks that split a dense weight, experts, a shared expert, and attention heads."""

    dense: int
    experts: int
    shared: int
    heads: int | None = None  # None: as a dense weight
    mlp: int | None = None  # likewise, the feed-forward of a layer without experts
    # likewise, those with the same requests: they split the embedding, a head tied to it, recurrent layers
    group: int | None = None
    head: int | None = None  # likewise, a head of its own

    @property
    def of_heads(self) -> int:
        """Ranks that split attention heads."""
        return self.heads or self.dense

    @property
    def of_group(self) -> int:
        """Ranks with the same requests."""
        return self.group or self.dense


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of one rank. Parts of a fused weight are named one by one."""

    names: tuple[str, ...]  # those of the checkpoint's modules
    outputs: tuple[int, ...]  # of each part
    inputs: int
    full_inputs: int  # before a split over ranks
    copies: int = 1  # experts

    @property
    def count(self) -> int:
        """Numbers of the weight and its copies."""
        return self.copies * sum(self.outputs) * self.inputs

    def held_bytes(self, formats: list[WeightFormat | None], item: int) -> int:
        """Bytes where each part has a format; None: it is plain. `item`: bytes of a plain number."""
        schemes = [None if one is None else one.scheme for one in formats]
        if len(set(schemes)) == 1:
            return self.copies * self._bytes(schemes[0], sum(self.outputs), item)
        parts = zip(schemes, self.outputs, strict=True)
        return self.copies * sum(self._bytes(scheme, outputs, item) for scheme, outputs in parts)

    def _bytes(self, scheme: Scheme | None, outputs: int, item: int) -> int:
        if scheme is None:
            return outputs * self.inputs * item
        return held_bytes(scheme, outputs, self.inputs, self.full_inputs, item)


def weights_of_layer(model: ModelConfig, layer: int, ranks: Ranks) -> Iterator[Weight]:
    """The weights of a layer that may be quantized."""
    model = model.of_layer(layer)
    recurrent, kind = model.recurrent, "attention"
    if recurrent is not None:
        kind = recurrent.kinds[layer]
        yield from _recurrent(model, recurrent, layer, ranks)
    if kind in ("attention", "parallel") and (recurrent is None or recurrent.shared is None):
        yield from _attention(model, layer, ranks.of_heads)
    if recurrent is None or recurrent.has_feed_forward or kind == "none":
        yield from _feed_forward(model, layer, ranks)


def _feed_forward(model: ModelConfig, layer: int, ranks: Ranks) -> Iterator[Weight]:
    block, hidden, moe = f"layers.{layer}.mlp.", model.hidden_size, model.moe
    if moe is None or not moe.layers[layer] or moe.is_shortcut:
        yield from _mlp(
            block, hidden, model.intermediate_size, ranks.mlp or ranks.dense, is_gated=model.is_gated
        )
    if moe is None or not moe.layers[layer]:
        return
    if moe.is_shortcut:
        block = f"layers.{layer}.shortcut."
    if not moe.is_stacked:
        split, local = ranks.dense // ranks.experts, moe.num_experts // ranks.experts
        is_gated = moe.is_gated
        if is_gated and not moe.limit_of(layer):  # the others are dequantized when they are loaded
            yield from _mlp(block + "experts.0.", hidden, moe.intermediate_size, split, local)
        if moe.shared_size:
            yield from _mlp(
                block + shared_name(moe), hidden, moe.shared_size, ranks.shared, is_gated=is_gated
            )


def _recurrent(model: ModelConfig, recurrent: Recurrent, layer: int, ranks: Ranks) -> Iterator[Weight]:
    """The mixer of a layer, and what a use of a shared block adds."""
    kind, hidden = recurrent.kinds[layer], model.hidden_size
    if kind in ("recurrent", "parallel"):
        for name, (inputs, outputs) in mixer_modules(recurrent.mixer, hidden, ranks.of_group).items():
            full = inputs * ranks.of_group if name in ("out_proj", "x_proj") else inputs
            yield Weight((f"layers.{layer}.mixer.{name}",), (outputs,), inputs, full)
    if recurrent.shared is None or kind != "parallel":
        return
    block, rank = f"layers.{layer}.self_attn.", recurrent.shared.rank
    inner = most_channels(model.intermediate_size, ranks.dense)
    queries = most_heads(model.num_heads, model.num_kv_heads, ranks.of_heads)[0] * model.head_dim
    yield Weight((block + "linear",), (hidden,), hidden, hidden)
    yield Weight((block + "mlp_down",), (rank,), hidden, hidden)
    yield Weight((block + "mlp_up",), (2 * inner,), rank, rank)
    if recurrent.shared.adapts_attention:
        yield Weight((block + "adapter.q_down",), (3 * rank,), 2 * hidden, 2 * hidden)
        yield Weight((block + "adapter.q_up",), (queries,), rank, rank, 3)


def _shared_blocks(model: ModelConfig, ranks: Ranks) -> Iterator[Weight]:
    """The blocks that layers share."""
    if model.recurrent is None or model.recurrent.shared is None:
        return
    hidden, copies = model.hidden_size, model.recurrent.shared.count
    heads = most_heads(model.num_heads, model.num_kv_heads, ranks.of_heads)
    q, kv = (count * model.head_dim for count in heads)
    yield Weight(("blocks.0.q_proj",), (q + 2 * kv,), 2 * hidden, 2 * hidden, copies)
    yield Weight(("blocks.0.o_proj",), (hidden,), q, model.num_heads * model.head_dim, copies)
    yield from _mlp("blocks.0.", hidden, model.intermediate_size, ranks.dense, copies)


def shared_name(moe: MoeConfig) -> str:
    """The module of the shared experts."""
    return "shared_expert." if moe.has_shared_gate else "shared_experts."


def _mlp(
    block: str, hidden: int, inner: int, ranks: int, copies: int = 1, *, is_gated: bool = True
) -> Iterator[Weight]:
    own = most_channels(inner, ranks)
    if is_gated:
        yield Weight((block + "gate_proj", block + "up_proj"), (own, own), hidden, hidden, copies)
    else:
        yield Weight((block + "up_proj",), (own,), hidden, hidden, copies)
    yield Weight((block + "down_proj",), (hidden,), own, inner, copies)


def _projections(model: ModelConfig, layer: int) -> str:
    """Which of queries, keys and values a layer makes: q, qk or qkv."""
    if not model.has_own_keys(layer):
        return "q"
    heads = model.global_heads
    return "qk" if heads is not None and heads.shares_values and not model.windows[layer] else "qkv"


def _attention(model: ModelConfig, layer: int, ranks: int) -> Iterator[Weight]:
    block = f"layers.{layer}.self_attn."
    hidden, latent = model.hidden_size, model.mla
    if latent is None:
        heads, kv_heads = most_heads(model.num_heads, model.num_kv_heads, ranks)
        q, kv = heads * model.head_dim, kv_heads * model.head_dim
        parts = _projections(model, layer)
        names = tuple(f"{block}{name}_proj" for name in parts)
        gates = model.recurrent is not None and model.recurrent.gates_attention
        value_dim = model.value_dim or model.head_dim
        yield Weight(names, (q * (1 + gates), kv, kv_heads * value_dim)[: len(parts)], hidden, hidden)
        yield Weight((block + "o_proj",), (hidden,), heads * value_dim, model.num_heads * value_dim)
        if model.gate_dim:
            yield Weight((block + "g_proj",), (heads * model.gate_dim,), hidden, hidden)
        return
    heads = even_part(model.num_heads, ranks).size
    queries, values = heads * (latent.nope_dim + latent.rope_dim), heads * latent.value_dim
    first = latent.q_rank or queries
    rest = latent.kv_rank + latent.rope_dim
    names = (block + ("q_a_proj" if latent.q_rank else "q_proj"), block + "kv_a_proj_with_mqa")
    yield Weight(names, (first, rest), hidden, hidden)
    if latent.q_rank:
        yield Weight((block + "q_b_proj",), (queries,), latent.q_rank, latent.q_rank)
    if (indexer := latent.indexer) is not None and latent.q_rank:
        heads_dim, names = indexer.num_heads * indexer.dim, (block + "indexer.wq_b", block + "indexer.wk")
        yield Weight(names[:1], (heads_dim,), latent.q_rank, latent.q_rank)
        yield Weight(names[1:], (indexer.dim,), hidden, hidden)
        yield Weight((block + "indexer.weights_proj",), (indexer.num_heads,), hidden, hidden)
    up = heads * (latent.nope_dim + latent.value_dim)
    yield Weight((block + "kv_b_proj",), (up,), latent.kv_rank, latent.kv_rank)
    yield Weight((block + "o_proj",), (hidden,), values, model.num_heads * latent.value_dim)


def layer_saved_bytes(model: ModelConfig, layer: int, ranks: Ranks, item: int) -> int:
    """Bytes that quantization saves on one rank in a layer."""
    if model.quantization is None or model.encoder is not None:
        return 0
    return _saved_bytes(weights_of_layer(model, layer, ranks), model.quantization, item)


def _saved_bytes(weights: Iterator[Weight], quantization: Quantization, item: int) -> int:
    saved, format_of = 0, quantization.format_of
    for weight in weights:
        saved += weight.count * item - weight.held_bytes([format_of(name) for name in weight.names], item)
    return saved


def saved_bytes(model: ModelConfig, ranks: Ranks, item: int) -> int:
    """Bytes that quantization saves on one rank."""
    if model.quantization is None:
        return 0
    saved = sum(layer_saved_bytes(model, i, ranks, item) for i in range(model.num_layers))
    return saved + _saved_bytes(_shared_blocks(model, ranks), model.quantization, item)


def quantization_notice(model: ModelConfig, ranks: Ranks, dtype: str, item: int) -> str | None:
    """One line where weights are quantized or dequantized while they are loaded, with the bytes of a rank;
    None: they are read as they are."""
    if model.quantization is None or model.encoder is not None:
        return None
    held = stored = 0
    names: set[str] = set()
    for weight in (one for i in range(model.num_layers) for one in weights_of_layer(model, i, ranks)):
        formats = [model.quantization.format_of(name) for name in weight.names]
        first = formats[0]
        if first is None or not (model.quantization.is_online or isinstance(first.scheme, Full)):
            continue
        held += weight.held_bytes(formats, item)
        if model.quantization.is_online:
            stored += weight.count * item
            names.add(first.scheme.name)
        else:
            stored += _stored_bytes(weight, first)
            names.add(first.layout.removesuffix("_4") if first.stored is None else first.stored.name)
    if not names:
        return None
    kinds, sizes = ", ".join(sorted(names)), f"{held / 1e9:.2f} GB a rank in place of {stored / 1e9:.2f}"
    if model.quantization.is_online:
        method = model.quantization.method
        return f"{method}: weights are quantized to {kinds} while loading, {sizes}"
    return f"no kernel computes {kinds}: weights are dequantized to {dtype} while loading, {sizes}"


def _stored_bytes(weight: Weight, format: WeightFormat) -> int:
    if format.stored is None:
        return int(weight.count * BITS_OF_FOUR / 8)
    outputs = sum(weight.outputs)
    return weight.copies * held_bytes(format.stored, outputs, weight.inputs, weight.full_inputs, 1)
