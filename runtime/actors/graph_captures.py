"""Has the ranks capture steps, between the steps and when nothing is to do. What to capture is in
scheduling/graph_captures.py."""

from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from runtime import log
from runtime.messages.ranks import Capture, Captured
from runtime.metrics import Metrics
from runtime.scheduling.graph_captures import Captures
from runtime.scheduling.scheduler import Scheduler


class CapturingRanks(Protocol):
    """What it needs of the ranks of one generation (actors/ranks.py)."""

    captured: list[Captured]  # answers that have come; the ranks wake whoever waits for results
    num_changes: int  # that no captured graph outlives

    def submit(self, plan: Capture) -> bool: ...


class Capturing:
    """Looked at after each round of the scheduler. One capture is asked for at a time, of the first kind that
    has one to ask for."""

    def __init__(self, captures: Sequence[Captures], metrics: Metrics) -> None:
        self._captures = {each.unit: each for each in captures}
        self._metrics = metrics
        self._ranks: tuple[CapturingRanks, int] | None = None
        self._seen = (0, 0, 0)  # steps, those with prompts in them, tokens of these prompts
        self._log = log.get("graphs")

    def look(self, scheduler: Scheduler, ranks: CapturingRanks) -> None:
        kinds = self._captures.values()
        if (ranks, ranks.num_changes) != self._ranks:
            if self._ranks is not None and self._ranks[0] is not ranks:
                self._hear(self._ranks[0])  # they may have ended over a capture
            for captures in kinds:
                captures.restart()
            self._ranks = ranks, ranks.num_changes
        self._hear(ranks)
        self._ran(scheduler)
        if (
            scheduler.is_suspended
            or all(kind.is_complete for kind in kinds)
            or any(kind.asked is not None for kind in kinds)
        ):
            return
        is_idle = not (scheduler.roster.live or scheduler.num_in_flight)
        for captures in kinds:
            size = captures.next(monotonic(), is_idle=is_idle)
            if size is not None:
                if not ranks.submit(Capture(size, captures.unit)):
                    captures.unsent()
                return

    def _ran(self, scheduler: Scheduler) -> None:
        """Notes which sizes would have been used: between two looks there are so few steps that they count as
        alike."""
        totals, rows = scheduler.totals, scheduler.roster.num_running
        now = (totals.steps, totals.prompt_steps, totals.known_tokens)
        steps, with_prompts, known = (after - before for after, before in zip(now, self._seen, strict=True))
        self._seen = now
        if "sequences" in self._captures:
            self._captures["sequences"].ran(rows, steps - with_prompts)
        if with_prompts and "tokens" in self._captures:
            self._captures["tokens"].ran(known // with_prompts + rows, with_prompts)

    def _hear(self, ranks: CapturingRanks) -> None:
        while ranks.captured:
            answer = ranks.captured.pop(0)
            self._captures[answer.unit].answered(answer, monotonic())
            self._tell(answer, self._captures[answer.unit])

    def _tell(self, answer: Captured, captures: Captures) -> None:
        size: dict[str, int] = {answer.unit: answer.size}
        self._metrics.capture_s.add(answer.seconds)
        if answer.error:
            self._metrics.capture_failures.add(1)
            self._log.warning(
                "steps of this size, and of larger ones that are not captured yet, are launched kernel by kernel: they could "
                "not be captured",
                **size,
                reason=answer.error,
            )
            return
        (
            self._metrics.captured_sizes if answer.unit == "sequences" else self._metrics.captured_piecewise
        ).set(len(captures.done))
        self._log.info(
            "captured",
            **size,
            seconds=round(answer.seconds, 3),
            mib=round(answer.num_bytes / 2**20, 1),
            done=len(captures.done),
            of=len(captures.sizes),
        )
