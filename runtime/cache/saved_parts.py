"""Which parts of the pages that a step computes are in host memory while it still runs (PartsSaved)."""

from collections.abc import Mapping


class SavedParts:
    """By step in flight and rank, how many parts of the pages that it computes are saved."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[int, int]] = {}

    def begin(self, step: int) -> None:
        """The step saves pages that it computes."""
        self._by_step[step] = {}

    def add(self, step: int, rank: int, num_parts: int) -> None:
        """A rank has saved so many parts, the first ones. Nothing happens when the step is over."""
        if step in self._by_step:
            self._by_step[step][rank] = num_parts

    def of(self, step: int) -> Mapping[int, int]:
        """By rank, the parts that it has saved; nothing for steps that are over."""
        return self._by_step.get(step, {})

    def end(self, step: int) -> None:
        """The step's result is there, and speaks of all parts."""
        self._by_step.pop(step, None)

    def clear(self) -> None:
        """The ranks have died."""
        self._by_step.clear()
