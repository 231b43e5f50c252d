"""Zamba 2 (Zyphra, 2024): a mixer of Mamba 2 in each layer, and in some layers a block of attention and a
feed-forward before it. There are one or two such blocks for all layers. Each use of a block adds low-rank
products of its own, as adapters do, and has keys and values of its own. A block is given the hidden states
and the embeddings of the tokens, [T, 2 * hidden]; the mixer is given the hidden states and what the block
returns, and only what the mixer returns is added to the hidden states.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.paged import Attention
from runtime.layers.linear import Linear, LinearUse, QkvLinear
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.group_tokens import SharedTokens
from runtime.layers.recurrent.parts import PartsLinear
from runtime.layers.weight import Layer, PackedModules, Shard, channel_shard, head_shards, scaled_shard
from runtime.models.base import CompiledLayer, Pieces
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.recurrent_config import SharedBlocks
from runtime.models.config.zamba_config import block_renames, tied_names
from runtime.models.feed_forwards import dense_reduction
from runtime.models.hybrid import HybridDecoder, cache_index, open_mixer, recurrent_of


def shared_blocks(config: ModelConfig) -> SharedBlocks:
    """The configuration's shared blocks, which it has."""
    shared = recurrent_of(config).shared
    assert shared is not None, "Zamba 2 without shared blocks"
    return shared


def inner_shard(device: Device, config: ModelConfig) -> Shard:
    """This rank's part of the inner size of a block's feed-forward. Raises ModelError where it has none."""
    return channel_shard(config.intermediate_size, device.collectives, "intermediate_size")


class SharedBlock(Layer):
    """What the uses of a block have in common: projections of attention and a feed-forward, and norms."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        hidden, dim, heads = config.hidden_size, config.head_dim, config.num_heads
        inner = inner_shard(device, config)
        self.input_layernorm = RMSNorm(device, dtype, 2 * hidden, config.rms_norm_eps)
        self.qkv_proj = QkvLinear(device, dtype, 2 * hidden, heads, config.num_kv_heads, dim, bias=False)
        own_heads = scaled_shard(self.qkv_proj.query_heads, dim)
        self.o_proj = Linear(device, dtype, own_heads, {"": hidden}, shard="row", ranks=device.head_ranks)
        self.pre_ff_layernorm = RMSNorm(device, dtype, hidden, config.rms_norm_eps)
        self.gate_up_proj = Linear(device, dtype, hidden, {"gate": inner, "up": inner}, shard="column")
        reduction = dense_reduction(device, has_bias=False)
        self.down_proj = Linear(device, dtype, inner, {"": hidden}, shard="row", reduction=reduction)


class AttentionAdapter(Layer):
    """The low-rank products that a use of a block adds to queries, keys and values."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, rank: int) -> None:
        queries, keys = head_shards(config.num_heads, config.num_kv_heads, device.head_ranks)
        self.down = Linear(
            device, dtype, 2 * config.hidden_size, {"q": rank, "k": rank, "v": rank}, shard="replicated"
        )
        self.q_up, self.k_up, self.v_up = (
            Linear(device, dtype, rank, {"": scaled_shard(heads, config.head_dim)}, shard="column")
            for heads in (queries, keys, keys)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, 2 * hidden] -> [T, (H + 2 K) * D]."""
        q, k, v = (part.contiguous() for part in self.down.forward(x).chunk(3, dim=1))
        return torch.cat((self.q_up.forward(q), self.k_up.forward(k), self.v_up.forward(v)), dim=1)


class BlockUse(Layer):
    """One use of a block: its keys and values, its low-rank products, and a projection of its result. LoRA
    adapters change each use apart. A TokenMixer."""

    def __init__(
        self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int, blocks: list[SharedBlock]
    ) -> None:
        shared, hidden = shared_blocks(config), config.hidden_size
        place = cache_index(recurrent_of(config), index)
        self.block = place % shared.count  # the blocks take turns
        block = blocks[self.block]
        _, kv_heads, _ = block.qkv_proj.heads
        self.attention = Attention(device, place, kv_heads, config.head_dim, Scores(config.score_scale))
        self.adapter = (
            AttentionAdapter(device, dtype, config, shared.rank) if shared.adapts_attention else None
        )
        self.mlp_down = Linear(device, dtype, hidden, {"": shared.rank}, shard="replicated")
        half = inner_shard(device, config)
        self.mlp_up = PartsLinear(device, dtype, shared.rank, [half, half], bias=False)
        self.linear = Linear(device, dtype, hidden, {"": hidden}, shard="replicated")
        self.qkv_proj, self.o_proj = LinearUse(block.qkv_proj), LinearUse(block.o_proj)
        self.gate_up_proj, self.down_proj = LinearUse(block.gate_up_proj), LinearUse(block.down_proj)
        self.shared = SharedTokens(device, [self.gate_up_proj, self.down_proj])

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """Normed x [T, 2 * hidden] -> (queries [T, H, D],); keys and values go to the cache."""
        qkv = self.qkv_proj.forward(x)
        if self.adapter is not None:
            qkv = qkv + self.adapter.forward(x)
        return (self.attention.prepare(qkv, None, cos, sin, batch),)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * D]."""
        return self.attention.forward(*queries, batch)

    def feed_forward(self, block: SharedBlock, attended: Tensor, batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * D] -> the result of the block, [T, hidden]."""
        x = self.shared.join(block.pre_ff_layernorm.forward(self.o_proj.forward(attended)), batch)
        gate_up = self.gate_up_proj.forward(x) + self.mlp_up.forward(self.mlp_down.forward(x))
        gate, up = gate_up.chunk(2, dim=1)
        out = self.shared.divide(self.down_proj.forward(gelu(gate) * up), batch)
        return self.linear.forward(out)


class Zamba2Layer(Layer):
    """A mixer, and in some layers a use of a block before it."""

    def __init__(
        self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int, blocks: list[SharedBlock]
    ) -> None:
        recurrent, hidden = recurrent_of(config), config.hidden_size
        self.input_layernorm = RMSNorm(device, dtype, hidden, config.rms_norm_eps)
        self.mixer = open_mixer(device, dtype, hidden, recurrent.mixer, index, "all_reduce")
        is_use = recurrent.kinds[index] == "parallel"
        self.self_attn = BlockUse(device, dtype, config, index, blocks) if is_use else None

    def piecewise(
        self,
        total: Tensor,
        embedded: Tensor,
        blocks: list[SharedBlock],
        tables: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Pieces:
        """Hidden states [T, hidden] before the layer to those behind it; `embedded`: those before the first
        layer. Yields where tokens of a sequence meet."""
        given = total
        if self.self_attn is not None:
            block = blocks[self.self_attn.block]
            both = block.input_layernorm.forward(torch.cat((total, embedded), dim=1))
            attended = yield self.self_attn, self.self_attn.project(both, *tables, batch)
            given = total + self.self_attn.feed_forward(block, attended, batch)
        mixed = yield self.mixer, self.mixer.project(self.input_layernorm.forward(given))
        return total + self.mixer.out_proj.forward(mixed)


class Zamba2(HybridDecoder):
    """See GenerativeModel."""

    packed_modules: PackedModules = {
        **HybridDecoder.packed_modules,
        **{f"{part}_down": ("down", part) for part in ("q", "k", "v")},
    }

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        self.blocks = [SharedBlock(device, dtype, config) for _ in range(shared_blocks(config).count)]
        super().__init__(device, dtype, config)
        recurrent = recurrent_of(config)
        self.renames = (*block_renames(recurrent), *self.renames)
        self.ignored_weights = (*self.ignored_weights, *tied_names(recurrent))

    def open_layer(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> Zamba2Layer:
        """See Llama.open_layer."""
        return Zamba2Layer(device, dtype, config, index, self.blocks)

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """See GenerativeModel.piecewise. `compiled` is not used."""
        (rotary,) = self.rotaries
        tables = rotary.tables(batch.positions)
        x = embedded = self.inputs(batch)
        before: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in self.aux_layers:
                before[index] = x
            x = yield from layer.piecewise(x, embedded, self.blocks, tables, batch)
        return self.with_aux(x, before)
