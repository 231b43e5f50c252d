"""Schedule policies compared: the same trace under every policy, on a model of a device.

    python -m bench.simulation [--requests 2500]

Requests come at random times and begin with one of many prefixes, whose popularity is Zipf's. The scheduler
is the real one; the device is a formula: a step takes a constant time, and more for each decode row, each
prompt token and each position that is attended to. The figures compare policies with one another on one
trace; they are no forecast for a machine. Writes docs/scheduling.svg.
"""

import argparse
from collections.abc import Sequence as Many
from pathlib import Path
from random import Random

import numpy as np
from msgspec import Struct

from bench.record import record
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import StepPlan, StepResult
from runtime.scheduling.admission import Admission
from runtime.scheduling.order import POLICIES
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from runtime.scheduling.waiting import OrderConfig

PICTURE = Path(__file__).parents[1] / "docs" / "scheduling.svg"
PAGE_SIZE = 16
NUM_PAGES = 8_000  # 128,000 tokens: about a third of the prefixes, when nothing runs
FEW_PAGES = 2_000  # where what running sequences will want decides how many run
MAX_RUNNING = 64
CHUNK = 2048
PREFIXES = 250
ZIPF = 1.0
# requests a second on average: more than it can take in one half of each minute, few in the other
RATE = 26.0
RUSH = 1.7  # of the rate, in the busy half
MEAN_OUTPUT = 120
ALLOWED = 1024
STEP_S, DECODE_S, TOKEN_S, ATTENDED_S = 6e-3, 20e-6, 25e-6, 1e-9
STOP, GO = 1, 2  # token ids
NO_FLOATS = np.zeros(0, dtype=np.float32)


class Visit(Struct, frozen=True):
    """One request of the trace, and how many tokens its answer will have."""

    request: Request
    output: int
    is_urgent: bool


def trace(count: int, seed: int = 1) -> list[Visit]:
    """Requests at random times, each with one of many prefixes."""
    random = Random(seed)
    prefixes = [
        [random.randrange(10, 50_000) for _ in range(random.randrange(400, 2800))] for _ in range(PREFIXES)
    ]
    weights = [1 / (rank + 1) ** ZIPF for rank in range(PREFIXES)]
    random.shuffle(prefixes)
    now_s, visits = 0.0, []
    for number in range(count):
        now_s += random.expovariate(RATE * (RUSH if now_s % 60 < 30 else 2 - RUSH))
        (topic,) = random.choices(range(PREFIXES), weights)
        own = [random.randrange(10, 50_000) for _ in range(random.randrange(20, 300))]
        output = min(int(random.expovariate(1 / MEAN_OUTPUT)) + 1, ALLOWED)
        is_urgent = random.random() < 0.1
        tenant = "light" if random.random() < 0.1 else "heavy"
        params = SamplingParams(
            max_new_tokens=random.choice([256, ALLOWED]) if output < 256 else ALLOWED, stop_token_ids=(STOP,)
        )
        visits.append(
            Visit(
                Request(
                    id=str(number),
                    prompt_ids=prefixes[topic] + own,
                    params=params,
                    seed=0,
                    arrival_s=now_s,
                    priority=20 if is_urgent else 0,
                    tenant=tenant,
                    routing_key=str(topic),
                ),
                output,
                is_urgent,
            )
        )
    return visits


class Lengths:
    """Lengths of slots, as ranks keep them."""

    def __init__(self) -> None:
        self.lengths = np.zeros(MAX_RUNNING, np.int64)

    def starts(self, plan: StepPlan) -> np.ndarray:
        """Where the plan's rows begin; the slots move on."""
        for admit in plan.admits:
            self.lengths[admit.slot] = admit.length
        starts = self.lengths[plan.slots]
        self.lengths[plan.slots] += plan.counts
        return starts


def seconds(plan: StepPlan, starts: np.ndarray) -> float:
    """The time that the modelled device takes for a step whose rows begin at `starts`."""
    counts = plan.counts.astype(float)
    extends = float(plan.counts[plan.num_decodes :].sum())
    return (
        STEP_S
        + DECODE_S * plan.num_decodes
        + TOKEN_S * extends
        + ATTENDED_S * float((counts * (starts + counts / 2)).sum())
    )


class Device:
    """A device that ends each answer at the length of the trace."""

    def __init__(self, visits: Many[Visit]) -> None:
        self.left = {number: visit.output for number, visit in enumerate(visits)}  # by sequence id

    def run(self, plan: StepPlan, sampled: Many[int]) -> StepResult:
        """The result of a step: one token for each sampled sequence."""
        tokens = []
        for sequence_id in sampled:
            self.left[sequence_id] -= 1
            tokens.append(GO if self.left[sequence_id] else STOP)
        return StepResult(
            plan.step, np.array(tokens, dtype=np.int32), -1, NO_FLOATS, NO_FLOATS, NO_FLOATS, [], 0.0
        )


def simulate(
    visits: list[Visit], order: OrderConfig, *, conservativeness: float = 1.0, num_pages: int = NUM_PAGES
) -> dict[str, float]:
    """Figures of one trace under one order of the queue."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_running=MAX_RUNNING,
            max_step_tokens=CHUNK,
            max_len=8192,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            eos_ids=(),
            order=order,
            admission=Admission(max_step_tokens=CHUNK),
            conservativeness=conservativeness,
        )
    )
    device, lengths = Device(visits), Lengths()
    now_s, next_visit, first_s = 0.0, 0, {}
    while next_visit < len(visits) or scheduler.roster.live:
        while next_visit < len(visits) and visits[next_visit].request.arrival_s <= now_s:
            scheduler.add(visits[next_visit].request)
            next_visit += 1
        plan = scheduler.plan()
        if plan is None:
            now_s = visits[next_visit].request.arrival_s
            continue
        now_s += seconds(plan, lengths.starts(plan))
        sampled = [sequence.id for sequence in scheduler.flights[0].sampled]
        for i in sampled:
            first_s.setdefault(i, now_s)
        scheduler.apply(device.run(plan, sampled))
    ttft = [first_s[i] - visit.request.arrival_s for i, visit in enumerate(visits)]
    totals = scheduler.totals
    return {
        "hit_rate": round(totals.cached_tokens / totals.prompt_tokens, 3),
        "ttft_p50_s": quantile(ttft, 0.5),
        "ttft_p99_s": quantile(ttft, 0.99),
        "urgent_ttft_p99_s": quantile(
            [t for t, visit in zip(ttft, visits, strict=True) if visit.is_urgent], 0.99
        ),
        "light_ttft_p50_s": quantile(
            [t for t, visit in zip(ttft, visits, strict=True) if visit.request.tenant == "light"], 0.5
        ),
        "tokens_per_s": round(sum(visit.output for visit in visits) / now_s),
        "preemptions": totals.preemptions,
        "aged": scheduler.roster.waiting.num_aged,
    }


def quantile(values: list[float], part: float) -> float:
    """The value below which a part of the values lies."""
    return round(sorted(values)[int(len(values) * part)], 3)


def picture(rows: dict[str, dict[str, float]]) -> str:
    """One panel a figure, one bar a policy."""
    panels = [
        ("hit_rate", "prefix hits", 100, "%"),
        ("ttft_p50_s", "first token, median", 1, " s"),
        ("ttft_p99_s", "first token, p99", 1, " s"),
        ("tokens_per_s", "tokens a second", 1, ""),
    ]
    height, width, left = 26 * len(rows) + 40, 190, 118
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width * len(panels)}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
    ]
    for line, name in enumerate(rows):
        parts.append(
            f'<text x="{left - 8}" y="{26 * line + 50}" text-anchor="end" fill="#222222">{name}</text>'
        )
    for column, (field, title, scale, unit) in enumerate(panels):
        x = left + column * width
        most = max(row[field] for row in rows.values()) or 1
        parts.append(f'<text x="{x}" y="20" font-weight="bold" fill="#222222">{title}</text>')
        for line, row in enumerate(rows.values()):
            length = 110 * row[field] / most
            value = f"{row[field] * scale:,.0f}" if scale > 1 or most > 100 else f"{row[field]:.2f}"
            parts.append(
                f'<rect x="{x}" y="{26 * line + 36}" width="{length:.1f}" height="18" fill="#4477aa"/>'
                f'<text x="{x + length + 5:.1f}" y="{26 * line + 50}" fill="#222222">{value}{unit}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2500)
    args = parser.parse_args()
    visits = trace(args.requests)
    runs = {name: OrderConfig(policy=name, has_priorities=name == "priority") for name in POLICIES}
    runs["fcfs, fair share"] = OrderConfig(fair=True)
    rows: dict[str, dict[str, float]] = {}
    for name, order in runs.items():
        rows[name] = simulate(visits, order)
        print(f"| {name} |", " | ".join(str(value) for value in rows[name].values()), "|", flush=True)
    tight = {
        f"{c:g}": simulate(visits, OrderConfig(), conservativeness=c, num_pages=FEW_PAGES)
        for c in (0.0, 0.3, 1.0, 2.0)
    }
    for name, row in tight.items():
        print(
            f"| fcfs, few pages, conservativeness {name} |",
            " | ".join(map(str, row.values())),
            "|",
            flush=True,
        )
    PICTURE.write_text(picture(rows))
    record(
        "simulation", {"requests": args.requests, "policies": rows, "few_pages_by_conservativeness": tight}
    )


if __name__ == "__main__":
    main()
