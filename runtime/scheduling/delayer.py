"""Holds newcomers back for a few steps, so that several prompts share one (`--enable-prefill-delayer`).

A step that computes prompts takes longer than one that only decodes, for all streams in it. Where prompts
trickle in one by one, every step is such a step. Waiting until the prompts that have come fill a step makes
few long steps out of many, at the price of a later first token for some. No prompt is held back when nothing
decodes, when a prompt is under way already, when there is plenty of room
(`--prefill-delayer-token-usage-low-watermark`), or for more than so many steps.

With several data-parallel replicas a step takes as long as its slowest one: there it is enough that all have
some prompt. `admits` is given all of them, in one process.
"""

from collections.abc import Callable, Sequence
from time import monotonic

from msgspec import Struct


class Replica(Struct, frozen=True):
    """What a replica could take in now."""

    has_prompts: bool
    is_full: bool  # its prompts fill a step, or take all slots
    usage: float  # of its pages, by sequences that run


class Delayer:
    """Asked once for each step in which newcomers could start."""

    def __init__(
        self,
        max_steps: int,
        low_watermark: float | None,
        clock: Callable[[], float] = monotonic,
        on_admit: Callable[[str, int, float], None] = lambda reason, steps, seconds: None,
    ) -> None:
        """`on_admit` is called with the reason, the steps and the seconds of each delay that ends."""
        self.max_steps = max_steps
        self.low_watermark = low_watermark
        self.held_steps = 0  # for which the newcomers of this moment have been held back
        self._on_admit = on_admit
        self._clock = clock
        self._since_s = 0.0

    def admits(self, replicas: Sequence[Replica]) -> bool:
        """Whether waiting prompts start in the next step; False counts as a step of delay."""
        reason = self._reason(replicas)
        if reason is None:
            if not self.held_steps:
                self._since_s = self._clock()
            self.held_steps += 1
            return False
        self._on_admit(reason, self.held_steps, self._clock() - self._since_s if self.held_steps else 0.0)
        self.held_steps = 0
        return True

    def _reason(self, replicas: Sequence[Replica]) -> str | None:
        """Why to admit now; None: there is none."""
        if all(r.is_full for r in replicas) or (len(replicas) > 1 and all(r.has_prompts for r in replicas)):
            return "full"
        if self.low_watermark is not None and any(
            r.has_prompts and r.usage < self.low_watermark for r in replicas
        ):
            return "watermark"
        return "limit" if self.held_steps >= self.max_steps else None
