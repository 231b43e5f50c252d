"""What decode and prompt steps should take on Ascend A2 and A3, on paper: a model, not a measurement.

    python -m bench.ascend_model              a table of reference configurations, with published figures
    python -m bench.ascend_model --operators  operators of each step: count, bytes, operations, time

An operator takes the longest of: its bytes over the memory's bandwidth, its multiplications over the peak,
and the least time that any operator takes in a graph. Collectives take a latency and their bytes over the
links. Operators run one after another: what the real device overlaps (copies with computing, shared with
routed experts) is not counted, and neither is what it does worse than `Reach` assumes.

Peaks: Zuo et al., Serving Large Language Models on Huawei CloudMatrix384 (arXiv 2506.12708) for a die of the
910C (A3: two dies a card); public data sheets of the Atlas 800I A2 for the 910B. Published figures: SGLang's
best-practice page for Ascend, as of 2026.
"""

import argparse
from typing import Any, get_args

from msgspec import Struct
from msgspec.structs import asdict

from bench.ascend_operators import A2, A3, MICRO, Die, Kind, Layout, Load, Reach, step
from bench.record import record
from bench.shapes import shape


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

    @property
    def in_flight(self) -> float:
        """Sequences in flight."""
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
        layout=Layout(attention_ranks=4, expert_ranks=32, sparse_tokens=2048, **_INT8),
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
    """The decode step of one die: its share of the sequences, or all of them where dies share their heads."""
    groups = 2 * reference.decode_cards / reference.layout.attention_ranks
    return Load(
        tokens=max(1.0, reference.in_flight / groups), context=reference.prompt + reference.output / 2
    )


def predict(reference: Reference, die: Die, reach: Reach) -> dict[str, Any]:
    """A row of the table: predicted and published times of one configuration."""
    model, load = shape(reference.model), decode_load(reference)
    decode = list(step(model, reference.layout, load))
    prompt = Load(tokens=reference.prompt, context=reference.prompt / 2, is_prompt=True)
    step_ms = 1000 * sum(operator.seconds(die, reach) for operator in decode)
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
        "step_ms": round(step_ms, 2),
        **{f"{kind}_ms": round(value, 2) for kind, value in by_kind.items()},
        "launches": round(sum(operator.count for operator in decode)),
        "a2_step_ms": round(1000 * sum(operator.seconds(A2, reach) for operator in decode), 2),
        "published_tpot_ms": reference.tpot_ms,
        "published_over_step": round(reference.tpot_ms / step_ms, 2),
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
        "a model of A3 dies, no measurement; published figures include speculation, scheduling and HTTP, "
        "and prompts between decodes"
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
            "cards": [asdict(die) for die in (A3, A2)],
            "reach": asdict(reach),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
