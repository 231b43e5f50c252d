"""What a rank reports while it starts: phase after phase, each with how much of it is done. Torch-free."""

from collections.abc import Callable

from runtime.messages.ranks import LoadPhase

# phase, done, total: bytes of the checkpoint for weights, else a number of parts; a total of 0 is not known
Progress = Callable[[LoadPhase, int, int], None]


def without_progress(phase: LoadPhase, done: int, total: int) -> None:
    """A Progress that reports nothing."""


class Gauge:
    """Counts what is done of one phase, and reports each percent."""

    def __init__(self, progress: Progress, phase: LoadPhase, total: int) -> None:
        self.done = 0
        self._progress = progress
        self._phase = phase
        self._total = total
        progress(phase, 0, total)

    def add(self, amount: int) -> None:
        """`amount` more is done."""
        before, self.done = self.done, min(self.done + amount, self._total)
        if self._total and self.done * 100 // self._total > before * 100 // self._total:
            self._progress(self._phase, self.done, self._total)

    def finish(self) -> None:
        """Everything is done."""
        self.add(self._total - self.done)
