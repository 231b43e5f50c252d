"""Operators of a decode or prompt step on an Ascend NPU, with the bytes that they move and the
multiplications that they do: the model behind bench/ascend_model.py."""

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from runtime.models.config.mla_config import MlaConfig
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.moe_config import MoeConfig
from runtime.options.model_sizes import kv_heads

Kind = Literal["matrix", "vector", "attention", "exchange"]
TERA, MICRO = 1e12, 1e-6
# launches of a layer in a decode step on 16 ranks, collectives included, by kind of attention and of
# feed-forward, and whether linear layers are W8A8: counted by the recorder (tests/ascend/test_show_calls.py)
LAUNCHES: dict[tuple[str, str, bool], int] = {
    ("heads", "dense", False): 15,
    ("heads", "dense", True): 16,
    ("heads", "experts", False): 19,
    ("latents", "experts", False): 24,
    ("latents", "experts", True): 26,
    ("sparse latents", "experts", False): 35,
}
INDEX_HEADS, INDEX_DIM = 64, 128  # the indexer of DeepSeek-V3.2 (DeepSeek-AI, 2025)


class Die(Struct, frozen=True, kw_only=True):
    """Published peaks of what torch_npu sees as one device."""

    name: str
    bandwidth: float  # bytes a second of device memory
    bf16: float  # operations a second, a multiplication and an addition being two
    int8: float
    link: float  # bytes a second, one way, to the other devices of a node


A3 = Die(name="A3 die", bandwidth=1.6 * TERA, bf16=376 * TERA, int8=752 * TERA, link=196e9)
A2 = Die(name="A2", bandwidth=1.6 * TERA, bf16=313 * TERA, int8=626 * TERA, link=196e9)


class Reach(Struct, frozen=True, kw_only=True):
    """The share of the peaks that is assumed to be reached, until `runtime check doctor --bench` measures
    it."""

    bandwidth: float = 0.75
    matrix: float = 0.6
    attention: float = 0.4
    least_s: float = 3 * MICRO  # the least time of an operator that a graph replays
    exchange_s: float = 20 * MICRO  # latency of a collective
    link: float = 0.6
    update_s: float = 15 * MICRO  # of the host, for the lengths of one attention call of a replay
    replay_s: float = 200 * MICRO  # of the host, for the inputs and the graphs of a step


# nothing is lost: no step of any runtime takes less
PEAK = Reach(bandwidth=1, matrix=1, attention=1, least_s=0, exchange_s=0, link=1, update_s=0, replay_s=0)


class Operator(Struct, frozen=True, kw_only=True):
    """One kind of call in a step of one device."""

    name: str
    kind: Kind
    count: float = 1
    num_bytes: float = 0  # of one call, in device memory, or over the links for an exchange
    num_ops: float = 0
    is_int8: bool = False

    def seconds(self, die: Die, reach: Reach) -> float:
        """Seconds of all calls of a step."""
        if self.kind == "exchange":
            return self.count * (reach.exchange_s + self.num_bytes / (die.link * reach.link))
        share = reach.attention if self.kind == "attention" else reach.matrix
        compute = self.num_ops / ((die.int8 if self.is_int8 else die.bf16) * share)
        return self.count * max(self.num_bytes / (die.bandwidth * reach.bandwidth), compute, reach.least_s)


class Layout(Struct, frozen=True, kw_only=True):
    """How a model is spread over devices. `attention_ranks` 1 with many expert ranks is data-parallel
    attention."""

    attention_ranks: int  # ranks that share the heads of one sequence
    expert_ranks: int = 1  # ranks that whole experts are spread over
    weight_bytes: float = 2.0  # bytes of a number of the linear layers
    expert_bytes: float = 2.0  # bytes of a number of the experts
    # tokens that sparse attention reads, after an indexer has read keys of all; None: attention is not sparse
    sparse_tokens: int | None = None

    @property
    def is_int8(self) -> bool:
        """Whether linear layers have weights of 8 bits."""
        return self.weight_bytes < 2


class Load(Struct, frozen=True, kw_only=True):
    """One step of one device: `tokens` new tokens, of which each sees `context` tokens on average."""

    tokens: float
    context: float
    is_prompt: bool = False
    queries: int = 1  # of these tokens, those of one sequence: a token and its drafts

    @property
    def reads(self) -> float:
        """How often a context is read: the queries of a sequence share what they read."""
        return 1 if self.is_prompt else self.tokens / self.queries


def step(model: ModelConfig, layout: Layout, load: Load) -> Iterator[Operator]:
    """The operators of one step on one device, in the order in which they first run."""
    hidden, item = model.hidden_size, 2
    yield Operator(name="embedding", kind="vector", num_bytes=2 * load.tokens * hidden * item)
    layers = model.num_layers
    yield Operator(
        name="npu_add_rms_norm", kind="vector", count=2 * layers, num_bytes=4 * load.tokens * hidden * item
    )
    attention = (
        latent_attention(model, model.mla, layout, load)
        if model.mla is not None
        else head_attention(model, layout, load)
    )
    for operator in attention:
        yield scaled(operator, layers)
    moe = model.moe
    num_moe = sum(moe.layers) if moe is not None else 0
    if num_moe < layers:
        for operator in dense(hidden, model.intermediate_size, layout.attention_ranks, layout, load.tokens):
            yield scaled(operator, layers - num_moe)
    if moe is not None:
        for operator in experts(hidden, moe, layout, load.tokens):
            yield scaled(operator, num_moe)
    if layout.attention_ranks > 1:
        # with expert ranks, the all-to-all replaces the second sum
        reduced = 2 if layout.expert_ranks == 1 else 1
        yield Operator(
            name="all_reduce",
            kind="exchange",
            count=reduced * layers,
            num_bytes=2 * load.tokens * hidden * item * (layout.attention_ranks - 1) / layout.attention_ranks,
        )
    rows = 1 if load.is_prompt else load.tokens
    yield matmul("logits", rows, hidden, model.vocab_size / layout.attention_ranks, 2.0)
    yield Operator(name="sample", kind="vector", count=6, num_bytes=rows * model.vocab_size * 4)


def kind_of_layers(model: ModelConfig, layout: Layout) -> tuple[str, str, bool]:
    """A key of LAUNCHES, or one like it: of all layers but the first few."""
    attention = (
        "heads" if model.mla is None else "latents" if layout.sparse_tokens is None else "sparse latents"
    )
    return attention, "dense" if model.moe is None else "experts", layout.is_int8


def decode_step(model: ModelConfig, layout: Layout, load: Load) -> list[Operator]:
    """The operators of a decode step, with the small ones that the recorder counts and `step` has not."""
    operators = list(step(model, layout, load))
    attention, feed_forward, is_int8 = kind_of_layers(model, layout)
    launches = LAUNCHES.get((attention, feed_forward, is_int8)) or LAUNCHES[attention, feed_forward, False]
    rest = launches * model.num_layers - sum(operator.count for operator in operators)
    return [*operators, Operator(name="other launches", kind="vector", count=max(0.0, rest))]


def host_seconds(model: ModelConfig, layout: Layout, reach: Reach) -> float:
    """What the host does for a replayed decode step, while the device computes the one before: inputs, graphs
    and lengths for each attention call, unless the device has them."""
    calls = 0 if layout.sparse_tokens is not None else model.num_layers
    return reach.replay_s + calls * reach.update_s


def head_attention(model: ModelConfig, layout: Layout, load: Load) -> Iterator[Operator]:
    """Operators of one layer's attention with a KV cache of heads."""
    heads, kv, dim = (
        model.num_heads / layout.attention_ranks,
        kv_heads(model, layout.attention_ranks),
        model.head_dim,
    )
    width = (heads + 2 * kv) * dim
    yield from linear("qkv", load.tokens, model.hidden_size, width, layout, quantizes=False)
    if model.qk_norm:
        yield Operator(
            name="npu_rms_norm of q and k",
            kind="vector",
            count=2,
            num_bytes=2 * load.tokens * heads * dim * 2,
        )
    yield Operator(name="npu_rotary_mul", kind="vector", count=2, num_bytes=2 * load.tokens * heads * dim * 2)
    yield Operator(name="npu_scatter_pa_kv_cache", kind="vector", num_bytes=4 * load.tokens * kv * dim * 2)
    yield Operator(
        name="npu_fused_infer_attention_score",
        kind="attention",
        num_ops=4 * load.tokens * load.context * heads * dim,
        num_bytes=2 * load.reads * load.context * kv * dim * 2,
    )
    yield from linear("o", load.tokens, heads * dim, model.hidden_size, layout)


def latent_attention(model: ModelConfig, latent: MlaConfig, layout: Layout, load: Load) -> Iterator[Operator]:
    """Operators of one layer's MLA: absorbed for decodes, expanded for prompts."""
    heads, hidden, rank, rope = (
        model.num_heads / layout.attention_ranks,
        model.hidden_size,
        latent.kv_rank,
        latent.rope_dim,
    )
    queries = heads * (latent.nope_dim + rope)
    down = (latent.q_rank or queries) + rank + rope
    yield from linear("q_a, kv_a", load.tokens, hidden, down, layout, quantizes=False)
    if latent.q_rank is not None:
        yield Operator(name="npu_rms_norm", kind="vector", num_bytes=2 * load.tokens * latent.q_rank * 2)
        yield from linear("q_b", load.tokens, latent.q_rank, queries, layout)
    yield Operator(
        name="npu_kv_rmsnorm_rope_cache", kind="vector", num_bytes=3 * load.tokens * (rank + rope) * 2
    )
    yield Operator(name="npu_interleave_rope", kind="vector", num_bytes=2 * load.tokens * heads * rope * 2)
    if load.is_prompt:
        yield from linear("kv_b", load.context, rank, heads * (latent.nope_dim + latent.value_dim), layout)
        width = latent.nope_dim + rope + latent.value_dim
        yield Operator(
            name="npu_fused_infer_attention_score",
            kind="attention",
            num_ops=2 * load.tokens * load.context * heads * width,
            num_bytes=load.context * heads * width * 2,
        )
    else:
        yield matmul("q to latents", load.tokens, latent.nope_dim, heads * rank, 2.0)
        seen, name = load.context, "npu_fused_infer_attention_score"
        if layout.sparse_tokens is not None:
            seen, name = min(seen, layout.sparse_tokens), "npu_sparse_flash_attention"
            yield Operator(
                name="npu_lightning_indexer",
                kind="attention",
                num_bytes=load.reads * load.context * INDEX_DIM * 2,
                num_ops=2 * load.tokens * load.context * INDEX_HEADS * INDEX_DIM,
            )
        yield Operator(
            name=name,
            kind="attention",
            num_bytes=load.reads * seen * (rank + rope) * 2,
            num_ops=2 * load.tokens * seen * heads * (2 * rank + rope),
        )
        yield matmul("latents to values", load.tokens, latent.value_dim, heads * rank, 2.0)
    yield from linear("o", load.tokens, heads * latent.value_dim, hidden, layout)


def dense(hidden: int, inner: int, ranks: int, layout: Layout, tokens: float) -> Iterator[Operator]:
    """Operators of a dense feed-forward."""
    yield from linear("gate_up", tokens, hidden, 2 * inner / ranks, layout, quantizes=False)
    yield Operator(name="npu_swiglu", kind="vector", num_bytes=3 * tokens * inner / ranks * 2)
    yield from linear("down", tokens, inner / ranks, hidden, layout, quantizes=False)


def experts(hidden: int, moe: MoeConfig, layout: Layout, tokens: float) -> Iterator[Operator]:
    """Operators of a MoE layer: tokens are sent to their experts' ranks and back; without expert ranks, each
    rank has a slice of all experts."""
    ranks, sparse_tokens = layout.expert_ranks, moe.routing.top_k
    if moe.shared_size:
        yield from dense(hidden, moe.shared_size, 1 if ranks > 1 else layout.attention_ranks, layout, tokens)
    yield matmul("gate", tokens, hidden, moe.num_experts, 4.0)
    yield Operator(name="npu_moe_gating_top_k", kind="vector", num_bytes=tokens * moe.num_experts * 4)
    # ranks with data-parallel attention have different tokens; ranks that share sequences have the same ones
    all_tokens = tokens * ranks / layout.attention_ranks if ranks > 1 else tokens
    local_experts = moe.num_experts / ranks
    rows = all_tokens * sparse_tokens / ranks
    # expected number of experts with a token, if all are equally likely
    active_experts = local_experts * (1 - (1 - 1 / moe.num_experts) ** (all_tokens * sparse_tokens))
    inner = moe.intermediate_size / (1 if ranks > 1 else layout.attention_ranks)
    is_int8 = layout.expert_bytes < 2
    if ranks > 1:
        yield Operator(
            name="npu_moe_distribute_dispatch_v2",
            kind="exchange",
            num_bytes=tokens * sparse_tokens * hidden * (1 if is_int8 else 2),
        )
    else:
        yield Operator(name="npu_moe_init_routing_v2", kind="vector", num_bytes=2 * rows * hidden * 2)
    yield Operator(
        name="npu_grouped_matmul gate_up",
        kind="matrix",
        num_bytes=active_experts * 2 * hidden * inner * layout.expert_bytes,
        num_ops=4 * rows * hidden * inner,
        is_int8=is_int8,
    )
    yield Operator(
        name="npu_dequant_swiglu_quant" if is_int8 else "npu_swiglu",
        kind="vector",
        num_bytes=3 * rows * inner * 2,
    )
    yield Operator(
        name="npu_grouped_matmul down",
        kind="matrix",
        num_bytes=active_experts * hidden * inner * layout.expert_bytes,
        num_ops=2 * rows * hidden * inner,
        is_int8=is_int8,
    )
    if ranks > 1:
        yield Operator(
            name="npu_moe_distribute_combine_v2",
            kind="exchange",
            num_bytes=tokens * sparse_tokens * hidden * 2,
        )
    else:
        yield Operator(name="npu_moe_finalize_routing", kind="vector", num_bytes=2 * rows * hidden * 2)


def linear(
    name: str, tokens: float, width: float, out: float, layout: Layout, *, quantizes: bool = True
) -> Iterator[Operator]:
    """A linear layer; with int8 weights it quantizes its input first, unless the norm or activation before it
    does that."""
    if layout.is_int8 and quantizes:
        yield Operator(name="npu_dynamic_quant", kind="vector", num_bytes=3 * tokens * width)
    yield matmul(name, tokens, width, out, layout.weight_bytes)


def matmul(name: str, tokens: float, width: float, out: float, weight_bytes: float) -> Operator:
    """A product of [tokens, width] and [width, out]."""
    return Operator(
        name=f"{'npu_quant_matmul' if weight_bytes < 2 else 'matmul'} {name}",
        kind="matrix",
        is_int8=weight_bytes < 2,
        num_bytes=width * out * weight_bytes + tokens * (width + out) * 2,
        num_ops=2 * tokens * width * out,
    )


def scaled(operator: Operator, layers: int) -> Operator:
    """A call of one operator, repeated for `layers` layers."""
    return Operator(
        name=operator.name,
        kind=operator.kind,
        count=operator.count * layers,
        num_bytes=operator.num_bytes,
        num_ops=operator.num_ops,
        is_int8=operator.is_int8,
    )
