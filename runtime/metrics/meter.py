"""Latencies and throughput, measured from the scheduler actor's events: sequences arrive, are admitted, get
tokens and end."""

import math

from runtime.messages.requests import Request
from runtime.messages.scheduler import StepTokens
from runtime.metrics.table import Metrics

WINDOW_S = 2.0


class Meter:
    """Feeds the histograms. One call a step; about 0.1 µs a token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived: dict[int, float] = {}  # sequence id -> arrival, seconds of the monotonic clock
        self._last: dict[int, float] = {}  # sequence id -> when its latest token came
        self._previous_s = 0.0  # when the latest step's tokens came
        self._window_s = math.inf  # when the window of the throughput began
        self._window_tokens = 0
        self._tokens_per_s = 0.0

    def tokens_per_s(self, now_s: float) -> float:
        """Throughput of the last full window; 0 when nothing has run since."""
        return self._tokens_per_s if now_s - self._previous_s < WINDOW_S else 0.0

    def opened(self, request: Request, sequence_ids: list[int]) -> None:
        """A request has joined the queue."""
        self._metrics.requests.add(1)
        for kind in {one.kind for one in request.media}:
            self._metrics.media_requests[kind.value] += 1
        self._arrived |= dict.fromkeys(sequence_ids, request.arrival_s)

    def admitted(self, now_s: float, sequence_ids: list[int]) -> None:
        """Sequences were admitted for the first time."""
        for i in sequence_ids:
            if (arrival := self._arrived.get(i)) is not None:
                self._metrics.queue_s.observe(now_s - arrival)

    def delayed(self, reason: str, steps: int, seconds: float) -> None:
        """The prefill delayer has admitted requests after a delay."""
        self._metrics.delays[reason] += 1
        self._metrics.delay_steps.observe(steps)
        self._metrics.delay_s.observe(seconds)

    def step(self, now_s: float, tokens: StepTokens, compute_s: float, encode_s: float = 0.0) -> None:
        """A step's result has come, after `compute_s` of the ranks' time, and `encode_s` of the encoder's
        before it."""
        self._metrics.steps.add(1)
        if encode_s:
            self._metrics.media_encode_s.observe(encode_s)
        self._metrics.step_s.observe(compute_s)
        self.tokens(now_s, tokens)

    def tokens(self, now_s: float, tokens: StepTokens) -> None:
        """Tokens have come, of a step or of another server."""
        metrics, last, previous = self._metrics, self._last, self._previous_s
        num_tokens = len(tokens.token_ids) + sum(map(len, tokens.more.values()))
        metrics.generated_tokens.add(num_tokens)
        for drafted, accepted in tokens.verified.values():
            metrics.draft_tokens.add(drafted)
            metrics.accepted_drafts.add(accepted)
            metrics.drafted.observe(drafted)
            metrics.accepted.observe(accepted)
        in_stride = 0  # sequences whose last token came with the previous step: their gap is the same
        for i in tokens.sequence_ids:
            before = last.get(i)
            if before == previous:
                in_stride += 1
            elif before is not None:
                metrics.itl_s.observe(now_s - before)
            elif (arrival := self._arrived.get(i)) is not None:
                metrics.ttft_s.observe(now_s - arrival)
            last[i] = now_s
        if in_stride:
            metrics.itl_s.observe(now_s - previous, in_stride)
        self._previous_s = now_s
        if now_s - previous > WINDOW_S:  # it was idle
            self._window_s, self._window_tokens = now_s, 0
        self._window_tokens += num_tokens
        if (length := now_s - self._window_s) >= WINDOW_S:
            self._tokens_per_s = self._window_tokens / length
            self._window_s, self._window_tokens = now_s, 0
        self.ended(now_s, tokens)

    def ended(self, now_s: float, tokens: StepTokens) -> None:
        """Sequences have ended."""
        for end in tokens.ended:
            self._metrics.finished[end.reason.value] += 1
            self._forget(now_s, end.sequence_id)

    def stopped(self, now_s: float, sequence_ids: list[int]) -> None:
        """Sequences that the detokenizer ended at a stop string."""
        for i in sequence_ids:
            if i in self._arrived:
                self._metrics.finished["stop"] += 1
                self._forget(now_s, i)

    def refused(self, sequence_ids: list[int]) -> None:
        """Sequences that ended before their first token: they count in no latency."""
        for i in sequence_ids:
            self._arrived.pop(i, None)
        self._metrics.refused["503"] += 1

    def failed(self, now_s: float, sequence_ids: list[int]) -> None:
        """The sequences of a request that was given up."""
        self._metrics.failed.add(1)
        for i in sequence_ids:
            self._forget(now_s, i)

    def leaked(self, num_pages: int) -> None:
        """The audit of the cache has found pages without an owner, or with two."""
        self._metrics.cache_leaks.add(num_pages)

    def move(self, sequence_ids: list[int], target: "Meter") -> None:
        """Sequences go on with another scheduler, which `target` belongs to."""
        for i in sequence_ids:
            for own, other in ((self._arrived, target._arrived), (self._last, target._last)):
                if (at := own.pop(i, None)) is not None:
                    other[i] = at

    def _forget(self, now_s: float, sequence_id: int) -> None:
        self._last.pop(sequence_id, None)
        if (arrival := self._arrived.pop(sequence_id, None)) is not None:
            self._metrics.e2e_s.observe(now_s - arrival)
