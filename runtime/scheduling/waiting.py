"""The waiting queue: who is admitted next. First come, first served; who was running before goes first."""

from collections.abc import Callable, Iterator

from runtime.request import Sequence


class WaitingQueue:
    """Sequences without slot and pages, in order of admission. Removal from anywhere is O(1)."""

    def __init__(self) -> None:
        self._returned: dict[int, Sequence] = {}  # preempted, by id
        self._new: dict[int, Sequence] = {}  # by id, in order of arrival

    def __len__(self) -> int:
        return len(self._returned) + len(self._new)

    def add(self, sequence: Sequence) -> None:
        self._new[sequence.id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence: it goes before all that have not run yet, the oldest first."""
        self._returned[sequence.id] = sequence
        self._returned = dict(sorted(self._returned.items()))

    def remove(self, sequence: Sequence) -> None:
        if self._returned.pop(sequence.id, None) is None:
            del self._new[sequence.id]

    def ready(self, is_ready: Callable[[Sequence], bool]) -> Iterator[Sequence]:
        """Those that can be admitted, in order; the queue may lose what was yielded while this runs."""
        for sequence in [*self._returned.values()]:
            if is_ready(sequence):
                yield sequence
        for sequence in [*self._new.values()]:
            if is_ready(sequence):
                yield sequence
