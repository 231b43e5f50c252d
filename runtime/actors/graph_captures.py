"""Has the ranks capture steps as graphs, between other steps and when they are idle. What to capture is
decided in scheduling/graph_captures.py. Of several attention groups it is the first one's scheduler that is
observed: a graph serves a step of all groups, which have about as many sequences each."""

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Protocol

from runtime import log
from runtime.messages.ranks import Capture, Captured
from runtime.metrics import Metrics
from runtime.scheduling.graph_captures import Captures
from runtime.scheduling.scheduler import Scheduler


class CapturingRanks(Protocol):
    """The ranks of one generation (actors/ranks.py), as far as captures concern them."""

    captured: list[Captured]  # replies that have come
    num_changes: int  # changes of memory, after which steps must be captured again

    def submit(self, plan: Capture) -> bool:
        """Sends a command to all ranks. False: there is no room now."""
        ...


class GraphCapturing:
    """Observes each round of the scheduler, and asks for one capture at a time, of the first kind that has
    one left."""

    def __init__(
        self,
        captures: Sequence[Captures],
        metrics: Metrics,
        others: Callable[[], Iterable[Scheduler]] = tuple,
    ) -> None:
        """`captures`: one for each kind of graph; `others`: schedulers of other attention groups, which the
        ranks compute for as well."""
        self._others = others
        self._captures = {each.unit: each for each in captures}
        self._metrics = metrics
        self._ranks: tuple[CapturingRanks, int] | None = None
        # steps so far, those with prompts in them, tokens of these prompts; of the others, steps with drafts
        self._counted = (0, 0, 0, 0)
        self._log = log.get("graphs")

    def observe(self, scheduler: Scheduler, ranks: CapturingRanks) -> None:
        """Takes replies, and asks for the next capture if there is one to ask for now."""
        kinds = self._captures.values()
        if (ranks, ranks.num_changes) != self._ranks:
            if self._ranks is not None and self._ranks[0] is not ranks:
                self._take_replies(self._ranks[0])  # they may have ended in a capture
            for captures in kinds:
                captures.restart()
            self._ranks = ranks, ranks.num_changes
        self._take_replies(ranks)
        self._count_steps(scheduler)
        if (
            scheduler.is_suspended
            or all(kind.is_complete for kind in kinds)
            or any(kind.asked is not None for kind in kinds)
        ):
            return
        schedulers = (scheduler, *self._others())
        is_idle = not any(one.roster.live or one.num_in_flight for one in schedulers)
        for captures in kinds:
            size = captures.next(monotonic(), is_idle=is_idle)
            if size is not None:
                if not ranks.submit(Capture(size, captures.unit)):
                    captures.unsent()
                return

    def _count_steps(self, scheduler: Scheduler) -> None:
        """Counts which sizes would have been used: the few steps between two rounds count as alike."""
        totals, rows = scheduler.totals, scheduler.roster.num_running
        now = (totals.steps, totals.prompt_steps, totals.known_tokens, totals.verify_steps)
        steps, with_prompts, known, with_drafts = (
            after - before for after, before in zip(now, self._counted, strict=True)
        )
        self._counted = now
        if "sequences" in self._captures:
            self._captures["sequences"].ran(rows, steps - with_prompts - with_drafts)
        if "verifies" in self._captures:
            self._captures["verifies"].ran(rows, with_drafts)
        if with_prompts and "tokens" in self._captures:
            self._captures["tokens"].ran(known // with_prompts + rows, with_prompts)

    def _take_replies(self, ranks: CapturingRanks) -> None:
        while ranks.captured:
            reply = ranks.captured.pop(0)
            self._captures[reply.unit].answered(reply, monotonic())
            self._log_reply(reply, self._captures[reply.unit])

    def _log_reply(self, reply: Captured, captures: Captures) -> None:
        size: dict[str, int] = {reply.unit: reply.size}
        self._metrics.capture_s.add(reply.seconds)
        if reply.error:
            self._metrics.capture_failures.add(1)
            self._log.warning(
                "steps of this size could not be captured: they, and those of larger sizes that are not "
                "captured yet, are launched kernel by kernel",
                **size,
                reason=reply.error,
            )
            return
        gauges = {
            "sequences": self._metrics.captured_sizes,
            "verifies": self._metrics.captured_verifies,
            "tokens": self._metrics.captured_piecewise,
        }
        gauges[reply.unit].set(len(captures.done))
        self._log.info(
            "captured",
            **size,
            seconds=round(reply.seconds, 3),
            mib=round(reply.num_bytes / 2**20, 1),
            done=len(captures.done),
            of=len(captures.sizes),
        )
