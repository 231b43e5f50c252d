"""Plans for tests that need a rank at work and do not care for what it computes."""

from typing import Any

import numpy as np

from runtime.messages.ranks import StartRank
from runtime.messages.steps import StepPlan
from tests.devices.drive import start_rank


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def start_null(tp_size: int = 1, **device_options: Any) -> StartRank:
    return start_rank("", device="null", tp_size=tp_size, num_threads=None, device_options=device_options)


def decodes(step: int, rows: int = 1, padding: int = 0) -> StepPlan:
    """A decode in each of the first `rows` slots; `padding` makes the message longer without a meaning for
    the null device."""
    return StepPlan(
        step=step,
        num_decodes=rows,
        slots=np.arange(rows, dtype=np.int32),
        counts=np.ones(rows, np.int32),
        samples=np.ones(rows, np.uint8),
        token_ids=np.zeros(padding, np.int32),
    )
