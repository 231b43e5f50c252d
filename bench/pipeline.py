"""What a step costs on the event loop: plan, ring, apply, detokenize and one push per token, on the null
device.

    python -m bench.pipeline [--sequences 1 16 64 256]

The bound is 150 µs a step and 2 µs a running sequence; CPU time of the event-loop process, so that the ranks'
time does not count.
"""

import argparse
import os
import time

import anyio
import uvloop

from bench.record import record
from runtime.core import Core
from runtime.messages.requests import Delta, GenerateRequest, RequestError, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for

NEW_TOKENS = 400


class CountingSink:
    """Counts tokens; the last sequence to end sets `done`."""

    def __init__(self, done: anyio.Event, left: list[int]) -> None:
        self.done = done
        self.left = left
        self.tokens = 0

    def push(self, delta: Delta) -> None:
        """Counts the tokens of a delta."""
        self.tokens += len(delta.token_ids)
        if delta.finish is not None:
            self.left[0] -= 1
            if not self.left[0]:
                self.done.set()

    def fail(self, error: RequestError) -> None:
        """Raises the error: no request may fail."""
        raise error


async def measure(core: Core, sequences: int, round: int) -> dict[str, float]:
    """CPU and wall microseconds a step, with `sequences` decoding together."""
    done = anyio.Event()
    left = [sequences]
    sinks = [CountingSink(done, left) for _ in range(sequences)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    steps, cpu, begin = core.load().steps, time.process_time(), time.perf_counter()
    for i, sink in enumerate(sinks):
        core.submit(
            GenerateRequest(
                id=f"{sequences}-{round}-{i}",
                prompt=Tokens([1 + (i * 7 + round + k) % 2000 for k in range(32)]),
                params=params,
                arrival_s=time.monotonic(),
            ),
            sink,
        )
    await done.wait()
    cpu, wall, steps = time.process_time() - cpu, time.perf_counter() - begin, core.load().steps - steps
    assert all(sink.tokens == NEW_TOKENS for sink in sinks)
    return {"cpu_us_per_step": cpu / steps * 1e6, "wall_us_per_step": wall / steps * 1e6}


async def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    core = Core(plan_for(from_values({"device": "null", "max_running_requests": 256})))
    rows = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(core.run)
        await core.wait_ready()
        for sequences in args.sequences:
            await measure(core, sequences, 99)  # warm-up
            runs = sorted(
                [await measure(core, sequences, k) for k in range(args.rounds)],
                key=lambda run: run["cpu_us_per_step"],
            )
            bound = 150 + 2 * sequences
            median = {name: round(value, 1) for name, value in runs[len(runs) // 2].items()}
            rows.append(
                {
                    "sequences": sequences,
                    **median,
                    "bound_us": bound,
                    "of_bound": round(median["cpu_us_per_step"] / bound, 2),
                }
            )
            print(rows[-1], flush=True)
        tasks.cancel_scope.cancel()
    record("pipeline", {"runs": rows, "nice": os.nice(0)})


if __name__ == "__main__":
    uvloop.run(main())
