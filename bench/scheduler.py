"""What planning costs on the event loop, without ranks: median microseconds over many steps.

    python -m bench.scheduler

Bounds: 100 µs for a plan at 64 and 300 µs at 512 running sequences that decode, with 10,000 waiting or none;
1 ms for the prefix of a prompt of 32,768 tokens in pages of 16; 100,000 cached pages slow no step, nor does a
host tier.
"""

import os
import time
from array import array
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from bench.record import record
from runtime.cache.audit import findings
from runtime.cache.host import WRITE_POLICIES, HostConfig
from runtime.cache.kv import CacheConfig
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import StepPlan, StepResult
from runtime.scheduling.drafts import Drafter
from runtime.scheduling.order import POLICIES
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from runtime.scheduling.waiting import OrderConfig

FOREVER = SamplingParams(max_new_tokens=100_000, ignore_eos=True)
NO_FLOATS = np.zeros(0, dtype=np.float32)
STEPS = 400


def scheduler(
    max_running: int,
    order: OrderConfig | None = None,
    *,
    num_pages: int = 200_000,
    cache: CacheConfig | None = None,
    drafter: Drafter | None = None,
) -> Scheduler:
    """A scheduler of pages of 16 tokens."""
    return Scheduler(
        SchedulerConfig(
            max_running=max_running,
            max_step_tokens=40_000,
            max_len=200_000,
            page_size=16,
            num_pages=num_pages,
            eos_ids=(),
            order=order or OrderConfig(),
            conservativeness=0.0,
            cache=cache or CacheConfig(),
        ),
        drafter=drafter,
    )


def add(into: Scheduler, count: int, *, name: str = "r", length: int = 32, **fields: Any) -> None:
    """Queues `count` requests with prompts of `length` tokens."""
    for i in range(count):
        into.add(
            Request(
                id=f"{name}{i}",
                prompt_ids=[(i * 31 + k) % 5000 for k in range(length)],
                params=FOREVER,
                seed=0,
                arrival_s=0,
                **({"tenant": str(i % 8), "priority": i % 3, "routing_key": str(i % 5)} | fields),
            )
        )


def result(plan: StepPlan) -> StepResult:
    """The result of a step: token 5 for each sampled row."""
    return StepResult(
        plan.step,
        np.full(int(plan.samples.sum()), 5, dtype=np.int32),
        -1,
        NO_FLOATS,
        NO_FLOATS,
        NO_FLOATS,
        [],
        0.0,
    )


def steps(
    of: Scheduler, count: int = STEPS, between: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """Median microseconds of plan and of apply."""
    plans, applies = [], []
    for _ in range(count):
        between()
        begin = time.perf_counter()
        plan = of.plan()
        planned = time.perf_counter()
        assert plan is not None
        back = result(plan)
        applied = time.perf_counter()
        of.apply(back)
        plans.append(planned - begin)
        applies.append(time.perf_counter() - applied)
    return round(median(plans) * 1e6, 1), round(median(applies) * 1e6, 1)


def decoding(running: int, waiting: int) -> dict[str, Any]:
    """Steps in which `running` sequences decode while `waiting` others wait."""
    it = scheduler(running)
    add(it, running + waiting)
    steps(it, 20)
    plan_us, apply_us = steps(it)
    return {"running": running, "waiting": waiting, "plan_us": plan_us, "apply_us": apply_us}


def admitting(policy: str, *, fair: bool = False, has_priorities: bool = False) -> dict[str, Any]:
    """Steps in which 63 sequences decode, 10,000 wait, one ends and one is admitted."""
    it = scheduler(64, OrderConfig(policy=policy, fair=fair, has_priorities=has_priorities))
    add(it, 10_000)
    steps(it, 20)
    plan_us, _ = steps(it, between=lambda: it.end([it.roster.decoding[0].id]))
    return {"policy": policy, "fair_share": fair, "priorities": has_priorities, "plan_us": plan_us}


def arriving(policy: str) -> dict[str, Any]:
    """Microseconds to queue one more request where 10,000 wait."""
    it = scheduler(1, OrderConfig(policy=policy))
    add(it, 10_000)
    begin = time.perf_counter()
    add(it, 500, name="late")
    return {"policy": policy, "add_us": round((time.perf_counter() - begin) / 500 * 1e6, 1)}


def prefixes() -> dict[str, Any]:
    """A long prompt against a cache that has all of it, and steps with 100,000 cached pages."""
    it = scheduler(64)
    prompt = [(i * 7919) % 30_000 for i in range(32_768)]
    it.add(
        Request(id="long", prompt_ids=prompt, params=SamplingParams(max_new_tokens=1), seed=0, arrival_s=0)
    )
    steps(it, 1)
    tokens = array("i", prompt)
    tree = it.cache.tree
    match_us = min(_timed(lambda: tree.match("", tokens, 2047)) for _ in range(50))
    node = tree.match("", tokens, 2047)
    probe_us = min(_timed(lambda: tree.probe(node, "", tokens, 2047)) for _ in range(50))
    take_us = min(_timed(lambda: (tree.lock(node), node.path(), tree.unlock(node))) for _ in range(50))
    full = scheduler(64)
    for i in range(100):
        full.add(
            Request(
                id=f"c{i}",
                prompt_ids=[i, *([1] * 16_000)],
                params=SamplingParams(max_new_tokens=1),
                seed=0,
                arrival_s=0,
            )
        )
    while full.roster.live:
        steps(full, 1)
    add(full, 64)
    steps(full, 20)
    plan_us, _ = steps(full)
    return {
        "match_32k_us": round(match_us, 1),
        "match_again_us": round(probe_us, 1),
        "lock_path_unlock_32k_us": round(take_us, 1),
        "cached_pages": full.cache.tree.num_evictable,
        "plan_us_with_them": plan_us,
    }


def tiers(write_policy: str) -> dict[str, Any]:
    """Decode steps with 20,000 pages in host memory, a prompt of 16,000 tokens that is loaded from there, and
    an audit of all pages."""
    host = HostConfig(num_pages=50_000, write_policy=write_policy)
    it = scheduler(64, num_pages=12_000, cache=CacheConfig(host=host))
    for i in range(20):
        it.add(
            Request(
                id=f"c{i}",
                prompt_ids=[i, *([1] * 16_000)],
                params=SamplingParams(max_new_tokens=1),
                seed=0,
                arrival_s=0,
            )
        )
        it.add(
            Request(
                id=f"d{i}",
                prompt_ids=[i, *([1] * 16_000)],
                params=SamplingParams(max_new_tokens=1),
                seed=0,
                arrival_s=0,
            )
        )
    while (plan := it.plan()) is not None:
        it.apply(result(plan))
    audit_ms = min(_timed(lambda: findings(it.cache)) for _ in range(3)) / 1000
    it.add(Request(id="back", prompt_ids=[0, *([1] * 16_000)], params=FOREVER, seed=0, arrival_s=0))
    begin = time.perf_counter()
    plan = it.plan()
    back_us = (time.perf_counter() - begin) * 1e6
    assert plan is not None and plan.page_copies is not None
    it.apply(result(plan))
    add(it, 63)
    steps(it, 30)
    plan_us, apply_us = steps(it)
    return {
        "write_policy": write_policy,
        "host_pages": it.cache.host.num_used,
        "plan_us": plan_us,
        "apply_us": apply_us,
        "plan_that_loads_us": round(back_us, 1),
        "pages_loaded": len(plan.page_copies.load_pages),
        "audit_ms": round(audit_ms, 1),
    }


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    results: dict[str, Any] = {"nice": os.nice(0)}
    results["decoding"] = [
        decoding(running, waiting) for running in (1, 8, 64, 256, 512) for waiting in (0, 10_000)
    ]
    results["admitting"] = [admitting(policy) for policy in POLICIES]
    results["admitting"].append(admitting("lpm", fair=True, has_priorities=True))
    results["arriving"] = [arriving(policy) for policy in POLICIES]
    results["prefixes"] = prefixes()
    results["tiers"] = [tiers(policy) for policy in WRITE_POLICIES]
    for name, rows in results.items():
        print(name, *(rows if isinstance(rows, list) else [rows]), sep="\n  ", flush=True)
    record("scheduler", results)


if __name__ == "__main__":
    main()
