"""A step of several attention groups (messages/steps.py, GroupSteps) on a rank, which is in one of them.

Each group computes its own plan. Layers that all ranks share need the number of tokens of every group, which
follows from the plans, and a head that all ranks share the number of rows of logits. A group without a plan
computes one padding token, so that its ranks take part in what is shared.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from runtime.devices.base import Device, ForwardBatch
from runtime.messages.steps import GroupSteps, Samples, StepPlan
from runtime.ranks.sample_rows import ALL


@dataclass(frozen=True, slots=True)
class GroupRows:
    """What a step has of each attention group."""

    tokens: tuple[int, ...]  # that are computed, at least one
    logits: tuple[int, ...]  # rows of logits that tokens are sampled from
    targets: tuple[int, ...]  # tokens of prompts whose log probabilities are wanted
    is_idle: tuple[bool, ...]  # the one token is padding
    is_decode: bool  # every row of every group decodes

    def put_into(self, batch: ForwardBatch, device: Device) -> ForwardBatch:
        """The batch of this rank's group, for layers that all groups share."""
        assert device.attention is not None, "groups"
        is_real = None
        if any(self.is_idle):  # experts do not count padding
            real = ~torch.tensor(self.is_idle).repeat_interleave(torch.tensor(self.tokens))
            if device.all_to_all is not None:  # they are given this rank's own tokens
                real = real.split(list(self.tokens))[device.attention.index]
            is_real = real.to(device.torch_device, non_blocking=True)
        return replace(batch, group_tokens=self.tokens, is_real=is_real, is_decode=self.is_decode)


def group_rows(step: GroupSteps) -> GroupRows:
    """Counted in the plans."""
    plans = step.plans
    return GroupRows(
        tuple(1 if plan is None else int(plan.counts.sum()) for plan in plans),
        tuple(0 if plan is None else num_logits(plan) for plan in plans),
        tuple(0 if plan is None else len(plan.prompt_targets) for plan in plans),
        tuple(plan is None for plan in plans),
        all(plan is None or plan.num_decodes == len(plan.slots) for plan in plans),
    )


def equal_rows(plan: StepPlan, num_groups: int) -> GroupRows:
    """As if each group had this plan."""
    return group_rows(GroupSteps(plan.step, [plan] * num_groups))


def num_logits(plan: StepPlan) -> int:
    """Tokens of a plan behind which something is sampled."""
    return int(np.where(plan.samples == ALL, plan.counts, plan.samples > 0).sum())


def padding_plan(step: int, slot: int) -> StepPlan:
    """One token of a slot that no sequence has, behind which nothing is sampled."""
    return StepPlan(
        step=step,
        num_decodes=0,
        slots=np.array([slot], np.int32),
        counts=np.ones(1, np.int32),
        samples=np.array([Samples.NONE], np.uint8),
        token_ids=np.zeros(1, np.int32),
    )
