"""Steps that a rank has launched, whose results have yet to come. See Pending in devices/executor.py."""

from collections.abc import Callable
from threading import Lock

import numpy as np

from runtime.messages.steps import StepResult
from runtime.ranks.transfers import Fetched


class Launched:
    """A step of which the device has all it needs. Its result is made when the tensors have come, once."""

    def __init__(self, fetched: Fetched, finish: Callable[[list[np.ndarray]], StepResult]) -> None:
        self._fetched = fetched
        self._finish = finish
        self._lock = Lock()
        self._result: StepResult | None = None

    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._result is not None or self._fetched.is_done()

    def result(self) -> StepResult:
        """Waits for the step, in any thread."""
        with self._lock:
            if self._result is None:
                self._result = self._finish(self._fetched.arrays())
            return self._result


class Unreported:
    """A step on a rank that does not report."""

    def is_done(self) -> bool:
        """Whether `result` returns at once: always."""
        return True

    def result(self) -> None:
        """Nothing: rank 0 reports."""
        return None
