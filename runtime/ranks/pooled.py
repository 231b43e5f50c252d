"""The end of a step of a pooling model: a vector of each row that is complete, where other models sample a
token."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from runtime.devices.executor import Pending
from runtime.layers.pooling import plan_pooling
from runtime.messages.steps import StepPlan, StepResult
from runtime.models.config.pooling import Pooling
from runtime.ranks.launched import Launched, Unreported
from runtime.ranks.step_copies import end_copies

if TYPE_CHECKING:
    from runtime.ranks.model_runner import ModelRunner

NO_TOKENS, NO_NUMBERS = np.empty(0, np.int32), np.empty(0, np.float32)


def pool(
    runner: "ModelRunner", plan: StepPlan, starts: np.ndarray, hidden: Tensor, pooling: Pooling, begin: float
) -> Pending:
    """Reports vectors, and moves the slots on. `starts`, int64 [R]: the lengths before; `hidden`: of the
    step's tokens; `begin`: when the step was launched, in seconds."""
    torch_device = runner.device.torch_device
    runner.slots.lengths.advance(plan.slots, starts, plan.counts)
    rows = np.flatnonzero(plan.samples)
    picks = plan_pooling(pooling.mode, plan.counts.astype(np.int64), rows, torch_device)
    vectors = runner.model.pool(hidden, picks) if len(rows) else torch.empty(0, device=torch_device)
    end_copies(runner.copies, plan, runner.saves, runner.transfers, runner.device)
    if not runner.samples:
        return Unreported()
    return Launched(
        runner.transfers.fetch([vectors.flatten()]),
        lambda arrays: StepResult(
            plan.step,
            NO_TOKENS,
            -1,
            NO_NUMBERS,
            NO_TOKENS,
            NO_NUMBERS,
            [],
            runner.seconds(begin),
            vectors=arrays[0],
        ),
    )
