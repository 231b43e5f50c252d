"""The profile run: the largest step that the scheduler may plan, run once at start to measure the memory of
steps, which is not given to pages.

Every slot has a row that samples, with the sampling parameters that need most memory, and one row is as long
as possible. All rows use the padding page. On a device with partitions, a step with decodes is run on each.
Kernels that allocate at their first call have done so afterwards; those that compile have been compiled
before (kernel_steps.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from msgspec import structs

from runtime.errors import StartError
from runtime.messages.ranks import StartRank
from runtime.messages.steps import NO_INTS, Admit, Samples, SlotSampling, StepPlan
from runtime.ranks.group_rows import equal_rows
from runtime.ranks.model_runner import ModelRunner

PARAMS = SlotSampling(
    temperature=1.0,
    top_p=0.9,
    top_k=0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    seed=0,
    bias_ids=[],
    bias_values=[],
    stop_ids=[],
    min_len=0,
    top_logprobs=20,
    prompt_logprobs=-1,
)


def largest_step(start: StartRank) -> StepPlan:
    """The largest step. Its last rows are the longest: the longest sequence, or all tokens of the step."""
    num_rows = min(start.max_slots, start.max_step_tokens)
    counts, rest = np.ones(num_rows, np.int32), start.max_step_tokens - num_rows
    for row in reversed(range(num_rows)):
        more = min(rest, start.max_len - 1)
        counts[row] += more
        rest -= more
    return StepPlan(
        step=0,
        num_decodes=0,
        admits=[Admit(slot, PARAMS, int(count), NO_INTS) for slot, count in enumerate(counts)],
        slots=np.arange(num_rows, dtype=np.int32),
        counts=counts,
        samples=np.full(num_rows, Samples.LAST, np.uint8),
        token_ids=np.zeros(int(counts.sum()), np.int32),
        follows=start.speculation is not None and start.speculation.is_own,
    )


def step_pages(plan: StepPlan, page_size: int) -> int:
    """Pages of the cache that a step is run on, in which all its rows use one: for all its tokens, and no
    fewer than its rows with several tokens have together, which attention operators may compare."""
    several = plan.counts[plan.counts > 1]
    return max(-(-int(plan.counts.sum()) // page_size), int((-(-several // page_size)).sum()))


def run_largest_step(runner: ModelRunner, start: StartRank) -> None:
    """Runs the largest step on a runner that is not used afterwards. Raises StartError if there is no memory
    for the step in addition to the weights."""
    with torch.inference_mode(), reported_memory(start):
        run_alone(runner, plan := largest_step(start), start.attention_groups)
        if runner.device.partitions is not None:
            for rows in runner.device.partitions.least_rows:
                if (mixed := with_decodes(plan, max(rows, 1))) is not None:
                    run_alone(runner, mixed, start.attention_groups)


def with_decodes(plan: StepPlan, num_decodes: int) -> StepPlan | None:
    """The largest step, whose first rows decode: streams of a partition keep memory of their own. None: so
    many sequences do not leave room for a prompt."""
    if num_decodes >= len(plan.slots) or (plan.counts[:num_decodes] > 1).any():
        return None
    return structs.replace(plan, num_decodes=num_decodes, token_ids=plan.token_ids[num_decodes:])


def run_alone(runner: ModelRunner, plan: StepPlan, num_groups: int) -> None:
    """Runs a step, of which each attention group has as much, and waits for it."""
    groups = equal_rows(plan, num_groups, runner.device.overlap) if num_groups > 1 else None
    runner.launch(plan, groups).result()
    if runner.pipeline is not None:
        runner.pipeline.settle_all(runner.effects.take)


@contextmanager
def reported_memory(start: StartRank) -> Iterator[None]:
    """Raises StartError where the memory for a step is short."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"a step of {start.max_step_tokens} tokens and {start.max_slots} sequences does not fit in "
            "memory with the weights; lower "
            "--chunked-prefill-size or --max-running-requests, or use a smaller model or dtype"
        ) from error
