"""config.json and generation_config.json, read into one frozen, torch-free ModelConfig.

Field names of config.json are those of transformers. registry.py says how each family differs from plain
Llama.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from runtime.errors import ModelError, OwnCodeLacks
from runtime.json_value import JsonDict, JsonValue
from runtime.models.config.altup_config import AltUp, GlobalHeads, LayerEmbeddings
from runtime.models.config.block import (
    ACTIVATIONS,
    Activation,
    Alibi,
    DraftBlock,
    LearnedPositions,
    NormKind,
    Placement,
    PositionScale,
    QkNorm,
    ScoreKind,
)
from runtime.models.config.config_files import decode, raw_files
from runtime.models.config.diffusion_families import BlockDiffusion
from runtime.models.config.dual_config import DUALS, DualText, dual_pooling, read_any_encoder
from runtime.models.config.encoder_config import ENCODERS, Encoder, encoder_fields
from runtime.models.config.family import Family
from runtime.models.config.gguf.config import read_any_quantization
from runtime.models.config.hf_config import (
    HfArchitectures,
    HfConfig,
    HfGeneration,
    check_sizes,
    token_ids,
    windows,
    with_known_keys,
)
from runtime.models.config.media_config import MediaConfig, read_media
from runtime.models.config.mla_config import HfMlaConfig, MlaConfig, read_mla
from runtime.models.config.moe_config import HfMoeConfig, MoeConfig
from runtime.models.config.pooling import Pooling
from runtime.models.config.quantization_config import Quantization
from runtime.models.config.recurrent_config import Recurrent
from runtime.models.config.registry import (
    MODELS,
    TRANSFORMERS,
    check_architecture,
    check_bidirectional,
    check_pools,
    check_refused,
    decoder_family,
)
from runtime.models.config.rope_config import HfRope, Rope, read_rope
from runtime.models.config.tasks import PoolingOptions, family_of, longest_text, read_pooling
from runtime.models.config.transformers_config import check_generates, identity, of_text, transformers_fields
from runtime.models.config.wrappers import text_model, wrapper_of


class ModelConfig(Struct, frozen=True, kw_only=True):
    """What the runtime knows of a model without its weights."""

    architecture: str
    wrapper: str = ""  # architecture of a checkpoint that takes images or sound too, whose text model this is
    media: MediaConfig | None = None  # the encoder of such a checkpoint; None: text alone is served
    encodes_elsewhere: bool = False  # other servers have the encoder, and send rows
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float  # for encoders: of their layer norms
    is_tied: bool  # the head shares the embedding's weight
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]  # sliding window of each layer; 0: none
    norm: NormKind = "rms"
    placement: Placement = "pre"
    qk_norm: QkNorm = "none"
    activation: Activation = "silu"
    is_gated: bool = True  # the feed-forward has a gate
    # of each layer: clamp of the activation of its feed-forward, or of its shared expert
    # (layers/feed_forward.py), 0: none; empty: none anywhere
    limits: tuple[float, ...] = ()
    embed_scale: float = 1.0  # factor on embeddings
    residual_scale: float = 1.0  # factor on the outputs of attention and feed-forward
    logit_scale: float = 1.0  # factor on logits
    score_factor: float = 0.0  # factor on attention scores; 0: 1 / sqrt(head_dim)
    score_cap: float = 0.0  # cap of attention scores (devices/attention_scores.py); 0: none
    logit_cap: float = 0.0  # cap of logits; 0: none
    chunk: int = 0  # tokens of a chunk that attention of layers with positions stays within; 0: no chunks
    has_head_bias: bool = False  # the head has a bias
    has_normed_head: bool = False  # rows of the head's weight are divided by their length
    qkv_clip: float = 0.0  # queries, keys and values are clamped to this from both sides; 0: they are not
    has_sinks: bool = False  # attention heads have sinks: a learned logit among their scores
    alibi: Alibi | None = None  # linear biases of scores by distance; None: none
    has_embed_norm: bool = False  # a norm behind the embedding
    moe: MoeConfig | None  # None: no experts
    # multi-head latent attention, with num_kv_heads 1 and the head_dim of the rotary part; None: keys and
    # values of each head
    mla: MlaConfig | None
    draft_layers: int  # next-token layers of the checkpoint, which only draft heads load
    draft_blocks: tuple[DraftBlock, ...] = ()  # their blocks, where they differ from plain ones
    altup: AltUp | None = None  # alternating updates; None: a token has one hidden state
    layer_embeddings: LayerEmbeddings | None = None  # None: tokens have nothing for single layers
    global_heads: GlobalHeads | None = None  # None: heads of layers without a window are as the others
    window_heads: int = 0  # query heads of layers with a window; 0: as many as in the others
    value_dim: int = 0  # numbers of a value; 0: head_dim
    value_scale: float = 1.0  # factor on values
    gate_dim: int = 0  # numbers of the gate of each head's attention output (models/step3.py): 1 or head_dim
    doubles_shared: bool = False  # layers with the keys of another have feed-forwards of twice the size
    # of each layer: the one whose keys and values it reads; empty: each layer has its own
    kv_sources: tuple[int, ...] = ()
    recurrent: Recurrent | None = None  # kinds of layers, where some are recurrent; None: all have attention
    diffusion: BlockDiffusion | None = None  # None: the model samples one token after the other
    rope: Rope
    layer_ropes: tuple[Rope, ...] = ()  # of each layer, where they differ
    positions: LearnedPositions | None = None  # None: tokens have no embeddings of their positions
    is_rope_interleaved: bool = False  # dimensions 2i and 2i + 1 of a head rotate together
    # of each layer; empty: no layer scales its queries
    position_scales: tuple[PositionScale | None, ...] = ()
    context_len: int  # longest prompt and output together, in tokens, that the model was made for
    dtype: str | None  # of the checkpoint, where config.json has it
    bos_id: int | None
    eos_ids: tuple[int, ...]  # those of generation_config.json, then those of config.json
    # from generation_config.json: those of SAMPLING_KEYS that it has
    sampling_defaults: dict[str, float]
    pooling: Pooling | None = None  # None: the model generates
    is_bidirectional: bool = False  # tokens see the whole text; such a model pools, and keeps no cache
    # of each layer of such a model: the tokens that each sees on either side; 0: all
    reaches: tuple[int, ...] = ()
    encoder: Encoder | None = None  # None: the model is a decoder
    dual: DualText | None = None  # None: the model has no tower for images of its own
    # of an fp8 cache, one for each layer, in place of the checkpoint's (--quantization-param-path)
    cache_scales: tuple[float, ...] = ()
    has_wide_head: bool = False  # the head computes in float32 whatever the dtype (--enable-fp32-lm-head)
    quantization: Quantization | None = None  # None: weights are not quantized
    # config.json, of a model that transformers' code computes; None: this runtime's own code does
    transformers_json: JsonDict | None = None

    @property
    def num_recurrent_layers(self) -> int:
        """Layers that keep a state for each sequence."""
        return 0 if self.recurrent is None else self.recurrent.num_recurrent_layers

    @property
    def has_attention(self) -> bool:
        """Whether a layer keeps keys and values."""
        return self.recurrent is None or self.recurrent.num_attention_layers > 0

    @property
    def scores(self) -> ScoreKind:
        """What attention scores have besides their scale."""
        is_biased = self.alibi is not None
        return ScoreKind(cap=self.score_cap, has_sinks=self.has_sinks, is_biased=is_biased, chunk=self.chunk)

    @property
    def score_scale(self) -> float:
        """The factor on attention scores."""
        return self.score_factor or self.head_dim**-0.5

    @property
    def longest_head(self) -> int:
        """Size of an attention head, of the largest where layers differ."""
        return max(self.head_dim, 0 if self.global_heads is None else self.global_heads.head_dim)

    @property
    def head_sizes(self) -> frozenset[int]:
        """Sizes of keys and values of attention heads, in all layers."""
        of_all = (self.global_heads or self).head_dim
        return frozenset((self.head_dim, self.value_dim or self.head_dim, of_all))

    @property
    def shares_blocks(self) -> bool:
        """See ModelFacts: so it is in Zamba 2."""
        return self.recurrent is not None and self.recurrent.shared is not None

    def has_own_keys(self, index: int) -> bool:
        """Whether a layer makes keys and values, and does not read those of an earlier one."""
        return not self.kv_sources or self.kv_sources[index] == index

    def of_layer(self, index: int) -> "ModelConfig":
        """The configuration with the sizes of a layer's heads and feed-forward."""
        is_double = self.doubles_shared and not self.has_own_keys(index)
        own = structs.replace(self, intermediate_size=self.intermediate_size * (1 + is_double))
        heads, has_window = self.global_heads, self.windows[index] > 0
        if self.window_heads and has_window:
            return structs.replace(own, num_heads=self.window_heads)
        if heads is None or has_window:
            return own
        return structs.replace(own, head_dim=heads.head_dim, num_kv_heads=heads.num_kv_heads, has_sinks=False)

    def rope_of(self, index: int) -> Rope:
        """Rotary positions of a layer."""
        return self.layer_ropes[index] if self.layer_ropes else self.rope

    def position_scale_of(self, index: int) -> PositionScale | None:
        """How a layer scales its queries by their position."""
        return self.position_scales[index] if self.position_scales else None

    @property
    def needs_whole_texts(self) -> bool:
        """Whether a text must be computed in one step, from its first token on."""
        return self.pooling is not None and self.pooling.is_whole


def read_config(
    folder: str | Path,
    *,
    is_embedding: bool = False,
    pooling: str = "auto",
    quantization: str | None = None,
    overrides: Mapping[str, JsonValue] | None = None,
    model_impl: str = "auto",
    config_file: str | None = None,
    takes_media: bool = True,
) -> ModelConfig:
    """Reads a model folder's configuration. Raises ModelError with a one-line remedy. Reads no weights and
    imports no torch.

    `is_embedding`: use a generating model for embeddings instead; `pooling`: how (see tasks.py);
    `quantization`: see quantization_config.py; `overrides`: values in place of those at the top level of
    config.json; `model_impl`: see transformers_config.py; `config_file`: read in place of config.json;
    `takes_media`: with the encoder of a model that takes images.
    """
    given = (Path(folder), is_embedding, pooling, quantization, takes_media)
    try:
        return _read(*given, overrides, model_impl, config_file)
    except ModelError as error:
        if isinstance(error, OwnCodeLacks) and model_impl == "auto":
            return _read(*given, overrides, "transformers", config_file)
        if not overrides:
            raise
        _read(*given, None, model_impl, config_file)  # raises what is wrong without them
        raise ModelError(f"--json-model-override-args ({', '.join(overrides)}): {error}") from None


def _read(
    folder: Path,
    is_embedding: bool,
    pooling: str,
    quantization: str | None,
    takes_media: bool,
    overrides: Mapping[str, JsonValue] | None,
    model_impl: str,
    config_file: str | None,
) -> ModelConfig:
    raw, raw_generation = raw_files(folder, config_file)
    if overrides:
        raw = msgspec.json.encode(decode(raw, JsonDict, "config.json") | dict(overrides))
    architecture = (decode(raw, HfArchitectures, "config.json").architectures or [""])[0]
    if not architecture:
        raise ModelError(
            'config.json has no "architectures"; add the model\'s class name, e.g. ["LlamaForCausalLM"]'
        )
    check_refused(architecture)
    wrapper, whole = wrapper_of(architecture, model_impl), (architecture, raw)
    if wrapper:
        architecture, raw = text_model(architecture, raw, overrides or {})
    fields = transformers_fields(architecture, raw, model_impl, frozenset(MODELS))
    if fields is None:
        check_architecture(architecture)
    else:
        raw = msgspec.json.encode(of_text(architecture, fields))
    pooling_options = PoolingOptions(is_embedding=is_embedding, mode=pooling)
    if (fields is None and family_of(architecture) in ENCODERS) or architecture in DUALS:
        if quantization is not None or b'"quantization_config"' in raw:
            raise ModelError(
                f"{architecture} cannot be quantised here; leave --quantization out, and take the plain "
                "version of the model"
            )
        return _resolve_encoder(architecture, raw, folder, pooling_options)
    family = decoder_family(architecture) if fields is None else TRANSFORMERS
    known, recurrent = with_known_keys(decode(raw, JsonDict, "config.json"), family), None
    if family.hybrid is not None:
        hybrid = family.hybrid(known)
        known, recurrent = known | hybrid.keys, hybrid.recurrent
    raw = msgspec.json.encode(known)
    names = [pair for pair in family.keys if pair[0] in known]
    hf = decode(raw, HfConfig, "config.json", names)
    generation = decode(raw_generation, HfGeneration, "generation_config.json")
    moe = None if family.moe is None else family.moe(decode(raw, HfMoeConfig, "config.json", names))
    mla = read_mla(decode(raw, HfMlaConfig, "config.json", names)) if family.is_mla else None
    if mla is not None:
        hf = structs.replace(hf, head_dim=mla.rope_dim, num_key_value_heads=1)
    config = structs.replace(
        _resolve(
            architecture,
            family,
            hf,
            generation,
            read_rope(decode(raw, HfRope, "config.json", names)),
            moe,
            mla,
        ),
        quantization=read_any_quantization(folder, hf.stored_quantization, quantization),
        transformers_json=None if fields is None else identity(fields),
        recurrent=recurrent,
        wrapper=wrapper,
        media=read_media(*whole, hf.hidden_size, wanted=takes_media and family.takes_media, fields=fields),
        **({} if family.read is None else family.read(known)),
    )
    if fields is not None:
        check_generates(architecture, is_embedding=is_embedding)
        return config
    return _with_pooling(config, folder, pooling_options, known, bool(hf.use_bidirectional_attention))


def _with_pooling(
    config: ModelConfig, folder: Path, options: PoolingOptions, fields: JsonDict, is_bidirectional: bool
) -> ModelConfig:
    """The configuration of a decoder with what it does besides generating. Raises ModelError."""
    architecture, width = config.architecture, config.hidden_size
    pooled = read_pooling(folder, architecture, width, options, is_causal=not is_bidirectional, fields=fields)
    if is_bidirectional:
        check_bidirectional(architecture, is_pooled=pooled is not None)
        reaches = tuple(window // 2 for window in config.windows)  # no pages, so no windows of them
        config = structs.replace(config, windows=(0,) * config.num_layers, reaches=reaches)
    if pooled is None:
        return config
    check_pools(architecture)
    return structs.replace(
        config,
        pooling=structs.replace(pooled, reads_chats=config.media is not None),
        is_bidirectional=is_bidirectional,
        context_len=longest_text(folder, config.context_len),
    )


def _resolve(
    architecture: str,
    family: Family,
    hf: HfConfig,
    generation: HfGeneration,
    rope: Rope,
    moe: MoeConfig | None,
    mla: MlaConfig | None,
) -> ModelConfig:
    check_sizes(family, hf)
    heads = hf.num_attention_heads
    num_kv_heads = hf.num_key_value_heads or heads
    if heads % num_kv_heads:
        what = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        raise ModelError(f"config.json: {what}")
    head_dim = hf.head_dim or family.head_dim or hf.hidden_size // heads
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary positions need an even one")
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=(moe.dense_size if moe is not None else None) or hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        is_tied=family.is_tied if hf.tie_word_embeddings is None else hf.tie_word_embeddings,
        qkv_bias=hf.attention_bias if family.qkv_bias is None else family.qkv_bias and hf.qkv_bias,
        o_bias=hf.attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=hf.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        windows=windows(family, hf),
        norm=family.norm,
        placement=family.placement,
        qk_norm=family.qk_norm,
        activation=ACTIVATIONS[family.activation],
        is_gated=family.is_gated,
        is_rope_interleaved=family.is_rope_interleaved,
        has_sinks=family.has_sinks,
        moe=moe,
        mla=mla,
        draft_layers=hf.num_nextn_predict_layers or 0,
        rope=rope,
        context_len=rope.context_len,
        dtype=(hf.dtype or hf.torch_dtype or "").removeprefix("torch.") or None,
        bos_id=next(iter(token_ids(hf.bos_token_id)), None),
        eos_ids=tuple(dict.fromkeys(token_ids(generation.eos_token_id) + token_ids(hf.eos_token_id))),
        sampling_defaults=generation.sampling,
    )


def _resolve_encoder(architecture: str, raw: bytes, folder: Path, options: PoolingOptions) -> ModelConfig:
    hf, encoder, dual = read_any_encoder(architecture, raw)
    return ModelConfig(
        architecture=architecture,
        **encoder_fields(hf),
        context_len=longest_text(folder, encoder.num_positions - encoder.first_position),
        pooling=dual_pooling(dual, options)
        or read_pooling(folder, architecture, hf.hidden_size, options, is_causal=False, fields={}),
        encoder=encoder,
        dual=dual,
        media=None if dual is None else dual.images,
    )
