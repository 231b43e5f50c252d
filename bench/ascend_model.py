"""What decode and prompt steps should take on Ascend A2 and A3, on paper: a model, not a measurement.

    python -m bench.ascend_model              a table of reference configurations, with published figures
    python -m bench.ascend_model --operators  operators of each step: count, bytes, operations, time

An operator takes the longest of: its bytes over the memory's bandwidth, its multiplications over the peak,
and the least time that any operator takes in a graph. Collectives take a latency and their bytes over the
links. Operators run one after another: what the real device overlaps (copies with computing, shared with
routed experts) is not counted, and neither is what it does worse than `Reach` assumes. Small operators are as
many as the recorder counts. The host hands a step over while the one before is computed, and bounds it.

Nothing is fitted: the numbers of `Reach` are assumptions, the same for all rows, and the column "at peak" is
without them. Published times are per token with drafts, so the column "needs" says how many tokens a step
that verifies them would have to bring for these times: more than 1 + drafts is out of reach.

Peaks: Zuo et al., Serving Large Language Models on Huawei CloudMatrix384 (arXiv 2506.12708) for a die of the
910C (A3: two dies a card); public data sheets of the Atlas 800I A2 for the 910B. Published figures: SGLang's
best-practice page for Ascend, as of 2026.
"""

import argparse
from typing import Any, get_args

from msgspec import Struct, structs
from msgspec.structs import asdict

from bench.ascend_operators import (
    A2,
    A3,
    MICRO,
    PEAK,
    Die,
    Kind,
    Layout,
    Load,
    Reach,
    decode_step,
    host_seconds,
    step,
)
from bench.record import record
from bench.shapes import shape
from runtime.models.config.moe_config import MoeConfig


class Reference(Struct, frozen=True, kw_only=True):
    """A published configuration. Sequences in flight are throughput times TPOT (Little, 1961); where prefill
    and decode are on different servers, half of the cards decode."""

    model: str
    cards: int
    decode_cards: int
    prompt: int
    output: int
    layout: Layout
    tpot_ms: float  # published
    card_tokens_s: float  # published, over all cards
    drafts: int  # of each sequence in a step, by the published recipe
    lacks: str = ""  # what of the published setting this runtime cannot do; empty: nothing

    @property
    def in_flight(self) -> float:
        """Sequences in flight."""
        return max(1.0, self.card_tokens_s * self.cards * self.tpot_ms / 1000)


HALVES = "a split server has one node each, so 16 dies"
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
        drafts=2,
        lacks=HALVES,
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
        drafts=3,
        lacks=HALVES,
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
        drafts=3,
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
        drafts=3,
        lacks=HALVES,
        card_tokens_s=14.74,
        layout=Layout(attention_ranks=4, expert_ranks=32, sparse_tokens=2048, **_INT8),
    ),
    Reference(
        model="qwen3-235b-a22b",
        cards=8,
        decode_cards=8,
        prompt=11000,
        output=1000,
        tpot_ms=9.70,
        drafts=4,
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
        drafts=4,
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
        drafts=4,
        card_tokens_s=25.9,
        layout=Layout(attention_ranks=8),
    ),
)


def decode_load(reference: Reference, queries: int = 1) -> Load:
    """The decode step of one die: its share of the sequences, or all of them where dies share their heads.
    `queries`: tokens of each sequence."""
    groups = 2 * reference.decode_cards / reference.layout.attention_ranks
    return Load(
        tokens=max(1.0, reference.in_flight / groups) * queries,
        context=reference.prompt + reference.output / 2,
        queries=queries,
    )


def seconds(reference: Reference, die: Die, reach: Reach, queries: int = 1) -> float:
    """A decode step on one die, or one in which each sequence verifies `queries` - 1 drafts of a head of one
    layer: the device's operators, or what the host does for them, if that takes longer."""
    model, layout = shape(reference.model), reference.layout
    load = decode_load(reference, queries)
    on_device = sum(operator.seconds(die, reach) for operator in decode_step(model, layout, load))
    if queries > 1:
        head = structs.replace(model, num_layers=1, moe=None if model.moe is None else last_layer(model.moe))
        each = decode_step(head, layout, decode_load(reference))
        on_device += (queries - 1) * sum(operator.seconds(die, reach) for operator in each)
    return max(on_device, host_seconds(model, layout, reach))


def last_layer(moe: MoeConfig) -> MoeConfig:
    """The experts of a model of the last layer alone."""
    return structs.replace(moe, layers=moe.layers[-1:])


def predict(reference: Reference, die: Die, reach: Reach) -> dict[str, Any]:
    """A row of the table: predicted and published times of one configuration."""
    model, load = shape(reference.model), decode_load(reference)
    decode = decode_step(model, reference.layout, load)
    prompt = Load(tokens=reference.prompt, context=reference.prompt / 2, is_prompt=True)
    step_ms = 1000 * seconds(reference, die, reach)
    verify_ms = 1000 * seconds(reference, die, reach, 1 + reference.drafts)
    by_kind = {
        kind: 1000 * sum(o.seconds(die, reach) for o in decode if o.kind == kind) for kind in get_args(Kind)
    }
    prompt_ms = round(
        1000 * sum(operator.seconds(die, reach) for operator in step(model, reference.layout, prompt)), 1
    )
    return {
        "model": reference.model,
        "prompt": reference.prompt,
        "output": reference.output,
        "dies": 2 * reference.decode_cards,
        "sequences_a_die": round(load.tokens, 1),
        "bits": int(8 * reference.layout.expert_bytes),
        "bound_ms": round(1000 * seconds(reference, die, PEAK), 2),
        "step_ms": round(step_ms, 2),
        **{f"{kind}_ms": round(value, 2) for kind, value in by_kind.items()},
        "host_ms": round(1000 * host_seconds(model, reference.layout, reach), 2),
        "launches": round(sum(operator.count for operator in decode)),
        "a2_step_ms": round(1000 * seconds(reference, A2, reach), 2),
        "published_tpot_ms": reference.tpot_ms,
        "drafts": reference.drafts,
        "verify_ms": round(verify_ms, 2),
        # tokens that a verify step must bring on average for the published time; at most 1 + drafts
        "tokens_needed": round(verify_ms / reference.tpot_ms, 2),
        "lacks": reference.lacks,
        # sparse prompts are not modelled
        "prompt_ms": prompt_ms if reference.layout.sparse_tokens is None else None,
    }


COLUMNS = (  # key of a row, heading, width
    ("model", "model", 16),
    ("prompt", "in", 6),
    ("output", "out", 5),
    ("dies", "dies", 5),
    ("bits", "bits", 5),
    ("sequences_a_die", "seqs", 6),
    ("bound_ms", "at peak", 8),
    ("step_ms", "step ms", 8),
    ("matrix_ms", "matrix", 7),
    ("attention_ms", "attention", 10),
    ("vector_ms", "vector", 7),
    ("exchange_ms", "exchange", 9),
    ("host_ms", "host", 6),
    ("launches", "launches", 9),
    ("drafts", "drafts", 7),
    ("verify_ms", "verify ms", 10),
    ("published_tpot_ms", "published", 10),
    ("tokens_needed", "needs", 6),
    ("prompt_ms", "prompt ms", 10),
    ("a2_step_ms", "on A2", 7),
)


def show(row: dict[str, Any]) -> str:
    """A row as a line of the table."""
    return "".join(f"{'-' if row[key] is None else row[key]:>{width}}" for key, _, width in COLUMNS)


def main() -> None:
    """Prints the table and records it."""
    parser = argparse.ArgumentParser(description="decode and prompt steps on Ascend, on paper")
    parser.add_argument("--operators", action="store_true", help="each operator of each decode step")
    operators = parser.parse_args().operators
    reach = Reach()
    rows = [predict(reference, A3, reach) for reference in REFERENCES]
    print(
        "a model of A3 dies, no measurement; published figures include drafts, scheduling and HTTP, "
        "and prompts between decodes"
    )
    print("".join(f"{heading:>{width}}" for _, heading, width in COLUMNS))
    for row in rows:
        print(show(row))
    if operators:
        for reference in REFERENCES:
            print(f"\n{reference.model} {reference.prompt}+{reference.output}: one decode step of one die")
            for operator in decode_step(shape(reference.model), reference.layout, decode_load(reference)):
                print(
                    f"  {operator.name:40} {operator.count:>6.0f} x {operator.num_bytes / 1e6:>9.2f} MB "
                    f"{operator.num_ops / 1e9:>9.2f} Gop {operator.seconds(A3, reach) / MICRO:>9.0f} us"
                )
    record(
        "ascend_model",
        {
            "is_measured": False,
            "cards": [asdict(die) for die in (A3, A2)],
            "reach": asdict(reach),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
