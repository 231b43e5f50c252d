"""Steps that between them launch every variant of the kernels that a server may need, so that none is
compiled while it serves.

A variant is chosen by sizes of a step: its tokens, its rows, the most tokens of a row, and the length of the
longest row. Each choice changes where a size passes a bound, and a bound is twice the one before it at least;
so the powers of two meet them all, and of the lengths the shortest and the longest.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.operands import Seen
from runtime.devices.progress import Progress
from runtime.layers.fused_ops import fused_ops_of
from runtime.messages.ranks import StartRank
from runtime.messages.steps import NO_INTS, Admit, Samples, StepPlan
from runtime.ranks.model_runner import ModelRunner
from runtime.ranks.profile_run import PARAMS, reported_memory, run_alone

MOST_OF_LONG = 1024  # tokens of a row from which on the length of the row chooses nothing


def kernel_steps(start: StartRank) -> Iterator[StepPlan]:
    """The steps. All rows use the padding page; what is computed has no meaning."""
    most_rows = min(start.max_slots, start.max_step_tokens)
    most_tokens = min(start.max_step_tokens, start.max_slots * start.max_len)
    follows, longest = False, start.max_len
    if start.speculation is not None:  # a draft model continues the rows
        follows = start.speculation.is_own
        longest = max(1, longest - start.speculation.num_draft_tokens)
    for num in powers_of_two(most_rows):
        for length in (0, longest - 1):
            yield decode_step(num, length, follows=follows)
    for count in powers_of_two(most_tokens):
        whole, rest = divmod(count, start.max_len)
        yield extend_step([start.max_len] * whole + [rest] * (rest > 0), 0, follows=follows)
        if count <= min(MOST_OF_LONG, longest):
            yield extend_step([count], longest - count, follows=follows)


def compile_kernels(runner: ModelRunner, start: StartRank, progress: Progress) -> None:
    """Compiles all kernels of these steps, and those that change logits, on a device that compiles. The
    runner is not used for sequences afterwards. Raises StartError if there is no memory for a step."""
    device = runner.device
    if device.compiler is None:
        return
    with torch.inference_mode(), reported_memory(start), device.compiler.compiling(progress):
        for plan in kernel_steps(start):
            run_alone(runner, plan, start.attention_groups)
        change_logits(device, runner.slots.vocab_size)


def change_logits(device: Device, vocab_size: int) -> None:
    """Launches the kernels of grammars and penalties, for which the steps above have no sequences."""

    def zeros(size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(1, size, dtype=dtype, device=device.torch_device)

    logits, rows = zeros(vocab_size, torch.float32), zeros(1, torch.int64)[0]
    device.ops.mask(logits, rows, zeros(-(-vocab_size // 32), torch.int32))
    seen = Seen(zeros(vocab_size, torch.int32), zeros(vocab_size, torch.bool), zeros(3, torch.float32))
    fused_ops_of(device).penalise(logits, rows, seen, rows)


def powers_of_two(most: int) -> list[int]:
    """The powers of two up to `most`, and `most`."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def decode_step(num: int, length: int, *, follows: bool) -> StepPlan:
    """Sequences with `length` tokens in the cache that decode."""
    return StepPlan(
        step=0,
        num_decodes=num,
        admits=[Admit(slot, PARAMS, length + 1, NO_INTS, length=length) for slot in range(num)],
        slots=np.arange(num, dtype=np.int32),
        counts=np.ones(num, np.int32),
        samples=np.full(num, Samples.LAST, np.uint8),
        follows=follows,
    )


def extend_step(counts: list[int], length: int, *, follows: bool) -> StepPlan:
    """Sequences with `length` tokens in the cache, and the next `counts` of their prompts."""
    return StepPlan(
        step=0,
        num_decodes=0,
        admits=[
            Admit(slot, PARAMS, length + count, NO_INTS, length=length) for slot, count in enumerate(counts)
        ],
        slots=np.arange(len(counts), dtype=np.int32),
        counts=np.array(counts, np.int32),
        samples=np.full(len(counts), Samples.LAST, np.uint8),
        token_ids=np.zeros(sum(counts), np.int32),
        follows=follows,
    )
