"""A step of several attention groups (messages/steps.py, GroupSteps) on a rank, which is in one of them.

Each group computes its own plan. Layers that all ranks share need the number of tokens of every group, which
follows from the plans, and a head that all ranks share the number of rows of logits. A group without a plan
computes padding, one token for each micro-batch, so that its ranks take part in what is shared. A step is cut
in two micro-batches (two_batches.py) where each group's plan can be.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from runtime.devices.base import Device, ForwardBatch
from runtime.messages.ranks import StepOverlap
from runtime.messages.steps import GroupSteps, Samples, StepPlan
from runtime.ranks.drafting.own_rows import own_rows
from runtime.ranks.sample_rows import ALL
from runtime.ranks.two_batches import can_cut_plan, num_first

if TYPE_CHECKING:
    from runtime.ranks.replays import Replay


@dataclass(frozen=True, slots=True)
class GroupRows:
    """What a step has of each attention group."""

    tokens: tuple[int, ...]  # that are computed, at least one
    first: tuple[int, ...]  # of these, those of the first of two micro-batches; (): there is one batch
    logits: tuple[int, ...]  # rows of logits that tokens are sampled from
    targets: tuple[int, ...]  # tokens of prompts whose log probabilities are wanted
    is_idle: tuple[bool, ...]  # the tokens are padding
    is_decode: bool  # every row of every group decodes
    replay: "Replay | None" = None  # graphs that compute the step; None: it is launched kernel by kernel
    # what each group computes, where a sequence of any has an adapter; (): none has
    adapted: tuple[StepPlan, ...] = ()

    def first_on(self, device: Device) -> int:
        """Tokens of the first micro-batch of this rank's group; 0: there is one batch."""
        assert device.attention is not None, "groups"
        return self.first[device.attention.index] if self.first else 0

    def put_into(self, batch: ForwardBatch, device: Device) -> ForwardBatch:
        """The batch of this rank's group, for layers that all groups share."""
        whole = self._put(batch, self.tokens, device)
        if batch.micro_batches is None:
            return whole
        others = tuple(count - first for count, first in zip(self.tokens, self.first, strict=True))
        head, tail = batch.micro_batches
        return replace(
            whole, micro_batches=(self._put(head, self.first, device), self._put(tail, others, device))
        )

    def _put(self, batch: ForwardBatch, tokens: tuple[int, ...], device: Device) -> ForwardBatch:
        """A batch to which each group brings so many tokens."""
        assert device.attention is not None, "groups"
        is_real = None
        if any(self.is_idle):  # experts do not count padding
            real = ~torch.tensor(self.is_idle).repeat_interleave(torch.tensor(tokens))
            if device.all_to_all is not None:  # they are given this rank's own tokens
                real = real.split(list(tokens))[device.attention.index]
            is_real = real.to(device.torch_device, non_blocking=True)
        return replace(batch, group_tokens=tokens, is_real=is_real, is_decode=self.is_decode)


def group_rows(step: GroupSteps, overlap: StepOverlap, *, drafts_trees: bool = False) -> GroupRows:
    """Counted in the plans. `drafts_trees`: drafts that the plans leave to the ranks become trees."""
    plans = step.plans
    first = _first_tokens(plans, overlap, drafts_trees=drafts_trees) if overlap.two_batches else ()
    padding = 2 if first else 1
    return GroupRows(
        tuple(padding if plan is None else int(plan.counts.sum()) for plan in plans),
        first,
        tuple(0 if plan is None else num_logits(plan) for plan in plans),
        tuple(0 if plan is None else len(plan.prompt_targets) for plan in plans),
        tuple(plan is None for plan in plans),
        all(plan is None or plan.num_decodes == len(plan.slots) for plan in plans),
    )


def _first_tokens(
    plans: list[StepPlan | None], overlap: StepOverlap, *, drafts_trees: bool
) -> tuple[int, ...]:
    """Tokens of each group's first micro-batch; (): some group's plan cannot be cut."""
    found = []
    for plan in plans:
        has_trees = plan is not None and drafts_trees and own_rows(plan) is not None
        if has_trees or (plan is not None and not can_cut_plan(plan)):
            return ()
        found.append(1 if plan is None else num_first(plan.counts, overlap.threshold))
    return tuple(found) if all(found) else ()


def equal_rows(plan: StepPlan, num_groups: int, overlap: StepOverlap) -> GroupRows:
    """As if each group had this plan."""
    return group_rows(GroupSteps(plan.step, [plan] * num_groups), overlap)


def num_logits(plan: StepPlan) -> int:
    """Tokens of a plan behind which something is sampled."""
    return int(np.where(plan.samples == ALL, plan.counts, plan.samples > 0).sum())


def padding_plan(step: int, slot: int, count: int) -> StepPlan:
    """So many tokens of a slot that no sequence has, behind which nothing is sampled."""
    return StepPlan(
        step=step,
        num_decodes=0,
        slots=np.array([slot], np.int32),
        counts=np.array([count], np.int32),
        samples=np.array([Samples.NONE], np.uint8),
        token_ids=np.zeros(count, np.int32),
    )
