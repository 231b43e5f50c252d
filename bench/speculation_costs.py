"""What speculation costs where nothing can be predicted: two engines answer in turns, one of them with NGRAM.

    python -m bench.speculation_costs [--rounds 20] [--batches 1 8 32 64] [--devices loop null cpu]

    loop  plan and apply of a scheduler alone, CPU time of its thread; answers are of 200 random tokens, and
          steps are said to take 20 µs
    null  no model: tokens cost the event loop alone. Answers are letters of which none comes twice, and past
          texts are made those of another namespace before each turn, so that nothing is found
    cpu   pocket in float32 with one thread, sampled at a temperature at which letters follow no text: ends of
          texts are found, and what followed them is wrong

The bound is 3 % of the CPU time of server and rank; what else the machine does changes tokens a second.
"""

import argparse
import time
from functools import partial
from random import Random
from secrets import token_bytes
from statistics import median
from typing import Any

import anyio
import numpy as np

from bench.record import record
from bench.scheduler import NO_FLOATS, scheduler
from bench.speculation import OPTIONS, Turn, answers
from runtime import Engine
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import StepResult
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.speculation.ngram import NgramDrafter

LETTERS = 25  # of 26 that the null device answers in order
POCKET_TOKENS = 60
DEVICES: dict[str, dict[str, Any]] = {
    "null": {"device": "null"},
    "cpu": {"model_path": "pocket", "num_threads": 1, "dtype": "float32"},
}


def forget(engine: Engine) -> None:
    """Past texts are of other namespaces, if the engine remembers any: memory that a corpus has touched is
    not touched for the first time again."""
    scheduler = engine._core.replicas[0].scheduler
    assert scheduler is not None
    if isinstance(drafter := scheduler.planner.drafts.drafter, NgramDrafter):
        drafter.corpus._key = token_bytes(16)
        drafter.corpus.owner.cache_clear()


async def turn(engine: Engine, device: str, prompts: list[str], seed: int) -> Turn:
    """Answers to all prompts at once."""
    if device == "null":
        forget(engine)
        return await answers(engine, prompts, LETTERS)
    return await answers(engine, prompts, POCKET_TOKENS, temperature=3.0, seed=seed)


async def compared(engines: list[Engine], device: str, batch: int, rounds: int) -> dict[str, float]:
    """Medians over the turns of both engines; times: of the CPU time and of the seconds without drafts."""
    random, measured = Random(batch), tuple[list[Turn], list[Turn]](([], []))
    for number in range(rounds + 1):
        prompts = [f"{random.randrange(10**9)}" for _ in range(batch)]
        for index in (0, 1) if number % 2 else (1, 0):
            measured[index].append(await turn(engines[index], device, prompts, number))
    plain, drafted = (turns[1:] for turns in measured)
    drafts = sum(one.drafts for one in drafted)
    tokens = batch * (LETTERS if device == "null" else POCKET_TOKENS)
    pairs = list(zip(plain, drafted, strict=True))
    return {
        "tokens_per_s": round(tokens / median([one.seconds for one in plain])),
        "tokens_per_s_ngram": round(tokens / median([one.seconds for one in drafted])),
        "cpu_times": round(sum(one.cpu_s for one in drafted) / sum(one.cpu_s for one in plain), 3),
        "cpu_times_median": round(median([two.cpu_s / one.cpu_s for one, two in pairs]), 3),
        "steps": sum(one.steps for one in plain),
        "steps_ngram": sum(one.steps for one in drafted),
        "drafts_per_token": round(drafts / (tokens * rounds), 3),
    }


def planned(it: Scheduler, batch: int, random: Random, tokens: int = 200) -> tuple[float, int]:
    """`batch` answers of random tokens, no draft of which is right. -> CPU seconds of plan and apply,
    steps"""
    for number in range(batch):
        prompt = [random.randrange(5000) for _ in range(32)]
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        it.add(
            Request(id=f"{random.random()}-{number}", prompt_ids=prompt, params=params, seed=0, arrival_s=0)
        )
    used, steps = 0.0, 0
    while True:
        begin = time.thread_time()
        plan = it.plan()
        used += time.thread_time() - begin
        if plan is None:
            return used, steps
        rows = np.array([random.randrange(5000) for _ in range(np.count_nonzero(plan.samples))], np.int32)
        counts = np.ones(len(rows), np.int32) if plan.num_verifies else None
        floats = (NO_FLOATS, NO_FLOATS, NO_FLOATS)
        result = StepResult(plan.step, rows, -1, *floats, [], 20e-6, num_tokens=counts)
        begin = time.thread_time()
        it.apply(result)
        used += time.thread_time() - begin
        steps += 1


def looped(batch: int, rounds: int) -> dict[str, float]:
    """Two schedulers in turns, one of them with NGRAM."""
    schedulers = [scheduler(64), scheduler(64, drafter=NgramDrafter(OPTIONS, has_trees=False))]
    measured: tuple[list[tuple[float, int]], ...] = ([], [])
    for number in range(rounds + 3):
        for index in (0, 1) if number % 2 else (1, 0):
            measured[index].append(planned(schedulers[index], batch, Random(number)))
    plain, drafted = (turns[3:] for turns in measured)
    us = [sum(one[0] for one in turns) / sum(one[1] for one in turns) * 1e6 for turns in (plain, drafted)]
    ratios = [two[0] / one[0] for one, two in zip(plain, drafted, strict=True)]
    return {
        "step_us": round(us[0], 1),
        "step_us_ngram": round(us[1], 1),
        "cpu_times": round(us[1] / us[0], 3),
        "cpu_times_median": round(median(ratios), 3),
    }


async def measure(devices: list[str], batches: list[int], rounds: int) -> dict[str, Any]:
    """All batches on all devices."""
    found: dict[str, Any] = {}
    for batch in batches if "loop" in devices else ():
        name = f"loop, batch {batch}"
        found[name] = looped(batch, rounds)
        print(f"{name:16}", found[name], flush=True)
    for device in [device for device in devices if device != "loop"]:
        common = {**DEVICES[device], "disable_radix_cache": True}
        async with Engine(**common) as plain, Engine(**common, speculative_algorithm="NGRAM") as drafted:
            for batch in batches:
                name = f"{device}, batch {batch}"
                found[name] = await compared([plain, drafted], device, batch, rounds)
                print(f"{name:16}", found[name], flush=True)
    return found


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--devices", choices=("loop", *DEVICES), nargs="+", default=["loop", *DEVICES])
    given = parser.parse_args()
    results = anyio.run(partial(measure, given.devices, given.batches, given.rounds))
    print(record("speculation_costs", results))


if __name__ == "__main__":
    main()
