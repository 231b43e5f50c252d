"""How many tokens running sequences will still generate: what admission keeps free, so that new sequences do
not cause preemptions.

Clients allow more tokens than answers take. Which part of it is taken is remembered of the last sequences
that ended; each running one is expected to do as one of those that got as far. The sum of all need not
be free: a sequence that ends gives back its pages, so the peak lies where one of the sequences ends.
(The past-future scheduler of Gong et al., 2025, arXiv:2507.10150, reasons like this.)

A sequence that has to give way all the same raises the forecast at once, and it comes down slowly: that is
the hysteresis which keeps a full cache from preempting, admitting and preempting again.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from runtime.cache.sequence import Sequence

MAX_FUTURE = 4096  # tokens of one sequence that are worth foreseeing: further ahead others will have ended
MEMORY = 128  # sequences
RAISE = 1.5  # of the forecast, at each preemption
MAX_RAISE = 8.0
CALM = 0.98  # what is left of a raise after each step
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, lie evenly


class Forecast:
    """Tokens to come, times `conservativeness` (1 is what experience says, 0 expects nothing), and of each
    sequence at least as many as lack to `reserved` tokens."""

    def __init__(self, conservativeness: float = 1.0, reserved: int = 0) -> None:
        self.conservativeness = conservativeness
        self._reserved = reserved
        # taken of what was allowed; before anything is known: any part
        self._parts = deque([0.25, 0.5, 0.75, 1.0], MEMORY)
        self._sorted: list[float] = []  # the same in order; empty: to be sorted
        self._raise = 1.0

    def ended(self, used: int, allowed: int) -> None:
        """A sequence took `used` of `allowed` tokens."""
        if not allowed:
            return
        self._parts.append(min(used / min(allowed, MAX_FUTURE), 1.0))
        self._sorted = []

    def preempted(self) -> None:
        """A sequence was preempted: raises the forecast."""
        self._raise = min(self._raise * RAISE, MAX_RAISE)

    def step(self) -> None:
        """A step is planned: a raise wears off."""
        if self._raise > 1.0:
            self._raise = max(1.0, self._raise * CALM)

    def future(self, sequence: Sequence) -> int:
        """Tokens that it is expected to take yet. The same question gets the same answer, another sequence
        another one."""
        if not self._sorted:
            self._sorted = sorted(self._parts)
        parts = self._sorted
        prompt_len = sequence.prompt_len
        generated = len(sequence.tokens) - prompt_len
        allowed = min(sequence.max_len - prompt_len, MAX_FUTURE)
        if not allowed:
            return 0
        left = sequence.max_len - prompt_len - generated
        shorter = bisect_right(parts, generated / allowed)
        if shorter < len(parts):
            luck = sequence.id * GOLDEN % 1.0
            wanted = parts[shorter + int(luck * (len(parts) - shorter))] * allowed - generated
        else:
            wanted = generated / 2  # longer than all that are remembered
        expected = int(min(wanted * self._raise, left) * self.conservativeness)
        return max(expected, min(self._reserved - generated, left))

    def peak(self, sequences: Iterable[Sequence]) -> int:
        """Most tokens that these sequences will hold at once, beyond what they hold now; what they found in
        the cache stays there."""
        wants = sorted([(self.future(s), len(s.tokens) - s.cached_len) for s in sequences], reverse=True)
        held = peak = 0
        for count, (future, own) in enumerate(wants, 1):  # when this one ends, those before it still run
            held += own
            peak = max(peak, held + count * future)
        return peak - held
