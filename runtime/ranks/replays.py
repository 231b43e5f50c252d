"""Steps that are replayed from captured graphs: which graphs compute a step, and its launch.

The choice is a function of plans, of what was captured, and of what slots were admitted with, so all ranks
choose alike. With attention groups (group_rows.py) it is made for all groups together, each of which fills
its rows of the graph's shape up with padding: the layers that the groups share then have as many tokens of
each. A group without a plan computes padding alone, and samples nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from runtime.devices.decoder_spec import Forwarded
from runtime.devices.executor import Pending
from runtime.messages.steps import GroupSteps, StepPlan
from runtime.ranks.group_rows import GroupRows
from runtime.ranks.sample_rows import sample_rows
from runtime.ranks.sampled import Sampled
from runtime.ranks.sampling_needs import SamplingNeeds
from runtime.ranks.verify_graphs import Shape

if TYPE_CHECKING:
    from runtime.ranks.model_runner import ModelRunner

NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Replay:
    """The graphs that compute a step."""

    shape: Shape | None  # of steps that verify drafts; None: a decode graph
    size: int = 0  # rows of the decode graph


def find_replay(
    runner: "ModelRunner", plans: Sequence[StepPlan], needs: Sequence[SamplingNeeds]
) -> Replay | None:
    """The graphs that compute a step of these plans, one of each attention group that has any, with what the
    slots of each group ask for; None: it is launched kernel by kernel."""
    verifies, graphs = runner.verifies, runner.graphs
    if verifies is not None and (shape := verifies.shape_of(plans, needs)) is not None:
        return Replay(shape)
    size = None if graphs is None else graphs.size_for(plans)
    return None if size is None else Replay(None, size)


def launch_replay(
    runner: "ModelRunner",
    replay: Replay,
    plan: StepPlan,
    begin: float,
    groups: GroupRows | None,
    *,
    is_adapted: bool,
) -> Pending:
    """Launches a step whose forward, and if possible sampling, is replayed. Arguments as of
    ModelRunner.launch."""
    if replay.shape is not None:
        verifies = runner.verifies
        assert verifies is not None, "it was found"
        sampled = verifies.launch(replay.shape, plan, is_adapted=is_adapted)
        runner.sampled_step = plan.step
        if runner.load is not None:
            runner.load.ended(plan)
        return runner.report(plan, sampled, [], [], begin)
    graphs, drafts, slots = runner.graphs, runner.drafts, runner.slots
    assert graphs is not None, "it was found"
    before = None if drafts is None or not plan.follows else drafts.before(plan)
    hidden = graphs.forward(replay.size, plan, is_adapted=is_adapted)
    if runner.load is not None:
        runner.load.ended(plan)
    shown = runner.shown(plan, hidden)
    tokens = graphs.sample(replay.size, plan)
    if tokens is None:
        starts = slots.lengths.starts(plan.slots)
        sampled = runner.sample(plan, starts, sample_rows(plan, starts), Forwarded(hidden), groups)
    else:
        slots.lengths.advanced_on_device(plan.slots)
        runner.sampled_step = plan.step
        sampled = Sampled(tokens, None, None)
    if drafts is not None and before is not None:
        drafts.follow(plan, *before, Forwarded(hidden), sampled)
    return runner.report(plan, sampled, [], shown, begin)


def launch_idle(runner: "ModelRunner", replay: Replay, step: int, groups: GroupRows) -> None:
    """This rank's part of a replayed step in which its attention group has nothing to compute."""
    nothing = StepPlan(step=step, num_decodes=0, slots=NO_ROWS, counts=NO_ROWS, samples=np.empty(0, np.uint8))
    if replay.shape is not None:
        assert runner.verifies is not None, "it was found"
        runner.verifies.launch_idle(replay.shape, is_adapted=bool(groups.adapted))
    else:
        assert runner.graphs is not None, "it was found"
        hidden = runner.graphs.forward(replay.size, nothing, is_adapted=bool(groups.adapted))
        # a head that all groups share
        runner.logits.sampled(runner.model, Forwarded(hidden), np.empty(0, np.int64), groups)
    if runner.load is not None:
        runner.load.ended(nothing)


class GroupReplays:
    """Chooses the graphs of steps of several attention groups."""

    def __init__(self, runner: "ModelRunner", num_groups: int, own: int) -> None:
        """`own`: the group of this rank."""
        self.runner = runner
        slots = runner.slots
        self.needs = [SamplingNeeds(slots.padding, slots.vocab_size) for _ in range(num_groups)]
        self.needs[own] = slots.needs  # which its own steps keep up to date
        self.own = own

    def find(self, step: GroupSteps) -> Replay | None:
        """The graphs that compute a step; None: it is launched kernel by kernel. Called for every step, in
        order: the admits of other groups are remembered."""
        for group, plan in enumerate(step.plans):
            for admit in () if plan is None or group == self.own else plan.admits:
                self.needs[group].admit(admit)
        pairs = [
            (plan, own)
            for plan, own in zip(step.plans, self.needs, strict=True)
            if plan is not None and len(plan.slots)
        ]
        if not pairs:
            return None
        return find_replay(self.runner, [plan for plan, _ in pairs], [own for _, own in pairs])
