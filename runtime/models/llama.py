"""The Llama line of decoders: blocks of grouped-query attention with rotary positions and of a feed-forward.

The families differ in data only (models/config/block.py), which models/config reads: kinds and places of
norms, the feed-forward, what is rotated and by which frequencies, biases, windows and multipliers.
"""

import torch
from torch import Tensor

from runtime.devices.base import Collectives, Device, ForwardBatch
from runtime.devices.operands import NormInputs
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.embedding import Embedding, Head
from runtime.layers.feed_forward import PlainFeedForward
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.moe.plain_experts import PlainExperts
from runtime.layers.norm import NORMS, NoNorm, Norm, RMSNorm, added, feed
from runtime.layers.parallel.context_parallel import of_all_parts, own_tokens
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.parallel.sequence_parallel import all_tokens, open_sequence_parallel
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.projections import Projections
from runtime.layers.reward_head import RewardHead
from runtime.layers.rotary import Rotary
from runtime.layers.weight import Layer, PackedModules, StageLayers
from runtime.models.base import AttentionLayer, CompiledLayer, DecoderLayer, Pieces, attended
from runtime.models.config.block import Placement
from runtime.models.config.media_config import sees_whole_images
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.registry import decoder_family
from runtime.models.config.wrappers import TEXT_NAMES
from runtime.models.deepstack import deepstack_features
from runtime.models.feed_forwards import feed_forward, shared_tokens
from runtime.models.fused_tensors import Fused, equal_parts
from runtime.models.norm_sums import leave_sums_to_norms, norm_ranks
from runtime.models.self_attention import SelfAttention
from runtime.models.vision.open_encoder import MediaEncoder, open_encoder
from runtime.models.vision.rows import RowsOfOthers


def fused_modules(config: ModelConfig) -> dict[str, Fused]:
    """The fused modules of a family's checkpoints (FusedLayout)."""
    q, kv = config.num_heads, config.num_kv_heads
    layouts = {
        "halves": equal_parts("gate_proj", "up_proj"),
        "qkv": Fused((("q_proj", q), ("k_proj", kv), ("v_proj", kv))),
        "groups": Fused((("q_proj", q // kv), ("k_proj", 1), ("v_proj", 1)), kv),
        "quarters": Fused((("q_proj", 1), ("v_proj", 1), ("k_proj", 1)), 4),
    }
    return {name: layouts[layout] for name, layout in decoder_family(config.architecture).fused.items()}


# modules of a feed-forward without a gate
PLAIN_MODULES: PackedModules = {"up_proj": ("up", ""), "down_proj": ("down", "")}


class LlamaDecoderLayer(Layer):
    """One block, with norms where the configuration says (Placement). See DecoderLayer.

    Checkpoints have other names for the norms of outputs; see Family.renames.
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        placement = config.placement
        self.is_parallel = placement in ("parallel", "parallel_two_norms")
        self.residual_scale = config.residual_scale

        def norm(*placements: Placement) -> Norm:
            if placement not in placements:
                return NoNorm()
            return NORMS[config.norm](device, dtype, config.hidden_size, config.rms_norm_eps)

        self.input_layernorm = norm("pre", "both", "parallel", "parallel_two_norms")
        self.self_attn = attention_class(device, dtype, config, index)
        self.attention_output_norm = norm("both", "post") if placement in ("both", "post") else None
        self.post_attention_layernorm = norm("pre", "both", "parallel_two_norms")
        self.mlp = feed_forward(device, dtype, config, index)
        self.mlp_output_norm = norm("both", "post") if placement in ("both", "post") else None
        self.shares_prompts = device.prompt_split is not None  # with other ranks, in attention
        has_experts = config.moe is not None and config.moe.layers[index]
        self.shared = shared_tokens(device, config, self.mlp, has_experts=has_experts)
        self.sequence_parallel = open_sequence_parallel(device)
        # `mlp` is given what the norm before it makes, as it is
        self.is_direct = self.shared.groups is None and self.shared.sequence_parallel is None
        if self.sequence_parallel is None:  # else what is projected is gathered first
            is_whole = not device.has_groups and not self.shares_prompts and not self.is_parallel
            is_whole = is_whole and type(self) is LlamaDecoderLayer
            feed(self.input_layernorm, self.self_attn, is_whole=is_whole)
            feed(self.post_attention_layernorm, self.mlp, is_whole=is_whole)
        # the ranks whose parts of a sum the norm behind attention is given, and the first norm; None: the sum
        self.norm_ranks = norm_ranks(device, config, self.mlp) if type(self) is LlamaDecoderLayer else None
        self.input_ranks: Collectives | None = None
        self.output_ranks: Collectives | None = None  # the same of what the layer returns
        if self.norm_ranks is not None:
            self.self_attn.o_proj.leave_sum()

    def before_attention(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """See DecoderLayer.before_attention. A feed-forward in parallel with attention is computed here."""
        x, residual = added(self.input_layernorm, x, residual, self.input_ranks)
        given = x if self.self_attn.gathers_tokens else self.all_tokens(x, batch)
        queries = self.self_attn.project(own_tokens(batch.part, given), cos, sin, batch)
        if self.is_parallel:
            if not isinstance(self.post_attention_layernorm, NoNorm):
                x = self.post_attention_layernorm.forward(residual)
            residual = residual + self._feed_forward(x, batch)
        return queries, residual

    def after_attention(
        self, attended: Tensor, residual: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer.after_attention."""
        x = self.self_attn.o_proj.forward(attended)
        if self.shares_prompts:  # a compiled layer is one function for any batch: it looks at none
            x = of_all_parts(batch.part, x)
            x = x if self.sequence_parallel is None else self.sequence_parallel.shard(x)
        if self.attention_output_norm is not None:
            x = self.attention_output_norm.forward(x)
        if self.residual_scale != 1.0:
            x = x * self.residual_scale
        if self.is_parallel:
            return x, residual
        return self.feed_forward(x, residual, batch)

    def feed_forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """From what the layer has added up so far, x and residual, to the pair that the next block begins
        with."""
        norm = self.post_attention_layernorm
        if self.is_direct and self.norm_ranks is None and isinstance(norm, RMSNorm):
            found = self._of_norm(norm.inputs(x, residual), batch)
            if found is not None:
                return self._scaled(found[0]), found[1]
            if isinstance(self.mlp, SparseFeedForward):
                x, wide, residual = norm.add_wide(x, residual)
                return self._feed_forward(x, batch, wide), residual
        x, residual = added(norm, x, residual, self.norm_ranks)
        return self._feed_forward(x, batch), residual

    def _feed_forward(self, x: Tensor, batch: ForwardBatch, wide: Tensor | None = None) -> Tensor:
        """[T, hidden] or this rank's shard of it -> what is added to the residual, of the same tokens.
        `wide`: x as float32, for layers with experts."""
        out = self._computed(self.shared.join(x, batch), batch, wide)
        return self._scaled(self.shared.divide(out, batch))

    def _of_norm(self, inputs: NormInputs | None, batch: ForwardBatch) -> tuple[Tensor, Tensor] | None:
        """What `mlp` makes of a norm and its own input in one; None: it does not."""
        if inputs is None or isinstance(self.mlp, PlainFeedForward | PlainExperts):
            return None
        if isinstance(self.mlp, SparseFeedForward):
            return self.mlp.of_norm(inputs, batch)
        return self.mlp.of_norm(inputs)

    def _scaled(self, x: Tensor) -> Tensor:
        """What `mlp` returned, as it is added to the residual."""
        if self.mlp_output_norm is not None:
            x = self.mlp_output_norm.forward(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    def _computed(self, x: Tensor, batch: ForwardBatch, wide: Tensor | None = None) -> Tensor:
        if isinstance(self.mlp, SparseFeedForward):
            return self.mlp.forward(x, batch, wide)
        if isinstance(self.mlp, PlainExperts):
            return self.mlp.forward(x, batch)
        return self.mlp.forward(x)

    def all_tokens(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] of all tokens: x itself, or gathered where x is this rank's shard [P, hidden]."""
        if self.sequence_parallel is None:  # as above: no look at the batch
            return x
        return self.sequence_parallel.all_gather(x, len(batch.positions))


class Llama(Layer):
    """A decoder. See GenerativeModel; with a pooling task it has no language model head."""

    packed_modules: PackedModules = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }
    # next-token layers, which only draft heads load, and masks of old GPT-2 and GPT-NeoX
    ignored_weights: tuple[str, ...] = (
        *(r"^mtp\.", r"^model\.mtp_"),
        r"\.(attention|attn|attn\.attention)\.(masked_)?bias$",
        r"\.attn\.causal_mask$",
    )
    attention_class: type[AttentionLayer] = SelfAttention
    layer_class: type[DecoderLayer] = LlamaDecoderLayer

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        family = decoder_family(config.architecture)
        self.renames = (*TEXT_NAMES.get(config.wrapper, ()), *family.renames)
        self.transposed_modules = family.transposed
        self.fused_modules = fused_modules(config)
        if not config.is_gated:
            self.packed_modules = self.packed_modules | PLAIN_MODULES
        # rounded to the dtype, as in training
        self.embed_scale = torch.tensor(config.embed_scale).to(dtype).item()
        self.logit_scale, self.logit_cap = config.logit_scale, config.logit_cap
        self.dtype, self.hidden_size = dtype, config.hidden_size
        self.stage, self.ranks = device.stage, device.collectives
        own = self.stage.layers(config.num_layers)
        is_head_tied = self.stage.is_last and config.is_tied
        self.embed_tokens: Embedding | None = None
        if self.stage.embeds or is_head_tied:
            self.embed_tokens = Embedding(device, dtype, config.vocab_size, config.hidden_size)
        self.layers = StageLayers(
            [self.open_layer(device.of_layer(i), dtype, config, i) for i in own], own.start
        )
        if self.stage.count > 1:  # this rank has caches of its own layers only
            for place, attention in enumerate(self.attentions):
                attention.index = place
        self.norm: Norm = NoNorm()
        self.lm_head: Head | None = None
        self.score: ReplicatedLinear | RewardHead | None = None  # a classifier's head
        self.judge_ids = () if config.pooling is None else config.pooling.judge_ids
        self.projections: Projections | None = None
        if self.stage.is_last:
            self._open_end(device, dtype, config)
        self.media_encoder: MediaEncoder | None = None
        if config.media is not None and self.stage.is_first:
            self.media_encoder = (
                RowsOfOthers(device, dtype, config.media.output_size)
                if config.encodes_elsewhere
                else open_encoder(device, dtype, config.media)
            )
            self.renames = (*self.renames, *self.media_encoder.renames)
        # places of own layers whose inputs are wanted: `forward` returns [T, hidden * (1 + these)], the last
        # ones in front
        self.aux_layers: tuple[int, ...] = self.stage.own_aux(config.num_layers)
        leave_sums_to_norms(self.layers, self.aux_layers)
        self.sequence_parallel = open_sequence_parallel(device)
        ropes = [(config.rope_of(i), config.of_layer(i).head_dim) for i in own]
        kinds = list(dict.fromkeys(ropes))
        self.rotaries = [Rotary(rope, dim, device.ops, device.torch_device) for rope, dim in kinds]
        self.rotary_of_layer = [kinds.index(rope) for rope in ropes]
        self.sees_whole_images = sees_whole_images(config.media)
        self.has_token_grids = config.media is not None and config.media.has_token_grids
        if self.has_token_grids:
            for rotary in self.rotaries:
                rotary.check_sections()

    def open_layer(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> DecoderLayer:
        """Layer `index` of the model."""
        return self.layer_class(device, dtype, config, index, self.attention_class)

    def _open_end(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        """What is behind the layers: the last norm, and the head."""
        self.norm = NORMS[config.norm](device, dtype, config.hidden_size, config.rms_norm_eps)
        if config.pooling is None or self.judge_ids:
            self.lm_head = Head(
                device,
                torch.float32 if config.has_wide_head else dtype,
                config.vocab_size,
                config.hidden_size,
                self.embed_tokens if config.is_tied else None,
                is_quantized=config.quantization is not None and config.quantization.rounds_head,
                has_bias=config.has_head_bias,
                is_normed=config.has_normed_head,
            )
        elif config.pooling.has_inner_head:
            self.score = RewardHead(device, dtype, config.hidden_size, config.pooling.size)
        elif config.pooling.task == "classify":
            self.score = ReplicatedLinear(device, dtype, config.hidden_size, config.pooling.size, bias=False)
        if config.pooling is not None and config.pooling.dense:
            self.projections = Projections(device, config.pooling.dense)

    @property
    def attentions(self) -> list[Attention | MlaAttention]:
        """The attentions that need a key/value cache, in order."""
        return [layer.self_attn.attention for layer in self.layers]

    def forward(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Tensor:
        """Hidden states [T, hidden] before the last norm; with `aux_layers` those before these layers follow
        in each row."""
        return attended(self.piecewise(batch, compiled), batch)

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """See GenerativeModel.piecewise."""
        positions = own_tokens(batch.part, batch.positions)
        tables = [rotary.tables(positions) for rotary in self.rotaries]
        x = self.inputs(batch)
        residual = torch.zeros_like(x)
        before: dict[int, Tensor] = {}
        deepstack = []
        if self.stage.is_first:
            deepstack = deepstack_features(batch, self.hidden_size, self.dtype, self.sequence_parallel)
        for index, (layer, kind) in enumerate(zip(self.layers, self.rotary_of_layer, strict=True)):
            if index in self.aux_layers:
                before[index] = self._of_all_tokens(x + residual, batch)
            queries, residual = layer.before_attention(x, residual, *tables[kind], batch)
            output = yield layer.self_attn, queries
            x, residual = (
                layer.after_attention(output, residual, batch)
                if compiled is None
                else compiled(layer, output, residual, batch)
            )
            if index < len(deepstack):
                residual = residual + deepstack[index]
        return self.with_aux(self._of_all_tokens(x + residual, batch), before)

    def with_aux(self, x: Tensor, before: dict[int, Tensor]) -> Tensor:
        """Hidden states `x` [T, hidden], and in each row those of the `aux_layers` behind them. `before`:
        hidden states before each of these layers, by its number; what is not there is `x`."""
        if not self.aux_layers:
            return x
        return torch.cat((x, *(before.get(index, x) for index in self.aux_layers)), dim=1)

    def inputs(self, batch: ForwardBatch) -> Tensor:
        """What the first layer is given, [T, hidden] or this rank's shard of it: embeddings of the tokens,
        and those that the batch brings in their place. Behind the first stage the batch brings all of them,
        which are hidden states."""
        if self.stage.is_first:
            x = self.embed(batch.token_ids)
            if batch.embeds is not None:
                rows = batch.embeds[1][:, : self.hidden_size]
                x = x.index_copy(0, batch.embeds[0], rows.to(x.dtype))
        else:
            assert batch.embeds is not None, "hidden states of the stage before"
            x = batch.embeds[1].to(self.dtype)
        return x if self.sequence_parallel is None else self.sequence_parallel.shard(x)

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """What `forward` returns without the hidden states of `aux_layers`, those of stages before among
        them."""
        return hidden[:, : self.hidden_size] if self.stage.aux_layers else hidden

    def _of_all_tokens(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return all_tokens(self.sequence_parallel, x, len(batch.positions))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] -> what the first layer is given, [T, hidden]."""
        assert self.embed_tokens is not None, "embeddings behind the first stage"
        x = self.embed_tokens.forward(token_ids)
        return x if self.embed_scale == 1.0 else x * self.embed_scale

    def hidden_states(self, hidden: Tensor) -> Tensor:
        """See GenerativeModel.hidden_states."""
        return self.norm.forward(self.last_hidden(hidden)).float()

    def logits(self, hidden: Tensor, *, own: bool = False) -> Tensor:
        """[N, hidden] -> float32 [N, vocabulary]. `own`: of this rank's rows of the head alone."""
        return self.head_logits(self.norm.forward(self.last_hidden(hidden)), own=own)

    def head_logits(self, normed: Tensor, *, own: bool = False) -> Tensor:
        """As `logits`, of what the last norm gives."""
        assert self.lm_head is not None, "logits of a model that pools"
        logits = self.lm_head.own_logits(normed) if own else self.lm_head.forward(normed)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return torch.tanh(logits / self.logit_cap) * self.logit_cap if self.logit_cap else logits

    def judged(self, hidden: Tensor) -> Tensor:
        """Scores of a model that judges (Pooling.judge_ids): [N, hidden] -> float32 [N, 1]."""
        logits = self.logits(hidden)
        scores = logits[:, self.judge_ids[:1]]
        return scores if len(self.judge_ids) == 1 else scores - logits[:, self.judge_ids[1:]]

    def pool(self, hidden: Tensor, pooling: PoolingMetadata) -> Tensor:
        """Embeddings or class scores, float32 [N, size]."""
        if self.judge_ids:
            return self.judged(pooling.select(hidden))
        if pooling.mode == "mean":
            pooled = pooling.mean(self.norm.forward(hidden))
        else:
            pooled = self.norm.forward(pooling.select(hidden))
        if self.projections is not None:
            return self.projections.forward(pooled)
        return (pooled if self.score is None else self.score.forward(pooled.to(hidden.dtype))).float()
