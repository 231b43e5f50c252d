"""What decode and prompt steps should take on Ascend A2 and A3, on paper: a model, not a measurement. No NPU
was near it.

    python -m bench.ascend_model              a table of the reference configurations beside what their authors published
    python -m bench.ascend_model --operators  each operator of each step: how often, bytes, operations, microseconds

An operator takes the longest of: its bytes over the memory's bandwidth, its multiplications over the peak,
and the least time that any operator takes in a graph. Collectives take a latency and their bytes over the
links. Operators run one after another: what the real device overlaps (copies with computing, shared with
routed experts) is not counted, and neither is what it does worse than `Reach` says.

Peaks: Zuo et al., Serving Large Language Models on Huawei CloudMatrix384 (arXiv 2506.12708) for a die of the
910C (A3: two dies a card); public data sheets of the Atlas 800I A2 for the 910B. Published figures: SGLang's
best-practice page for Ascend, as of 2026.
"""

import argparse
from collections.abc import Iterator
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import asdict

from bench.record import record
from bench.shapes import shape
from runtime.models.config import ModelConfig
from runtime.models.mla_config import MlaConfig
from runtime.models.moe_config import MoeConfig
from runtime.options.model_sizes import kv_heads

Kind = Literal["matrix", "vector", "attention", "exchange"]
TERA, MICRO = 1e12, 1e-6
INDEX_HEADS, INDEX_DIM = 64, 128  # of DeepSeek-V3.2 (DeepSeek-AI, 2025)


class Card(Struct, frozen=True, kw_only=True):
    """Published peaks of what torch_npu sees as one device."""

    name: str
    bandwidth: float  # bytes a second of device memory
    bf16: float  # operations a second, a multiplication and an addition being two
    int8: float
    link: float  # bytes a second, one way, to the other devices of a node


A3 = Card(name="A3 die", bandwidth=1.6 * TERA, bf16=376 * TERA, int8=752 * TERA, link=196e9)
A2 = Card(name="A2", bandwidth=1.6 * TERA, bf16=313 * TERA, int8=626 * TERA, link=196e9)


class Reach(Struct, frozen=True, kw_only=True):
    """How much of the peaks is taken to be reached: assumptions, until `runtime check doctor --bench` on
    hardware says better."""

    bandwidth: float = 0.75
    matrix: float = 0.6
    attention: float = 0.4
    least_s: float = 3 * MICRO  # of an operator that a graph replays
    exchange_s: float = 20 * MICRO  # of a collective, before its first byte
    link: float = 0.6


class Operator(Struct, frozen=True, kw_only=True):
    """One kind of call in a step of one device."""

    name: str
    kind: Kind
    count: float = 1
    num_bytes: float = 0  # of one call, in device memory, or over the links for an exchange
    num_ops: float = 0
    is_int8: bool = False

    def seconds(self, card: Card, reach: Reach) -> float:
        """Of all calls of a step."""
        if self.kind == "exchange":
            return self.count * (reach.exchange_s + self.num_bytes / (card.link * reach.link))
        share = reach.attention if self.kind == "attention" else reach.matrix
        compute = self.num_ops / ((card.int8 if self.is_int8 else card.bf16) * share)
        return self.count * max(self.num_bytes / (card.bandwidth * reach.bandwidth), compute, reach.least_s)


class Layout(Struct, frozen=True, kw_only=True):
    """How a model lies on devices. With `attention_ranks` 1 and many experts' ranks this is data-parallel
    attention."""

    attention_ranks: int  # that share the heads of one sequence
    expert_ranks: int = 1  # that whole experts are spread over
    weight_bytes: float = 2.0  # a number of the linears
    expert_bytes: float = 2.0  # a number of the experts
    # tokens that sparse attention looks at, after an indexer has looked at keys of all; None: all of them
    chosen: int | None = None

    @property
    def is_int8(self) -> bool:
        return self.weight_bytes < 2


class Load(Struct, frozen=True, kw_only=True):
    """One step of one device: `tokens` new tokens, of which each sees `context` tokens on average."""

    tokens: float
    context: float
    is_prompt: bool = False


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
    num_mixed = sum(moe.layers) if moe is not None else 0
    if num_mixed < layers:
        for operator in dense(hidden, model.intermediate_size, layout.attention_ranks, layout, load.tokens):
            yield scaled(operator, layers - num_mixed)
    if moe is not None:
        for operator in experts(hidden, moe, layout, load.tokens):
            yield scaled(operator, num_mixed)
    if layout.attention_ranks > 1:
        # an exchange of experts takes the place of the second sum
        reduced = 2 if layout.expert_ranks == 1 else 1
        yield Operator(
            name="all_reduce",
            kind="exchange",
            count=reduced * layers,
            num_bytes=2 * load.tokens * hidden * item * (layout.attention_ranks - 1) / layout.attention_ranks,
        )
    rows = 1 if load.is_prompt else load.tokens
    yield matmul("logits", rows, hidden, model.vocab_size / layout.attention_ranks, 2.0)
    yield Operator(name="choice", kind="vector", count=6, num_bytes=rows * model.vocab_size * 4)


def head_attention(model: ModelConfig, layout: Layout, load: Load) -> Iterator[Operator]:
    """Keys and values of heads."""
    heads, kv, dim = (
        model.num_heads / layout.attention_ranks,
        kv_heads(model, layout.attention_ranks),
        model.head_dim,
    )
    yield from linear("qkv", load.tokens, model.hidden_size, (heads + 2 * kv) * dim, layout)
    if model.qk_norm:
        yield Operator(
            name="npu_rms_norm of q and k",
            kind="vector",
            count=2,
            num_bytes=2 * load.tokens * heads * dim * 2,
        )
    yield Operator(name="npu_rotary_mul", kind="vector", count=2, num_bytes=2 * load.tokens * heads * dim * 2)
    yield Operator(name="npu_scatter_pa_kv_cache", kind="vector", num_bytes=4 * load.tokens * kv * dim * 2)
    read = 1 if load.is_prompt else load.tokens  # a prompt's queries share what they read
    yield Operator(
        name="npu_fused_infer_attention_score",
        kind="attention",
        num_ops=4 * load.tokens * load.context * heads * dim,
        num_bytes=2 * read * load.context * kv * dim * 2,
    )
    yield from linear("o", load.tokens, heads * dim, model.hidden_size, layout)


def latent_attention(model: ModelConfig, latent: MlaConfig, layout: Layout, load: Load) -> Iterator[Operator]:
    """One latent of all heads: brought to the queries where a token decodes, made into keys and values for
    prompts."""
    heads, hidden, rank, rope = (
        model.num_heads / layout.attention_ranks,
        model.hidden_size,
        latent.kv_rank,
        latent.rope_dim,
    )
    queries = heads * (latent.nope_dim + rope)
    yield from linear("q_a, kv_a", load.tokens, hidden, (latent.q_rank or queries) + rank + rope, layout)
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
        if layout.chosen is not None:
            seen, name = min(seen, layout.chosen), "npu_sparse_flash_attention"
            yield Operator(
                name="npu_lightning_indexer",
                kind="attention",
                num_bytes=load.tokens * load.context * INDEX_DIM * 2,
                num_ops=2 * load.tokens * load.context * INDEX_HEADS * INDEX_DIM,
            )
        yield Operator(
            name=name,
            kind="attention",
            num_bytes=load.tokens * seen * (rank + rope) * 2,
            num_ops=2 * load.tokens * seen * heads * (2 * rank + rope),
        )
        yield matmul("latents to values", load.tokens, latent.value_dim, heads * rank, 2.0)
    yield from linear("o", load.tokens, heads * latent.value_dim, hidden, layout)


def dense(hidden: int, inner: int, ranks: int, layout: Layout, tokens: float) -> Iterator[Operator]:
    yield from linear("gate_up", tokens, hidden, 2 * inner / ranks, layout)
    yield Operator(name="npu_swiglu", kind="vector", num_bytes=3 * tokens * inner / ranks * 2)
    yield from linear("down", tokens, inner / ranks, hidden, layout)


def experts(hidden: int, moe: MoeConfig, layout: Layout, tokens: float) -> Iterator[Operator]:
    """Tokens go to their experts' ranks and come back; without expert ranks, each rank has a slice of all
    experts."""
    ranks, chosen = layout.expert_ranks, moe.routing.top_k
    if moe.shared_size:
        yield from dense(hidden, moe.shared_size, 1 if ranks > 1 else layout.attention_ranks, layout, tokens)
    yield matmul("gate", tokens, hidden, moe.num_experts, 4.0)
    yield Operator(name="npu_moe_gating_top_k", kind="vector", num_bytes=tokens * moe.num_experts * 4)
    # all ranks bring their tokens where attention is each rank's own; ranks that share sequences bring the
    # same ones
    all_tokens = tokens * ranks / layout.attention_ranks if ranks > 1 else tokens
    own = moe.num_experts / ranks
    rows = all_tokens * chosen / ranks
    # experts that some token chose, if all are as likely
    hit = own * (1 - (1 - 1 / moe.num_experts) ** (all_tokens * chosen))
    inner = moe.intermediate_size / (1 if ranks > 1 else layout.attention_ranks)
    is_int8 = layout.expert_bytes < 2
    if ranks > 1:
        yield Operator(
            name="npu_moe_distribute_dispatch_v2",
            kind="exchange",
            num_bytes=tokens * chosen * hidden * (1 if is_int8 else 2),
        )
    else:
        yield Operator(name="npu_moe_init_routing_v2", kind="vector", num_bytes=2 * rows * hidden * 2)
    yield Operator(
        name="npu_grouped_matmul gate_up",
        kind="matrix",
        num_bytes=hit * 2 * hidden * inner * layout.expert_bytes,
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
        num_bytes=hit * hidden * inner * layout.expert_bytes,
        num_ops=2 * rows * hidden * inner,
        is_int8=is_int8,
    )
    if ranks > 1:
        yield Operator(
            name="npu_moe_distribute_combine_v2", kind="exchange", num_bytes=tokens * chosen * hidden * 2
        )
    else:
        yield Operator(name="npu_moe_finalize_routing", kind="vector", num_bytes=2 * rows * hidden * 2)


def linear(name: str, tokens: float, width: float, out: float, layout: Layout) -> Iterator[Operator]:
    """A linear of the layers; int8 ones quantise what comes in."""
    if layout.is_int8:
        yield Operator(name="npu_dynamic_quant", kind="vector", num_bytes=3 * tokens * width)
    yield matmul(name, tokens, width, out, layout.weight_bytes)


def matmul(name: str, tokens: float, width: float, out: float, weight_bytes: float) -> Operator:
    return Operator(
        name=f"{'npu_quant_matmul' if weight_bytes < 2 else 'matmul'} {name}",
        kind="matrix",
        is_int8=weight_bytes < 2,
        num_bytes=width * out * weight_bytes + tokens * (width + out) * 2,
        num_ops=2 * tokens * width * out,
    )


def scaled(operator: Operator, layers: int) -> Operator:
    return Operator(
        name=operator.name,
        kind=operator.kind,
        count=operator.count * layers,
        num_bytes=operator.num_bytes,
        num_ops=operator.num_ops,
        is_int8=operator.is_int8,
    )


class Reference(Struct, frozen=True, kw_only=True):
    """A published configuration. Sequences in flight are throughput times TPOT (Little, 1961); split servers
    are halved."""

    model: str
    cards: int
    decode_cards: int
    prompt: int
    output: int
    layout: Layout
    tpot_ms: float  # published
    card_tokens_s: float  # published, over all cards

    @property
    def in_flight(self) -> float:
        return max(1.0, self.card_tokens_s * self.cards * self.tpot_ms / 1000)


_INT8 = {"weight_bytes": 1.0, "expert_bytes": 1.0}
_INT4 = {"weight_bytes": 1.0, "expert_bytes": 0.5}
REFERENCES = (
    Reference(
        model="deepseek-r1",
        cards=32,
        decode_cards=16,
        prompt=3500,
        output=1500,
        tpot_ms=48.10,
        card_tokens_s=396.8,
        layout=Layout(attention_ranks=1, expert_ranks=32, **_INT8),
    ),
    Reference(
        model="deepseek-r1",
        cards=32,
        decode_cards=16,
        prompt=6000,
        output=1600,
        tpot_ms=19.81,
        card_tokens_s=36.9,
        layout=Layout(attention_ranks=1, expert_ranks=32, **_INT8),
    ),
    Reference(
        model="deepseek-r1",
        cards=8,
        decode_cards=8,
        prompt=2000,
        output=2000,
        tpot_ms=49.67,
        card_tokens_s=528.4,
        layout=Layout(attention_ranks=1, expert_ranks=16, **_INT4),
    ),
    Reference(
        model="deepseek-v3.2",
        cards=32,
        decode_cards=16,
        prompt=64000,
        output=1000,
        tpot_ms=25.36,
        card_tokens_s=14.74,
        layout=Layout(attention_ranks=4, expert_ranks=32, chosen=2048, **_INT8),
    ),
    Reference(
        model="qwen3-235b-a22b",
        cards=8,
        decode_cards=8,
        prompt=11000,
        output=1000,
        tpot_ms=9.70,
        card_tokens_s=11.69,
        layout=Layout(attention_ranks=16),
    ),
    Reference(
        model="qwen3-32b",
        cards=4,
        decode_cards=4,
        prompt=6000,
        output=1500,
        tpot_ms=16.87,
        card_tokens_s=311.8,
        layout=Layout(attention_ranks=8, **_INT8),
    ),
    Reference(
        model="qwen3-32b",
        cards=4,
        decode_cards=4,
        prompt=4000,
        output=1500,
        tpot_ms=9.46,
        card_tokens_s=25.9,
        layout=Layout(attention_ranks=8),
    ),
)


def decode_load(reference: Reference) -> Load:
    """Of one die: its share of the sequences where attention is its own, all of them where it shares their
    heads."""
    groups = 2 * reference.decode_cards / reference.layout.attention_ranks
    return Load(
        tokens=max(1.0, reference.in_flight / groups), context=reference.prompt + reference.output / 2
    )


def predict(reference: Reference, card: Card, reach: Reach) -> dict[str, Any]:
    model, load = shape(reference.model), decode_load(reference)
    decode = list(step(model, reference.layout, load))
    prompt = Load(tokens=reference.prompt, context=reference.prompt / 2, is_prompt=True)
    step_ms = 1000 * sum(operator.seconds(card, reach) for operator in decode)
    by_kind = {
        kind: 1000 * sum(o.seconds(card, reach) for o in decode if o.kind == kind) for kind in get_args(Kind)
    }
    prompt_ms = round(
        1000 * sum(operator.seconds(card, reach) for operator in step(model, reference.layout, prompt)), 1
    )
    return {
        "model": reference.model,
        "prompt": reference.prompt,
        "output": reference.output,
        "dies": 2 * reference.decode_cards,
        "sequences_a_die": round(load.tokens, 1),
        "bits": int(8 * reference.layout.expert_bytes),
        "step_ms": round(step_ms, 2),
        **{f"{kind}_ms": round(value, 2) for kind, value in by_kind.items()},
        "launches": round(sum(operator.count for operator in decode)),
        "a2_step_ms": round(1000 * sum(operator.seconds(A2, reach) for operator in decode), 2),
        "published_tpot_ms": reference.tpot_ms,
        "published_over_step": round(reference.tpot_ms / step_ms, 2),
        # sparse prompts are not modelled
        "prompt_ms": prompt_ms if reference.layout.chosen is None else None,
    }


COLUMNS = (  # key of a row, heading, width
    ("model", "model", 16),
    ("prompt", "in", 6),
    ("output", "out", 5),
    ("dies", "dies", 5),
    ("bits", "bits", 5),
    ("sequences_a_die", "seqs", 6),
    ("step_ms", "step ms", 8),
    ("matrix_ms", "matrix", 7),
    ("attention_ms", "attention", 10),
    ("vector_ms", "vector", 7),
    ("exchange_ms", "exchange", 9),
    ("launches", "launches", 9),
    ("published_tpot_ms", "published", 10),
    ("published_over_step", "ratio", 6),
    ("prompt_ms", "prompt ms", 10),
    ("a2_step_ms", "on A2", 7),
)


def show(row: dict[str, Any]) -> str:
    return "".join(f"{'-' if row[key] is None else row[key]:>{width}}" for key, _, width in COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(description="decode and prompt steps on Ascend, on paper")
    parser.add_argument("--operators", action="store_true", help="each operator of each decode step")
    operators = parser.parse_args().operators
    reach = Reach()
    rows = [predict(reference, A3, reach) for reference in REFERENCES]
    print(
        "a model of A3 dies, no measurement; published figures include speculation, scheduling and HTTP, and prompts beside decodes"
    )
    print("".join(f"{heading:>{width}}" for _, heading, width in COLUMNS))
    for row in rows:
        print(show(row))
    if operators:
        for reference in REFERENCES:
            print(f"\n{reference.model} {reference.prompt}+{reference.output}: one decode step of one die")
            for operator in step(shape(reference.model), reference.layout, decode_load(reference)):
                print(
                    f"  {operator.name:40} {operator.count:>6.0f} x {operator.num_bytes / 1e6:>9.2f} MB "
                    f"{operator.num_ops / 1e9:>9.2f} Gop {operator.seconds(A3, reach) / MICRO:>9.0f} us"
                )
    record(
        "ascend_model",
        {
            "is_measured": False,
            "cards": [asdict(card) for card in (A3, A2)],
            "reach": asdict(reach),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
