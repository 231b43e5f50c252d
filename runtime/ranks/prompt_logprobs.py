"""Log probabilities of the tokens of prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.devices.operands import LogitsOps
from runtime.layers.sampling.sampler import Logprobs, clean
from runtime.layers.upload import upload_int64
from runtime.messages.steps import PromptLogprobs, StepPlan
from runtime.ranks.slots import Slots

PROMPT_LOGITS = 1 << 24  # most logits of a prompt held at once


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Log probabilities of the next tokens of one extend row, on the device."""

    slot: int
    width: int
    targets: np.ndarray
    logprobs: Logprobs

    def result(self, chosen: np.ndarray, top_ids: np.ndarray, top: np.ndarray) -> PromptLogprobs:
        """The row's part of a step's result, from what has come to the host."""
        return PromptLogprobs(
            self.slot,
            self.width,
            np.where(self.targets < 0, np.float32(np.nan), chosen),
            top_ids.ravel(),
            top.ravel(),
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """An extend row whose slot asks for log probabilities of its tokens."""

    slot: int
    width: int
    first: int  # the row's first token in the step
    targets: np.ndarray  # int32: the next token of each of its tokens; -1: unknown


def asked_rows(plan: StepPlan, slots: Slots) -> Iterator[Asked]:
    """The extend rows whose slots ask for log probabilities, in order."""
    num_others = plan.num_decodes + plan.num_verifies
    first, used = int(plan.counts[:num_others].sum()), 0
    for slot, count in zip(plan.slots[num_others:].tolist(), plan.counts[num_others:].tolist(), strict=True):
        width = int(slots.prompt_logprobs[slot])
        if width >= 0:
            yield Asked(slot, width, first, plan.prompt_targets[used : used + count])
            used += count
        first += count


def prompt_rows(
    plan: StepPlan,
    hidden: Tensor,
    logits: Callable[[Tensor, int, int], Tensor],
    most: int,
    slots: Slots,
    logits_ops: LogitsOps,
) -> list[PromptRow]:
    """The log probabilities of prompt tokens, for each extend row of a slot that asks for them; `hidden`
    [T, hidden size]. `logits` makes float32 [n, vocabulary] of hidden states [n, hidden size]: it is called
    in chunks, as the logits of a whole prompt would fill the memory, with the first and the last of the
    chunk's tokens among `most` wanted ones."""
    if not most:
        return []
    asked = list(asked_rows(plan, slots)) if len(plan.prompt_targets) else []
    places = np.concatenate([np.empty(0, np.int64), *(r.first + np.arange(len(r.targets)) for r in asked)])
    parts: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in asked]
    chunk = max(1, PROMPT_LOGITS // slots.vocab_size)
    for at in range(0, most, chunk):
        here = places[at : at + chunk]
        chosen = clean(logits(hidden.index_select(0, upload_int64(here, hidden.device)), at, at + chunk))
        begin = 0  # of the row, among the wanted tokens
        for row, found in zip(asked, parts, strict=True):
            first, last = max(begin, at), min(begin + len(row.targets), at + len(here))
            if first < last:
                own = row.targets[first - begin : last - begin]
                found.append(_part(row, own, chosen[first - at : last - at], slots, logits_ops))
            begin += len(row.targets)
    return [
        PromptRow(
            row.slot,
            row.width,
            row.targets,
            Logprobs(*(torch.cat(tensors) for tensors in zip(*found, strict=True))),
        )
        for row, found in zip(asked, parts, strict=True)
    ]


def _part(
    row: Asked, targets: np.ndarray, logits: Tensor, slots: Slots, logits_ops: LogitsOps
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of some targets of a row."""
    known = upload_int64(np.maximum(targets, 0), logits.device)
    part = Logprobs(*logits_ops.logprobs(logits, known, row.width))
    if row.slot in slots.logprob_ids:
        slots.add_logprob_ids(part, logits, slice(None), row.slot, row.width)
    return part.chosen, part.top_ids, part.top
