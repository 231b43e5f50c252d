"""Holds newcomers back for a few steps, so that several prompts share one (`--enable-prefill-delayer`).

A step that computes prompts takes longer than one that only decodes, for all streams in it. Where prompts
trickle in one by one, every step is such a step. Waiting until the prompts that have come fill a step makes
few long steps out of many, at the price of a later first token for some. No prompt is held back when nothing
decodes, when a prompt is under way already, when there is plenty of room
(`--prefill-delayer-token-usage-low-watermark`), or for more than so many steps.

Attention groups (--enable-dp-attention) compute each step together, and it takes as long as its slowest
group: there it is enough that all have some prompt. One decision is made for all of them (JointDelayer).
"""

from collections.abc import Callable, Sequence
from time import monotonic

from msgspec import Struct

from runtime.scheduling.admission import Admission
from runtime.scheduling.roster import Roster


class Replica(Struct, frozen=True):
    """What a replica, or an attention group, could take in now."""

    has_prompts: bool
    is_full: bool  # its prompts fill a step, or take all slots
    usage: float  # of its pages, by sequences that run
    decodes: bool = True  # it would have a step without prompts


def replica_of(roster: Roster, admission: Admission, *, decodes: bool) -> Replica:
    """What the scheduler of these could take in now."""
    cache, has_prompts = roster.cache, roster.waiting.has_ready and roster.has_free_slot
    most = min(roster.max_running - roster.num_running, admission.max_prompts or roster.max_running)
    is_full = has_prompts and roster.waiting.fills(admission.max_step_tokens, most)
    usage = (cache.num_used - cache.tree.num_evictable) / cache.pool.num_pages
    return Replica(has_prompts, is_full, usage, decodes)


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
        """Whether waiting prompts start in the next step; False counts as a step of delay. They do where
        nothing decodes."""
        if not any(r.decodes for r in replicas):
            return True
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


class JointDelayer:
    """The delayer of attention groups: all of them start prompts in the same steps."""

    def __init__(self, delayer: Delayer, groups: Sequence[tuple[Roster, Admission]]) -> None:
        self._delayer = delayer
        self._groups = groups
        self._admits: bool | None = None  # decided for the step at hand

    def begin(self) -> None:
        """The next step is planned, group by group."""
        self._admits = None

    def admits(self, replicas: Sequence[Replica]) -> bool:
        """Whether waiting prompts start in this step, whichever group asks. They do where a prompt of any
        group is under way."""
        if self._admits is None:
            self._admits = any(roster.extending for roster, _ in self._groups) or self._delayer.admits(
                [
                    replica_of(roster, admission, decodes=bool(roster.decoding))
                    for roster, admission in self._groups
                ]
            )
        return self._admits
