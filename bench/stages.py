"""How busy the stages of a pipeline are: the scheduler against the null device's model of time, in which a
step passes through the stages in equal parts of a given time. The clock is simulated, so that figures do not
depend on the machine.

    python -m bench.stages

A stage is idle while no step is there. With S sequences that decode, P stages and a step for each sequence or
more, min(S, P) stages are busy at a time: the bubble is 1 - min(S, P) / P. What is measured on top is the way
of a step's tokens to the event loop and back, where no other step hides it.
"""

import argparse
from collections import deque

import numpy as np

from bench.record import record
from runtime.devices.null.stage_times import StageTimes
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import StepPlan, StepResult
from runtime.scheduling.micro_batches import MicroBatches
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig

STEP_S = 0.016  # of a step through all stages
LOOP_S = 0.0004  # from the end of a step until steps that follow from it are there
NEW_TOKENS = 400
CASES = [(stages, sequences) for stages in (2, 4) for sequences in (1, stages, 4 * stages, 4 * stages + 1)]
WAYS = {
    "overlap": (0, 1),
    "no overlap": (0, 0),
    "no overlap, one more": (1, 0),
}  # micro-batches, and steps more
NO_FLOATS = np.empty(0, np.float32)


def answered(plan: StepPlan) -> StepResult:
    """The result of a step: any tokens."""
    tokens = np.zeros(int((plan.samples > 0).sum()), np.int32)
    return StepResult(plan.step, tokens, -1, NO_FLOATS, tokens[:0], NO_FLOATS, [], STEP_S)


def bubble(stages: int, sequences: int, more_batches: int, more_steps: int) -> float:
    """The share of time in which a stage is idle, from the first decode to the end of the first answer."""
    batches = MicroBatches(stages + more_batches)
    config = SchedulerConfig(
        max_running=sequences,
        max_step_tokens=4096,
        max_len=1024,
        page_size=16,
        num_pages=1 + 64 * sequences,
        eos_ids=(),
        micro_batches=batches,
    )
    scheduler, times = Scheduler(config), StageTimes(stages, sequences)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    for i in range(sequences):
        ids = [1 + (i * 7 + k) % 2000 for k in range(32)]
        scheduler.add(Request(id=str(i), prompt_ids=ids, params=params, seed=1, arrival_s=0.0))
    flights, now_s, begin_s, num_steps = deque[tuple[StepPlan, float]](), 0.0, 0.0, 0
    while not scheduler.num_ended:
        while len(flights) < batches.count + more_steps and (plan := scheduler.plan()) is not None:
            flights.append((plan, times.add(plan, now_s, STEP_S)))
        plan, done_s = flights.popleft()
        now_s = max(now_s, done_s + LOOP_S)
        scheduler.apply(answered(plan))
        if plan.num_decodes:
            num_steps += 1
        else:
            begin_s = done_s
    return 1 - num_steps * STEP_S / stages / (done_s - begin_s)


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows = []
    for stages, sequences in CASES:
        row: dict[str, float | int] = {
            "stages": stages,
            "sequences": sequences,
            "computed": 1 - min(sequences, stages) / stages,
        }
        row |= {name: round(bubble(stages, sequences, *more), 3) for name, more in WAYS.items()}
        rows.append(row)
        print(row, flush=True)
    record("stages", {"step_s": STEP_S, "loop_s": LOOP_S, "runs": rows})


if __name__ == "__main__":
    main()
