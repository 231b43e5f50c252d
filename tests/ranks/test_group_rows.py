"""What a step has of each attention group, and where it is cut in two micro-batches."""

import numpy as np
import pytest
from msgspec import structs

from runtime.messages.ranks import StepOverlap
from runtime.messages.steps import OWN_DRAFT, GroupSteps, Samples, StepPlan
from runtime.ranks.group_rows import GroupRows, group_rows, padding_plan

TWO = StepOverlap(two_batches=True)


def plan_of(*counts: int, decodes: int = 0) -> StepPlan:
    return StepPlan(
        step=1,
        num_decodes=decodes,
        slots=np.arange(len(counts), dtype=np.int32),
        counts=np.array(counts, np.int32),
        samples=np.full(len(counts), Samples.LAST, np.uint8),
        token_ids=np.zeros(sum(counts) - decodes, np.int32),
    )


def rows_of(*plans: StepPlan | None, overlap: StepOverlap = TWO, drafts_trees: bool = False) -> GroupRows:
    return group_rows(GroupSteps(1, list(plans)), overlap, drafts_trees=drafts_trees)


def test_each_group_is_cut_by_itself() -> None:
    rows = rows_of(plan_of(9), plan_of(1, 1, 1, 1, decodes=4), plan_of(1, 7, decodes=1))
    assert rows.tokens == (9, 4, 8) and rows.first == (4, 2, 4)
    assert rows_of(plan_of(9), plan_of(4), overlap=StepOverlap()).first == ()


def test_an_idle_group_has_padding_in_both_micro_batches() -> None:
    rows = rows_of(plan_of(6), None)
    assert rows.tokens == (6, 2) and rows.first == (3, 1)
    assert padding_plan(1, 5, 2).counts.tolist() == [2]
    assert rows_of(plan_of(6), None, overlap=StepOverlap()).tokens == (6, 1)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(1, decodes=1),
        structs.replace(plan_of(4), embed_places=np.zeros(1, np.int32)),
        structs.replace(plan_of(4), draft_parents=np.zeros(3, np.int32)),
    ],
    ids=["one token", "embeddings", "a tree"],
)
def test_no_group_is_cut_where_one_cannot_be(plan: StepPlan) -> None:
    rows = rows_of(plan_of(9), plan, None)
    assert rows.first == () and rows.tokens == (9, int(plan.counts.sum()), 1)


def test_trees_of_a_draft_model_are_not_cut() -> None:
    """Plans do not say what the ranks' drafts follow."""
    drafts = np.full(3, OWN_DRAFT, np.int32)
    own = structs.replace(
        plan_of(4), num_verifies=1, samples=np.array([Samples.ALL], np.uint8), token_ids=drafts
    )
    assert rows_of(own, plan_of(9)).first == (2, 4)
    assert rows_of(own, plan_of(9), drafts_trees=True).first == ()
