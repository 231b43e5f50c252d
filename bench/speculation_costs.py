"""What speculation costs where nothing can be predicted: two engines answer in turns, one of them with NGRAM.

    python -m bench.speculation_costs [--rounds 20] [--batches 1 8 32 64] [--devices null cpu]

    null  no model: tokens cost the event loop alone. Answers are letters of which none comes twice, and past
          texts are made those of another namespace before each turn, so that nothing is found
    cpu   pocket in float32 with one thread, sampled at a temperature at which letters follow no text: ends of
          texts are found, and what followed them is wrong

The bound is 3 % of the CPU time of server and rank; what else the machine does changes tokens a second.
"""

import argparse
from functools import partial
from random import Random
from secrets import token_bytes
from statistics import median
from typing import Any

import anyio

from bench.record import record
from bench.speculation import Turn, answers
from runtime import Engine
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


async def measure(devices: list[str], batches: list[int], rounds: int) -> dict[str, Any]:
    """All batches on all devices."""
    found: dict[str, Any] = {}
    for device in devices:
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
    parser.add_argument("--devices", choices=tuple(DEVICES), nargs="+", default=list(DEVICES))
    given = parser.parse_args()
    results = anyio.run(partial(measure, given.devices, given.batches, given.rounds))
    print(record("speculation_costs", results))


if __name__ == "__main__":
    main()
