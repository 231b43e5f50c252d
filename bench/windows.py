"""The gain of separate pages for sliding-window layers: how much fits into the same memory, on a trace of
long prompts.

    python -m bench.windows

Shapes are those of known mixes of layers; memory is 100,000 tokens in all layers. The scheduler is the real
one, the device a formula (see bench/simulation.py). The figures compare pools with one another on one trace;
they are no forecast for a machine.
"""

from random import Random
from typing import Any

from msgspec import Struct

from bench.record import record
from bench.simulation import Device, Visit, seconds
from runtime.cache.kv import CacheConfig
from runtime.cache.pool_sizes import MemoryBudget, Pools, divide_memory, least_pages
from runtime.cache.window import WindowConfig
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.scheduling.admission import Admission
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE, CHUNK, MAX_RUNNING, CONTEXT = 16, 2048, 64, 131_072
MEMORY_TOKENS = 100_000  # of keys and values in all layers


class Shape(Struct, frozen=True):
    """Numbers of layers of a model, and the window of its sliding ones."""

    name: str
    full: int
    sliding: int
    window: int


SHAPES = (
    Shape("1 of 2 slides, 128", 1, 1, 128),
    Shape("5 of 6 slide, 1024", 1, 5, 1024),
    Shape("all slide, 4096", 0, 1, 4096),
)


def trace(count: int) -> list[Visit]:
    """Questions about 12 documents of up to 30,000 tokens."""
    random = Random(1)
    documents = [
        [random.randrange(10, 50_000) for _ in range(random.randrange(4_000, 30_000))] for _ in range(12)
    ]
    visits = []
    for number in range(count):
        own = [random.randrange(10, 50_000) for _ in range(random.randrange(20, 300))]
        output = min(int(random.expovariate(1 / 200)) + 1, 1024)
        request = Request(
            id=str(number),
            prompt_ids=random.choice(documents) + own,
            seed=0,
            arrival_s=0,
            params=SamplingParams(max_new_tokens=1024, stop_token_ids=(1,)),
        )
        visits.append(Visit(request, output, False))
    return visits


def pools(shape: Shape, ratio: float) -> Pools:
    """Pages of both pools in the memory of MEMORY_TOKENS; ratio 0: one pool."""
    return divide_memory(
        MemoryBudget(
            num_bytes=MEMORY_TOKENS * (shape.full + shape.sliding),
            full_page_bytes=PAGE_SIZE * shape.full,
            window_page_bytes=PAGE_SIZE * shape.sliding,
            most=MAX_RUNNING * CONTEXT // PAGE_SIZE,
            longest=CONTEXT // PAGE_SIZE,
            ratio=ratio,
            least=least_pages(shape.window, PAGE_SIZE, CHUNK),
        )
    )


def run(shape: Shape, ratio: float, visits: list[Visit]) -> dict[str, Any]:
    """Figures of a trace with one shape and ratio."""
    sizes = pools(shape, ratio)
    window = WindowConfig(
        num_pages=sizes.window + 1 if sizes.window else 0, window=shape.window, step_tokens=CHUNK
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_running=MAX_RUNNING,
            max_step_tokens=CHUNK,
            max_len=CONTEXT,
            page_size=PAGE_SIZE,
            num_pages=sizes.full + 1,
            eos_ids=(),
            cache=CacheConfig(window=window),
            admission=Admission(max_step_tokens=CHUNK),
        )
    )
    device = Device(visits)
    for visit in visits:
        scheduler.add(visit.request)
    now_s, running = 0.0, []
    while scheduler.roster.live:
        plan = scheduler.plan()
        assert plan is not None
        now_s += seconds(plan)
        running.append(scheduler.roster.num_running)
        scheduler.apply(device.run(plan, [sequence.id for sequence in scheduler.flights[0].sampled]))
    totals = scheduler.totals
    return {
        "shape": shape.name,
        "ratio": ratio,
        "longest_tokens": min(CONTEXT, sizes.full * PAGE_SIZE),
        "window_tokens": sizes.window * PAGE_SIZE,
        "running_mean": round(sum(running) / len(running), 1),
        "running_max": max(running),
        "hit_rate": round(totals.cached_tokens / totals.prompt_tokens, 3),
        "preemptions": totals.preemptions,
        "tokens_per_s": round(sum(visit.output for visit in visits) / now_s),
    }


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    visits = trace(150)
    rows = [
        run(shape, ratio, visits)
        for shape in SHAPES
        for ratio in ((0.0, 0.8, 0.2) if shape.full else (0.0, 0.8))
    ]
    for row in rows:
        print("|", " | ".join(str(value) for value in row.values()), "|", flush=True)
    record("windows", {"memory_tokens": MEMORY_TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
