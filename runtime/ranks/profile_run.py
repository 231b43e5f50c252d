"""The largest step that the scheduler may plan, run once at start over tokens of nobody: what it takes is
left free beside the pages.

Every slot has a row that samples, with the wishes that need most memory, and one row is as long as it may be.
All of them have the padding page alone. What compiles or allocates at its first call has done so afterwards.
"""

import numpy as np
import torch

from runtime.errors import StartError
from runtime.messages.ranks import StartRank
from runtime.messages.steps import NO_INTS, Admit, Samples, SlotSampling, StepPlan
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
    """The last rows are the longest: as much as a sequence may have, or the step."""
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
    )


def run_largest_step(loaded: ModelRunner, start: StartRank) -> None:
    """Of a `loaded` that is thrown away. Raises StartError where the step does not fit beside the weights."""
    try:
        with torch.inference_mode():
            loaded.launch(largest_step(start)).result()
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"a step of {start.max_step_tokens} tokens and {start.max_slots} sequences does not fit beside the weights; lower "
            "--chunked-prefill-size or --max-running-requests, or use a smaller model or dtype"
        ) from error
