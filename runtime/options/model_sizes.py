"""How many numbers and bytes a rank holds of a model: weights, LoRA slots, and keys and values of a token."""

from typing import TYPE_CHECKING

from msgspec import structs

from runtime.messages.memory import OffloadSpec, offloaded_layers
from runtime.models.config.encoder_config import Encoder, RotaryEncoder
from runtime.models.config.lora_targets import Split, lora_modules
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.recurrent_config import Recurrent
from runtime.models.config.shares import even_part, most_channels, most_heads
from runtime.options.quantized_sizes import Ranks, layer_saved_bytes

if TYPE_CHECKING:  # it imports numpy, which `runtime check --help` need not wait for
    from runtime.messages.lora import AdapterSetup


# modules of blocks that layers share (Zamba 2) which are given the tokens of all attention groups
SHARED_OF_BLOCKS = (".self_attn.gate_up_proj", ".self_attn.down_proj")


def query_heads(model: ModelConfig, ranks: int) -> int:
    """Attention heads of the rank that has most."""
    if model.mla is not None:
        return even_part(model.num_heads, ranks).size
    return most_heads(model.num_heads, model.num_kv_heads, ranks)[0]


def kv_heads(model: ModelConfig, ranks: int) -> int:
    """Key/value heads of the rank that has most; one where ranks outnumber them."""
    return most_heads(model.num_heads, model.num_kv_heads, ranks)[1]


def cached_count(model: ModelConfig, ranks: int) -> int:
    """Numbers that a layer caches for a token: keys and values of one rank's heads, or the latent and the
    rotary part of all heads."""
    if model.encoder is not None or model.is_bidirectional:
        return 0
    if model.mla is not None:
        indexer = model.mla.indexer
        return model.mla.kv_rank + model.mla.rope_dim + (0 if indexer is None else indexer.dim)
    return 2 * kv_heads(model, ranks) * model.head_dim


def attention_layers(model: ModelConfig) -> int:
    """Layers that cache keys and values."""
    if model.kv_sources:
        return len(set(model.kv_sources))
    return model.num_layers if model.recurrent is None else model.recurrent.num_attention_layers


def cached_counts(model: ModelConfig, ranks: int) -> tuple[int, int]:
    """Numbers that one rank caches for a token in all layers without a sliding window, and in all with
    one."""
    own = set(model.kv_sources) or range(model.num_layers)
    num_window = sum(model.windows[i] > 0 for i in own)
    size = cached_count(model, ranks)
    heads = model.global_heads
    full = (
        size
        if heads is None
        else 2 * most_heads(model.num_heads, heads.num_kv_heads, ranks)[1] * heads.head_dim
    )
    return (attention_layers(model) - num_window) * full, num_window * size


def weight_count(
    model: ModelConfig,
    ranks: int,
    expert_ranks: int = 1,
    shared_ranks: int | None = None,
    head_ranks: int | None = None,
    mlp_ranks: int | None = None,
    group_ranks: int | None = None,
    lm_head_ranks: int | None = None,
) -> int:
    """Weights of one rank, as a count of numbers: see Ranks, whose fields these are; None: all ranks."""
    if model.encoder is not None:
        return encoder_count(model, model.encoder, ranks)
    hidden = model.hidden_size
    vocabulary = -(-model.vocab_size // (group_ranks or ranks)) * hidden
    own_head = -(-model.vocab_size // ((group_ranks if model.is_tied else lm_head_ranks) or ranks))
    if not model.is_tied and (model.pooling is None or model.pooling.judge_ids):
        vocabulary += own_head * hidden
    if model.pooling is not None and model.pooling.task == "classify" and not model.pooling.judge_ids:
        vocabulary += (
            (hidden + 1) * (hidden + model.pooling.size)
            if model.pooling.has_inner_head
            else (model.pooling.size * hidden)
        )
    layers = sum(
        layer_count(model, i, ranks, expert_ranks, shared_ranks or ranks, head_ranks, mlp_ranks, group_ranks)
        for i in range(model.num_layers)
    )
    if model.altup is not None:
        layers += model.altup.model_count(hidden)
    if model.layer_embeddings is not None:
        layers += model.layer_embeddings.model_count(hidden, model.num_layers, group_ranks or ranks)
    if model.recurrent is not None and (shared := model.recurrent.shared) is not None:
        layers += shared.count * shared.block_count(*block_sizes(model, ranks, head_ranks or ranks))
    if model.has_embed_norm:
        layers += norm_size(model)
    if model.positions is not None:
        layers += model.positions.count * hidden
    return layers + norm_size(model) + vocabulary + own_head * model.has_head_bias


def adapter_count(model: ModelConfig, setup: "AdapterSetup", split: Split) -> int:
    """Numbers in the LoRA slots of one rank, each as large as the largest adapter. A layer that attention
    groups share has the slots of all of them."""
    count = 0
    for name, sizes in lora_modules(model, split).items():
        block, _, module = name.rpartition(".")
        divided = split.shared if "shared_expert" in block else split.dense
        is_of_all = divided > 1 and (".mlp" in block or name.endswith(SHARED_OF_BLOCKS))
        if module in setup.targets:
            count += sum(sizes) * (split.num_groups if is_of_all else 1)
    if model.recurrent is not None and model.recurrent.gates_attention and "q_proj" in setup.targets:
        # A of queries stands there a second time, for their gates
        count += model.recurrent.num_attention_layers * model.hidden_size
    if model.recurrent is not None and model.recurrent.shared is not None and "gate_up_proj" in setup.targets:
        # and A of gates for ups
        count += model.recurrent.num_attention_layers * model.hidden_size * split.num_groups
    return count * setup.max_rank * setup.num_lora_slots


def offloaded_bytes(
    spec: OffloadSpec | None, model: ModelConfig, sizes: tuple[int, int, int], item: int
) -> tuple[int, int]:
    """Bytes of offloaded weights in host memory, and of the room on the device that their layers share.
    `sizes`: ranks, expert ranks and shared ranks, as in weight_count."""
    if spec is None:
        return 0, 0
    layers = [
        layer_count(model, i, *sizes) * item - layer_saved_bytes(model, i, Ranks(*sizes), item)
        for i in range(model.num_layers)
    ]
    kept = [layers[i] for i in offloaded_layers(spec, layers)]
    return sum(kept), max(kept) * (spec.ahead + 1)


def layer_count(
    model: ModelConfig,
    layer: int,
    ranks: int,
    expert_ranks: int,
    shared_ranks: int,
    head_ranks: int | None = None,
    mlp_ranks: int | None = None,
    group_ranks: int | None = None,
) -> int:
    """Numbers that one rank holds of a layer: see Ranks."""
    if model.encoder is not None:
        return encoder_layer_count(model, ranks)
    if model.recurrent is not None:
        sizes = ranks, expert_ranks, shared_ranks, head_ranks or ranks, mlp_ranks, group_ranks or ranks
        return hybrid_layer_count(model, model.recurrent, layer, *sizes)
    if model.kv_sources:
        return gemma_layer_count(model, layer, ranks, head_ranks or ranks)
    own, heads = model.of_layer(layer), head_ranks or ranks
    return (
        attention_count(own, heads)
        + query_heads(own, heads) * model.hidden_size * model.gate_dim
        + norm_count(model)
        + feed_forward_count(model, layer, ranks, expert_ranks, shared_ranks, mlp_ranks)
    )


def gemma_layer_count(model: ModelConfig, layer: int, ranks: int, head_ranks: int) -> int:
    """Numbers that one rank holds of a layer of Gemma 3n or Gemma 4."""
    own, hidden = model.of_layer(layer), model.hidden_size
    count = norm_count(own) + feed_forward_count(own, layer, ranks, 1, 1) + attention_count(own, head_ranks)
    if model.altup is not None:
        count += model.altup.layer_count(hidden)
    if model.layer_embeddings is not None:
        count += model.layer_embeddings.layer_count(hidden)
    keys, heads = kv_heads(own, head_ranks) * own.head_dim * (hidden + model.qkv_bias), model.global_heads
    if not model.has_own_keys(layer):
        return count - 2 * keys - own.head_dim + (heads is not None)
    shares_values = heads is not None and heads.shares_values and not model.windows[layer]
    return count - keys * shares_values + (heads is not None)  # a layer of Gemma 4 has a scale


def hybrid_layer_count(
    model: ModelConfig,
    recurrent: Recurrent,
    layer: int,
    ranks: int,
    expert_ranks: int,
    shared_ranks: int,
    head_ranks: int,
    mlp_ranks: int | None,
    group_ranks: int,
) -> int:
    """Numbers that one rank holds of a layer of a model with recurrent layers."""
    kind, hidden = recurrent.kinds[layer], model.hidden_size
    count = hidden
    if kind in ("recurrent", "parallel"):
        count += recurrent.mixer.num_weights(hidden, group_ranks)
    if recurrent.shared is not None:
        sizes = block_sizes(model, ranks, head_ranks)
        return count + recurrent.shared.use_count(*sizes) * (kind == "parallel")
    if kind in ("attention", "parallel"):
        count += attention_count(model, head_ranks)
        gates = query_heads(model, head_ranks) * model.head_dim * recurrent.gates_attention
        count += gates * (hidden + model.qkv_bias)
    if kind == "none" or recurrent.has_feed_forward:
        count += feed_forward_count(model, layer, ranks, expert_ranks, shared_ranks, mlp_ranks)
        count += hidden * (kind != "none")
    return count


def block_sizes(model: ModelConfig, ranks: int, head_ranks: int) -> tuple[int, int, int, int]:
    """The hidden size, and one rank's share of the widths of a feed-forward, of queries and of keys."""
    queries, keys = (count(model, head_ranks) * model.head_dim for count in (query_heads, kv_heads))
    return model.hidden_size, most_channels(model.intermediate_size, ranks), queries, keys


def encoder_layer_count(model: ModelConfig, ranks: int) -> int:
    """Numbers that one rank holds of an encoder layer."""
    hidden, inner, heads = (
        model.hidden_size,
        most_channels(model.intermediate_size, ranks),
        query_heads(model, ranks) * model.head_dim,
    )
    return (
        3 * (hidden + 1) * heads
        + (heads + 1) * hidden
        + (hidden + 1) * inner
        + (inner + 1) * hidden
        + 4 * hidden
    )


def encoder_count(model: ModelConfig, encoder: Encoder, ranks: int) -> int:
    """Numbers that one rank holds of an encoder: embeddings, layers, and a classifier's head."""
    hidden = model.hidden_size
    if encoder.rotary is not None:
        return rotary_encoder_count(model, encoder.rotary, ranks)
    embeddings = (-(-model.vocab_size // ranks) + encoder.num_positions + encoder.num_types + 2) * hidden
    is_scoring = model.pooling is not None and model.pooling.task == "classify"
    head = (hidden + 1) * (hidden + model.pooling.size) if model.pooling is not None and is_scoring else 0
    return embeddings + model.num_layers * encoder_layer_count(model, ranks) + head


def rotary_encoder_count(model: ModelConfig, rotary: RotaryEncoder, ranks: int) -> int:
    """As `encoder_count`, of an encoder with rotary positions."""
    hidden, inner = model.hidden_size, most_channels(model.intermediate_size, ranks)
    norm, heads = hidden * (1 + rotary.norm_bias), query_heads(model, ranks) * model.head_dim
    attention = 4 * hidden * heads + (3 * heads + hidden) * rotary.attention_bias
    feed_forward = 3 * hidden * inner + (2 * inner + hidden) * rotary.mlp_bias
    layers = model.num_layers * (attention + feed_forward + 2 * norm) - norm
    count = -(-model.vocab_size // ranks) * hidden + 2 * norm + layers
    if model.pooling is None or model.pooling.task == "embed":
        return count
    return count + hidden * (hidden + rotary.head_bias) + norm + (hidden + 1) * model.pooling.size


def norm_size(model: ModelConfig) -> int:
    """Numbers in one norm of hidden states."""
    return model.hidden_size * {"layer": 2, "layer_offset": 2, "layer_plain": 0}.get(model.norm, 1)


def norm_count(model: ModelConfig) -> int:
    """Numbers in the norms of hidden states of a layer."""
    norms = {"pre": 2, "both": 4, "post": 2, "parallel": 1, "parallel_two_norms": 2}[model.placement]
    return norms * norm_size(model)


def qk_norm_count(model: ModelConfig, ranks: int = 1) -> int:
    """Numbers that one rank holds of the norms of queries and keys of a layer."""
    if model.qk_norm in ("projection", "head_layer"):
        return (query_heads(model, ranks) + kv_heads(model, ranks)) * model.head_dim
    return 0 if model.qk_norm in ("none", "unit") else 2 * model.head_dim


def attention_count(model: ModelConfig, ranks: int) -> int:
    """Numbers that one rank holds of the attention of a layer."""
    hidden, dim, latent, heads = model.hidden_size, model.head_dim, model.mla, query_heads(model, ranks)
    if latent is None:
        value_dim = model.value_dim or dim
        outputs = heads * dim + kv_heads(model, ranks) * (dim + value_dim)
        return (
            hidden * outputs
            + heads * value_dim * hidden
            + outputs * model.qkv_bias
            + hidden * model.o_bias
            + qk_norm_count(model, ranks)
            + (heads * model.has_sinks)
        )
    queries, rank = heads * (latent.nope_dim + latent.rope_dim), latent.kv_rank
    first = (latent.q_rank or queries) + rank + latent.rope_dim
    q_rank = latent.q_rank or 0
    index = 0
    if (indexer := latent.indexer) is not None:
        index = indexer.num_heads * (q_rank * indexer.dim + hidden) + (hidden + 2) * indexer.dim
    up = index + rank + heads * (latent.nope_dim + latent.value_dim) * rank + q_rank + q_rank * queries
    return (
        hidden * first
        + first * model.qkv_bias
        + up
        + heads * latent.value_dim * hidden
        + hidden * model.o_bias
    )


def feed_forward_count(
    model: ModelConfig,
    layer: int,
    ranks: int,
    expert_ranks: int,
    shared_ranks: int,
    mlp_ranks: int | None = None,
) -> int:
    """Numbers that one rank holds of the feed-forward or MoE part of a layer: see Ranks."""
    hidden, inner, moe = model.hidden_size, most_channels(model.intermediate_size, ranks), model.moe
    if moe is not None and moe.is_shortcut:
        dense, count = feed_forward_count(structs.replace(model, moe=None), layer, ranks, 1, 1), 0
        if moe.layers[layer]:
            count = 3 * moe.num_experts * most_channels(moe.intermediate_size, ranks)
            count += moe.num_experts + moe.num_zero
        return dense + hidden * count
    if moe is None or not moe.layers[layer]:
        inner = most_channels(model.intermediate_size, mlp_ranks or ranks)
        matrices = 3 if model.is_gated else 2
        learned = 4 * (model.activation == "xielu")
        return matrices * hidden * inner + ((matrices - 1) * inner + hidden) * model.mlp_bias + learned
    if moe.is_stacked:
        return moe.num_experts * (3 * hidden * inner + 2 * inner + hidden + hidden + 1)
    experts = moe.num_experts // expert_ranks * most_channels(moe.intermediate_size, ranks // expert_ranks)
    shared = most_channels(moe.shared_size, shared_ranks)
    if not moe.is_gated:
        width, latent = moe.latent_size or hidden, 2 * (moe.latent_size or 0)
        return 2 * width * experts + hidden * (2 * shared + moe.num_experts + latent)
    return hidden * (3 * experts + 3 * shared + moe.num_experts + moe.has_shared_gate)


def decay_bytes(model: ModelConfig, ranks: int, item: int) -> int:
    """Bytes that decays of recurrent layers, which stay float32 whatever the dtype, take beyond `item` bytes
    a number."""
    return 0 if model.recurrent is None else (4 - item) * model.recurrent.float_count(ranks)


def float_bytes(model: ModelConfig) -> int:
    """Bytes of weights that stay float32 whatever the dtype: the bias of expert scores, and linear layers
    behind pooling."""
    moe = model.moe
    dense = () if model.pooling is None else model.pooling.dense
    size = 4 * sum(one.outputs * (one.inputs + one.has_bias) for one in dense)
    if moe is None or not moe.has_bias:
        return size
    return size + 4 * (moe.num_experts + moe.num_zero) * sum(moe.layers)
