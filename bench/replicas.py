"""What data parallelism costs and gains on one event loop: tokens for a second of its CPU time with 1, 2 and
4 replicas of 64 sequences each on the null device, in turns, and how evenly each method spreads a skewed
trace.

    python -m bench.replicas [--rounds 5]
"""

import argparse
import time
from random import Random
from statistics import median

import anyio
import uvloop

from bench.pipeline import NEW_TOKENS, measure
from bench.record import record
from runtime.core import Core
from runtime.messages.balance import BalanceMethod
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.scheduling.balance import METHODS, Balance

SIZES = (1, 2, 4)
SEQUENCES = 64  # of each replica
OPEN, REQUESTS = 200, 5000  # of the trace


class Idle:
    """A replica without a prefix cache, as balancing sees it."""

    is_taking = True
    answers = (0, 0)

    def cached_len(self, request: Request) -> int:
        """Nothing is cached."""
        return 0


async def tokens_per_cpu_s(replicas: int, round: int) -> float:
    """Tokens for a second of the loop's CPU time."""
    options = {"device": "null", "max_running_requests": SEQUENCES, "load_balance_method": "total_requests"}
    core = Core(plan_for(from_values({**options, "data_parallel_size": replicas})))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(core.run)
        await core.wait_ready()
        await measure(core, SEQUENCES * replicas, 99)  # warm-up
        begin = time.process_time()
        await measure(core, SEQUENCES * replicas, round)
        cpu_s = time.process_time() - begin
        tasks.cancel_scope.cancel()
    return SEQUENCES * replicas * NEW_TOKENS / cpu_s


def imbalance(method: BalanceMethod, replicas: int) -> float:
    """By how much the fullest replica exceeds an even share of the open tokens, on average (0.05: by 5 %),
    over requests with prompts of 10 to 10,000 tokens of which 200 are open at a time."""
    random, balance = Random(1), Balance(method, replicas)
    views, opened, excess = [Idle() for _ in range(replicas)], list[str](), list[float]()
    for i in range(REQUESTS):
        ids = [i % 30000] * int(10 ** random.uniform(1, 4))
        params = SamplingParams(max_new_tokens=random.randrange(1, 400))
        balance.choose(Request(id=str(i), prompt_ids=ids, params=params, seed=1, arrival_s=0.0), views)
        opened.append(str(i))
        if len(opened) > OPEN:
            balance.close(opened.pop(random.randrange(OPEN)))
            tokens = [held.tokens for held in balance.held]
            excess.append(max(tokens) / (sum(tokens) / replicas) - 1)
    return sum(excess) / len(excess)


async def main() -> None:
    """Runs the bench, prints its figures and records them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rates: dict[int, list[float]] = {size: [] for size in SIZES}
    for turn in range(args.rounds):
        for size in SIZES:
            rates[size].append(await tokens_per_cpu_s(size, turn))
    rows = [
        {
            "replicas": size,
            "tokens_per_cpu_s": round(median(rates[size])),
            "of_one": round(median(a / b for a, b in zip(rates[size], rates[1], strict=True)), 3),
        }
        for size in SIZES
    ]
    spread = {method: round(imbalance(method, 4), 4) for method in METHODS}
    for row in rows:
        print(row)
    print("imbalance of 4 replicas:", spread)
    record("replicas", {"runs": rows, "imbalance_of_4": spread})


if __name__ == "__main__":
    uvloop.run(main())
