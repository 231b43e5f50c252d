"""When steps are done on a device of which only the time of steps is known."""

import numpy as np

from runtime.messages.steps import StepPlan


class StageTimes:
    """The times of steps that pass through the stages of a pipeline, each an equal part of a step. A stage
    computes one step after another; the first one begins a step when the last tokens of its slots are
    known."""

    def __init__(self, num_stages: int, max_slots: int) -> None:
        self.free_s = [0.0] * num_stages  # when each stage is done with the steps so far
        self.known_s = np.zeros(max_slots)  # when the last token of a slot is sampled

    def add(self, plan: StepPlan, now_s: float, duration_s: float) -> float:
        """A step that comes at `now_s` and takes `duration_s` in all. -> when it is done"""
        slots = plan.slots[: plan.num_decodes + plan.num_verifies]
        done_s = max(now_s, float(self.known_s[slots].max(initial=0.0)))
        for stage, free_s in enumerate(self.free_s):
            done_s = max(done_s, free_s) + duration_s / len(self.free_s)
            self.free_s[stage] = done_s
        self.known_s[plan.slots[plan.samples > 0]] = done_s
        return done_s
