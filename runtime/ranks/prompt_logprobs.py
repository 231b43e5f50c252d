"""Log probabilities of the tokens of prompts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.devices.operands import LogitsOps
from runtime.layers.sampling.sampler import Logprobs, clean
from runtime.layers.upload import upload_int64
from runtime.messages.steps import PromptLogprobs, StepPlan
from runtime.models.base import GenerativeModel
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


def prompt_rows(
    plan: StepPlan, hidden: Tensor, model: GenerativeModel, slots: Slots, logits_ops: LogitsOps
) -> Iterator[PromptRow]:
    """The log probabilities of prompt tokens, for each extend row of a slot that asks for them; `hidden`
    [T, hidden size]."""
    if len(plan.prompt_targets) == 0:
        return
    num_others = plan.num_decodes + plan.num_verifies
    first, used = int(plan.counts[:num_others].sum()), 0
    for slot, count in zip(plan.slots[num_others:].tolist(), plan.counts[num_others:].tolist(), strict=True):
        width = int(slots.prompt_logprobs[slot])
        if width >= 0:
            yield _row(
                slot,
                width,
                hidden[first : first + count],
                plan.prompt_targets[used : used + count],
                model,
                slots,
                logits_ops,
            )
            used += count
        first += count


def _row(
    slot: int,
    width: int,
    hidden: Tensor,
    targets: np.ndarray,
    model: GenerativeModel,
    slots: Slots,
    logits_ops: LogitsOps,
) -> PromptRow:
    """In chunks, as the logits of a whole prompt would fill the memory."""
    known = upload_int64(np.maximum(targets, 0), hidden.device)
    chunk = max(1, PROMPT_LOGITS // slots.vocab_size)
    parts = []
    for at in range(0, len(targets), chunk):
        logits = clean(model.logits(hidden[at : at + chunk]))
        part = Logprobs(*logits_ops.logprobs(logits, known[at : at + chunk], width))
        if slot in slots.logprob_ids:
            slots.add_logprob_ids(part, logits, slice(None), slot, width)
        parts.append((part.chosen, part.top_ids, part.top))
    return PromptRow(
        slot, width, targets, Logprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    )
