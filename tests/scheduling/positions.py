"""Lengths of slots, for test doubles of ranks that compute nothing."""

import numpy as np

from runtime.messages.steps import StepPlan


class Positions:
    """Follows plans without verify rows."""

    def __init__(self, max_slots: int = 64) -> None:
        self.lengths = np.zeros(max_slots, np.int64)

    def starts(self, plan: StepPlan) -> np.ndarray:
        """Where the plan's rows begin; the slots move on."""
        assert not plan.num_verifies
        for admit in plan.admits:
            self.lengths[admit.slot] = admit.length
        starts = self.lengths[plan.slots]
        self.lengths[plan.slots] += plan.counts
        return starts
