"""Which steps the ranks capture next: the most frequent ones, when there is nothing to compute, or when it
pays under load.

A capture takes a fraction of a second, in which no step runs. With nothing to compute that delays at most a
request that comes just then, by one capture's time; so captures are requested one at a time. Under
load a size is captured when that many of its steps were launched one by one that the capture is soon paid
back, and not before the last one is a while ago.
"""

from bisect import bisect_left
from collections.abc import Sequence

from runtime.messages.ranks import Captured, CaptureUnit

BUSY_STEPS = 100  # of a size, after which it is captured under load
BUSY_EVERY_S = 5.0  # between two captures under load


class Captures:
    """The sizes of one model's graphs of one kind: which there are, which are left, how often each would have
    been used."""

    def __init__(self, sizes: Sequence[int], unit: CaptureUnit = "sequences") -> None:
        """`unit`: as of messages.Capture."""
        self.unit = unit
        self.sizes = sorted(sizes)  # those that can be captured, as far as is known
        self.done: list[int] = []
        self.uses = dict.fromkeys(self.sizes, 0)  # steps of each size
        self.asked: int | None = None  # the capture that is under way
        self._last_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all sizes that can be captured are."""
        return len(self.done) == len(self.sizes)

    def ran(self, num_rows: int, num_steps: int) -> None:
        """So many steps had so many rows, or tokens."""
        at = bisect_left(self.sizes, num_rows)
        if num_rows and at < len(self.sizes):
            self.uses[self.sizes[at]] += num_steps

    def next(self, now_s: float, *, is_idle: bool) -> int | None:
        """The size to capture now, if any: the most used one, of those the smallest. It counts as asked
        for."""
        if self.asked is not None or self.is_complete:
            return None
        size = min(
            (size for size in self.sizes if size not in self.done), key=lambda size: (-self.uses[size], size)
        )
        if is_idle or (self.uses[size] >= BUSY_STEPS and now_s - self._last_s >= BUSY_EVERY_S):
            self.asked = size
            return size
        return None

    def unsent(self) -> None:
        """The one just asked for could not be sent; it will be asked for again."""
        self.asked = None

    def answered(self, answer: Captured, now_s: float) -> None:
        """What cannot be captured, and all that is larger, is given up. An answer that was overtaken by
        `restart` means nothing."""
        if answer.size != self.asked:
            return
        self.asked, self._last_s = None, now_s
        if answer.error:
            self.sizes = [size for size in self.sizes if size < answer.size or size in self.done]
        else:
            self.done.append(answer.size)

    def restart(self) -> None:
        """Other ranks, or other weights or pages: there are no graphs yet."""
        self.asked, self.done = None, []
