"""Logits of a step's rows, by a head that the ranks of this rank's attention group share, or all ranks: then
all groups call the same methods for the same step, and each computes its part of the rows of all."""

import numpy as np
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.decoder_spec import Forwarded
from runtime.devices.operands import LogitsOps
from runtime.layers.parallel.group_tokens import GroupTokens, open_group_tokens
from runtime.layers.upload import upload_int64
from runtime.messages.steps import StepPlan
from runtime.models.base import GenerativeModel, Model, generative
from runtime.ranks.group_rows import GroupRows
from runtime.ranks.prompt_logprobs import PromptRow, prompt_rows
from runtime.ranks.sample_rows import PackedRows
from runtime.ranks.slots import Slots

NO_COUNTS: tuple[int, ...] = ()


class StepLogits:
    """What a rank computes with the head."""

    def __init__(self, device: Device, model: Model) -> None:
        head = getattr(model, "lm_head", None)
        is_shared = head is not None and head.ranks.size > device.group_ranks.size
        # None: no other group has a part of the head
        self.groups: GroupTokens | None = open_group_tokens(device) if is_shared else None

    def sampled(
        self,
        model: Model,
        forwarded: Forwarded,
        places: np.ndarray,
        groups: GroupRows | None,
        packed: PackedRows | None = None,
    ) -> Tensor | None:
        """Logits behind the step's tokens at `places`, int64 [N]: float32 [N, vocabulary]; None: N is 0.
        `packed`: these on their way to the device; None: they travel alone."""
        logits = forwarded.logits
        if logits is None and self._most(len(places), NO_COUNTS if groups is None else groups.logits):
            hidden = forwarded.hidden
            if len(places) < len(hidden):
                index = upload_int64(places, hidden.device) if packed is None else packed.places.tensor
                hidden = hidden.index_select(0, index)
            logits = self._of(generative(model), hidden, NO_COUNTS if groups is None else groups.logits)
        return logits if len(places) else None

    def prompt(
        self,
        model: Model,
        plan: StepPlan,
        hidden: Tensor,
        groups: GroupRows | None,
        slots: Slots,
        logits_ops: LogitsOps,
    ) -> list[PromptRow]:
        """Log probabilities of the tokens of prompts. `hidden`: of the step's tokens."""
        counts = NO_COUNTS if groups is None else groups.targets

        def logits(hidden: Tensor, first: int, last: int) -> Tensor:
            own = tuple(max(0, min(count, last) - first) for count in counts)
            return self._of(generative(model), hidden, own)

        return prompt_rows(
            plan, hidden, logits, self._most(len(plan.prompt_targets), counts), slots, logits_ops
        )

    def _of(self, model: GenerativeModel, hidden: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Logits [n, vocabulary] of hidden states [n, hidden size]; `counts`: n of each attention group."""
        if self.groups is None:
            return model.logits(hidden)
        return self.groups.own(model.logits(self.groups.join(hidden, counts)), counts)

    def _most(self, own: int, counts: tuple[int, ...]) -> int:
        """How many rows this group takes part in: its own, or those of the group with the most."""
        return own if self.groups is None else max(counts)
