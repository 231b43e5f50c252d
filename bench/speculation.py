"""What speculation by n-grams brings and costs: on the event loop, and on the cpu device with a model.

    python -m bench.speculation [--model-path pocket] [--tokens 200] [--rounds 5] [--only planning|serving]

Planning: microseconds of CPU time for plan and apply of a step of 64 sequences that decode, without a
drafter, with one that finds nothing, with one whose drafts are all accepted, and with 4 drafts of a draft
model for each sequence. The bound of the second one is 1.3 times a decode step; of the others, 1.3 times its
time for each token that they bring.
Serving: tokens a second of two engines that answer in turns, one of them with NGRAM, and the CPU time of
server and rank, which others on the machine change less.
The bounds are 1.5 times on repetitive text, and 0.97 times elsewhere.
"""

import argparse
import time
from functools import partial
from random import Random
from statistics import median
from typing import Any

import anyio
import numpy as np
from msgspec import Struct

from bench.record import record
from bench.scheduler import NO_FLOATS, add, scheduler
from runtime import Engine
from runtime.messages.speculation import Ngram, Speculation
from runtime.messages.steps import OWN_DRAFT, Samples, StepPlan, StepResult
from runtime.metrics.table import process_usage
from runtime.scheduling.drafts import Drafter
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.speculation.ngram import NgramDrafter
from runtime.scheduling.speculation.own import OwnDrafter

OPTIONS = Speculation(algorithm="NGRAM", num_steps=0, topk=10, num_draft_tokens=12, ngram=Ngram())
FUNCTION = """def area_of_{0}(width, height):
    if width < 0 or height < 0:
        raise ValueError("sizes are not negative")
    return width * height

"""
PERSON = '{{"name": "{0}", "age": {1}, "town": "Paris", "is_member": true}}, '
PLAIN = [
    "Once upon a time there was",
    "The weather in the mountains is",
    "My favourite book tells of",
    "A short history of bread:",
    "How do ships float?",
]
# a model as small as pocket repeats itself more than its prompt; asked again, it repeats its answer
REPETITIVE = {
    "code edit": FUNCTION.format("wall") + FUNCTION.format("roof") + "def area_of_",
    "json": "[" + "".join(PERSON.format(name, 30 + i) for i, name in enumerate(("Ann", "Bob", "Cy"))) + "{",
    "quoting": "He said: the river runs to the sea. I repeat what he said: the river runs",
}


def drafted(plan: StepPlan, random: Random | None) -> StepResult:
    """The result of a step: of rows with drafts all are accepted, others bring token 5 or a random one."""
    tokens, counts = list[int](), list[int]()
    at = 0
    for row, count in enumerate(plan.counts.tolist()):
        drafts = plan.token_ids[at : at + count - 1].tolist() if row >= plan.num_decodes else []
        at += len(drafts)
        drafts = [5 if token == OWN_DRAFT else token for token in drafts]
        is_all = plan.samples[row] == Samples.ALL
        brought = [*(drafts if is_all else []), 5 if random is None else random.randrange(5000)]
        tokens += brought
        counts.append(len(brought))
    return StepResult(
        plan.step,
        np.array(tokens, np.int32),
        -1,
        NO_FLOATS,
        NO_FLOATS,
        NO_FLOATS,
        [],
        0.01,
        num_tokens=np.array(counts, np.int32) if max(counts) > 1 else None,
    )


def steps(of: Scheduler, count: int, random: Random | None) -> dict[str, float]:
    """Median CPU microseconds of plan and apply, and the tokens of a step."""
    plans, applies, tokens = [], [], 0
    for _ in range(count):
        begin = time.thread_time()
        plan = of.plan()
        planned = time.thread_time()
        assert plan is not None
        result = drafted(plan, random)
        applied = time.thread_time()
        of.apply(result)
        plans.append(planned - begin)
        applies.append(time.thread_time() - applied)
        tokens += len(result.token_ids)
    return {
        "plan_us": round(median(plans) * 1e6, 1),
        "apply_us": round(median(applies) * 1e6, 1),
        "tokens": round(tokens / count, 1),
    }


def planning(running: int = 64) -> dict[str, Any]:
    """A step of `running` sequences."""

    def opened(drafter: Drafter | None, random: Random | None) -> Scheduler:
        it = scheduler(running, drafter=drafter)
        add(it, running)
        plan = it.plan()
        assert plan is not None
        first = StepResult(
            plan.step, np.full(running, 5, np.int32), -1, NO_FLOATS, NO_FLOATS, NO_FLOATS, [], 0.01
        )
        it.apply(first)
        steps(it, 40, random)
        return it

    found: dict[str, Any] = {}
    kinds = {
        "decode": opened(None, Random(1)),
        "nothing found": opened(NgramDrafter(OPTIONS, has_trees=False), Random(1)),
        "accepted": opened(NgramDrafter(OPTIONS, has_trees=False), None),
        "own drafts": opened(OwnDrafter(4), None),
    }
    randoms = dict(zip(kinds, (Random(2), Random(2), None, None), strict=True))
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(7):  # in turns, as others use the machine
        for name, it in kinds.items():
            parts[name].append(steps(it, 30, randoms[name]))
    for name, measured in parts.items():
        found[name] = {key: median(one[key] for one in measured) for key in measured[0]}
        print(f"{name:14}", found[name])
    base = found["decode"]["plan_us"] + found["decode"]["apply_us"]
    for name in ("nothing found", "accepted", "own drafts"):
        cost = found[name]["plan_us"] + found[name]["apply_us"]
        found[name]["times_a_decode_step"] = round(cost / base, 2)
        found[name]["times_for_each_token"] = round(cost / base * running / found[name]["tokens"], 2)
        print(f"{name:14}", found[name])
    return found


class Turn(Struct):
    """What some answers took."""

    seconds: float
    cpu_s: float  # of this process and of the ranks
    steps: int
    drafts: int  # tokens


async def answers(
    engine: Engine, prompts: list[str], tokens: int, *, temperature: float = 0.0, seed: int = 0
) -> Turn:
    """Answers to all prompts at once, greedy ones by default."""
    replica = engine._core.replicas[0]
    assert replica.scheduler is not None and replica.supervisor.ranks is not None

    def used() -> float:
        ranks = [process_usage(pid) for pid in replica.supervisor.ranks.pids]
        return time.process_time() + sum(usage[1] for usage in ranks if usage is not None)

    totals = replica.scheduler.totals
    before, drafts = replica.num_steps, totals.drafted_tokens
    cpu, begin = used(), time.perf_counter()
    params = {"max_new_tokens": tokens, "temperature": temperature, "seed": seed, "ignore_eos": True}
    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(partial(engine.generate, prompt, **params))
    return Turn(
        time.perf_counter() - begin, used() - cpu, replica.num_steps - before, totals.drafted_tokens - drafts
    )


async def compare(engines: list[Engine], turns: list[list[str]], tokens: int) -> dict[str, float]:
    """Each list of prompts is answered by both engines. -> medians; `times` of the second one's speed"""
    measured: list[list[Turn]] = [[], []]
    for number, prompts in enumerate(turns):
        for index in (0, 1) if number % 2 else (1, 0):
            measured[index].append(await answers(engines[index], prompts, tokens))
    plain, ngram = measured
    count = tokens * len(turns[0])
    return {
        "tokens_per_s": round(count / median([turn.seconds for turn in plain])),
        "tokens_per_s_ngram": round(count / median([turn.seconds for turn in ngram])),
        "times": round(median([a.seconds / b.seconds for a, b in zip(plain, ngram, strict=True)]), 2),
        "times_cpu": round(sum(turn.cpu_s for turn in plain) / sum(turn.cpu_s for turn in ngram), 2),
        "steps": median([turn.steps for turn in plain]),
        "steps_ngram": median([turn.steps for turn in ngram]),
    }


async def serving(model: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of two engines, one of them with drafts, by kind of text."""
    common: dict[str, Any] = {"model_path": model, "num_threads": 1, "disable_radix_cache": True}
    found: dict[str, Any] = {}
    numbers = range(rounds)
    kinds = {
        f"{name}, {when}": [[f"{i} {text}" if when == "first time" else text] for i in numbers]
        for name, text in REPETITIVE.items()
        for when in ("first time", "again")
    } | {
        "plain": [[f"{i}. {PLAIN[i % len(PLAIN)]}"] for i in numbers],
        "plain, 16 at once": [[f"{i} {k}. {PLAIN[k % len(PLAIN)]}" for k in range(16)] for i in numbers],
    }
    async with Engine(**common) as plain, Engine(**common, speculative_algorithm="NGRAM") as ngram:
        for engine in (plain, ngram):
            for prompt in (*PLAIN, *REPETITIVE.values()):
                await answers(engine, [prompt], tokens)
        for name, turns in kinds.items():
            found[name] = await compare([plain, ngram], turns, tokens)
            print(f"{name:24}", found[name])
    return found


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", default="pocket")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("planning", "serving"))
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if given.only != "serving":
        results["planning"] = planning()
    if given.only != "planning":
        results["serving"] = anyio.run(serving, given.model_path, given.tokens, given.rounds)
    if given.only is None:
        print(record("speculation", results))


if __name__ == "__main__":
    main()
