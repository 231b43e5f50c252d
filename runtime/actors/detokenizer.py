"""The detokenizer actor: pushes the text of a step's tokens to the sinks of all open requests, in one
synchronous pass.

Knows text, stop strings and sinks; knows nothing of pages, slots or ranks. A sequence is kept here from
Opened until it has ended: by the scheduler (eos, stop token, length, abort), by a stop string found here, or
because its request was closed.

The token that ends a sequence (eos or a stop token) counts in `token_ids`, `completion_tokens` and
`logprobs`; its text is left out, unless `include_stop` is set. Tokens after a stop string are not output.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from runtime import log
from runtime.actors.channels import Channel
from runtime.actors.open_requests import OpenRequests
from runtime.errors import InternalFault, InvalidRequest, Overloaded, RequestError, TooLarge, Unavailable
from runtime.messages.media import MediaKind, MediaUsage
from runtime.messages.requests import NO_SOURCES, Delta, DraftCounts, Finish, FinishReason, Request, Sink
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import Abort, Ended, Opened, Refused, StepTokens, Stopped, ToDetokenizer
from runtime.text.detokenize import TextStream
from runtime.text.stop_regex import RegexSearch, StopRegexes
from runtime.text.stop_strings import StopSearch, StopStrings
from runtime.text.vocabulary import Vocabulary

REFUSALS: dict[int, type[RequestError]] = {
    error.status: error for error in (InvalidRequest, TooLarge, Overloaded, Unavailable)
}


class SequenceOutput:
    """The text and the token counts of one sequence."""

    __slots__ = (
        "id",
        "request",
        "index",
        "sink",
        "text",
        "search",
        "num_tokens",
        "cached_tokens",
        "loaded",
        "is_plain",
        "hidden",
        "experts",
        "drafts",
        "media",
    )

    def __init__(
        self,
        id: int,
        request: Request,
        index: int,
        sink: Sink,
        text: TextStream,
        search: StopSearch | RegexSearch | None,
    ) -> None:
        self.id = id
        self.request = request
        self.index = index
        self.sink = sink
        self.text = text
        self.search = search
        self.num_tokens = 0
        self.cached_tokens = 0
        self.loaded = NO_SOURCES
        # hidden state of the last token, where it is returned at the end
        self.hidden: np.ndarray | None = None
        self.experts: list[np.ndarray] = []  # routed experts so far; they are returned at the end
        self.drafts: DraftCounts | None = None
        self.media: MediaUsage | None = (
            None  # of a prompt with images, videos or sounds, from the first token on
        )
        self.is_plain = False  # no stop strings or hidden states; known from the first token on

    def add(self, token_id: int, step: StepTokens, end: Ended | None) -> Delta:
        """The delta of a step's tokens. It has `finish` set if `end` is given or a stop string is found."""
        if step.verified and (verified := step.verified.get(self.id)) is not None:
            self.drafts = self.drafts or DraftCounts()
            self.drafts.add(*verified)
        run = step.more.get(self.id)
        if run is None:
            return self._add(token_id, step, end)
        delta = self._add(token_id, step, None)
        for count, token in enumerate(run, 1):
            if delta.finish is not None:
                break
            following = self._add(token, step, end if count == len(run) else None)
            delta.text += following.text
            delta.token_ids.append(token)
            delta.finish = following.finish
        if delta.logprobs is not None:
            delta.logprobs = step.logprobs[self.id][: len(delta.token_ids)]
        return delta

    def _add(self, token_id: int, step: StepTokens, end: Ended | None) -> Delta:
        params = self.request.params
        is_first = not self.num_tokens
        if is_first:
            self.cached_tokens = step.cached.get(self.id, 0)
            self.loaded = step.loaded.get(self.id, NO_SOURCES)
            self.media = self._media_usage(step)
            self.is_plain = self.search is None and not params.reports_tokens
        self.num_tokens += 1
        is_silent = end is not None and end.reason is FinishReason.STOP and not params.include_stop
        text = "" if is_silent else self.text.add(token_id)
        delta = Delta(self.index, text, [token_id], step.logprobs.get(self.id))
        if is_first:
            delta.prompt_ids = self.request.prompt_ids
            delta.prompt_tokens, delta.cached_tokens, delta.loaded = (
                len(delta.prompt_ids),
                self.cached_tokens,
                self.loaded,
            )
            delta.prompt_logprobs = step.prompt_logprobs.get(self.id)
        if params.hidden_states is not None and (states := step.hidden.get(self.id)) is not None:
            if params.hidden_states == "all":
                delta.hidden = [states]
            else:
                self.hidden = states
        if params.routed_experts is not None and (experts := step.experts.get(self.id)) is not None:
            self.experts.append(experts[params.routed_experts :] if is_first else experts)
        self._finish(delta, end)
        self._add_reports(delta)
        return delta

    def end(self, end: Ended, step: StepTokens) -> Delta:
        """The delta of a sequence that ends without another token."""
        delta = Delta(self.index, "", [])
        if not self.num_tokens:
            self.cached_tokens = end.cached_tokens
            self.media = self._media_usage(step)
            delta.prompt_ids = self.request.prompt_ids
            delta.prompt_tokens = len(delta.prompt_ids)
        self._finish(delta, end)
        self._add_reports(delta)
        return delta

    def _add_reports(self, delta: Delta) -> None:
        if delta.finish is None:
            return
        if self.hidden is not None:
            delta.hidden = [self.hidden]
        delta.experts = self.experts or None

    def _finish(self, delta: Delta, end: Ended | None) -> None:
        """Searches the delta's text for stop strings, and sets `finish` where the sequence ends."""
        params, search = self.request.params, self.search
        if end is not None:
            delta.text += self.text.flush()
            self.cached_tokens, self.loaded = end.cached_tokens, end.loaded
        if search is not None:
            if self.num_tokens > params.min_new_tokens:
                delta.text = search.feed(delta.text, keep_match=params.include_stop)
            if search.matched is not None:
                delta.finish = self._finished(FinishReason.STOP, search.matched)
                return
            if end is not None:
                delta.text += search.flush()
        if end is not None:
            delta.finish = self._finished(end.reason, end.matched)

    def _finished(self, reason: FinishReason, matched: str | int | None) -> Finish:
        return Finish(
            reason,
            matched,
            len(self.request.prompt_ids),
            self.num_tokens,
            self.cached_tokens,
            self.loaded,
            self.drafts,
            self.media,
        )

    def _media_usage(self, step: StepTokens) -> MediaUsage | None:
        if not self.request.media:
            return None
        return media_usage(self.request, self.cached_tokens, *step.encoded.get(self.id, (0, 0.0)))


def media_usage(request: Request, cached_tokens: int, num_encoded: int, encode_s: float) -> MediaUsage:
    """What the images, videos and sounds of a request took, of whose prompt `cached_tokens` were found."""
    tokens: Counter[MediaKind] = Counter()
    cached: Counter[MediaKind] = Counter()
    for one in request.media:
        tokens[one.kind] += one.num_tokens(len(request.prompt_ids))
        cached[one.kind] += one.num_tokens(cached_tokens)
    return MediaUsage(dict(tokens), dict(cached), len(request.media), num_encoded, encode_s)


def searches(params: SamplingParams) -> Callable[[], StopSearch | RegexSearch | None]:
    """A factory of the search for stop strings in each sequence of a request."""
    if params.stop_regex:
        regexes = StopRegexes(params.stop_regex, params.stop)
        return lambda: RegexSearch(regexes)
    if params.stop:
        stops = StopStrings(params.stop)
        return lambda: StopSearch(stops)
    return lambda: None


class DetokenizerActor:
    """Messages in: Opened, StepTokens, Refused. Out: Delta to sinks, Stopped and Abort to the scheduler."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        open_requests: OpenRequests,
        inbox: Channel[ToDetokenizer],
        to_scheduler: Callable[[Stopped | Abort], None],
    ) -> None:
        """`to_scheduler` must take a message without waiting or raising."""
        self._vocabulary = vocabulary
        self._open_requests = open_requests
        self._inbox = inbox
        self._to_scheduler = to_scheduler
        self._sequences: dict[int, SequenceOutput] = {}
        self._requests: dict[str, set[int]] = {}  # ids of the sequences that have not ended
        self._log = log.get("detokenizer")
        open_requests.closed.subscribe(self._forget)

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    async def run(self) -> None:
        """Serves until the inbox is closed or the task is cancelled."""
        async for messages in self._inbox:
            for message in messages:
                self.handle(message)

    def handle(self, message: ToDetokenizer) -> None:
        """Takes one message in."""
        match message:
            case StepTokens():
                self._step(message)
            case Opened(request=request, sequence_ids=ids):
                self._open(request, ids)
            case Refused(request_id=request_id, status=status, message=text, param=param):
                self._open_requests.fail(request_id, REFUSALS.get(status, InternalFault)(text, param=param))

    def _open(self, request: Request, sequence_ids: list[int]) -> None:
        sink = self._open_requests.find(request.id)
        if sink is None:
            return  # aborted while it was tokenised or scheduled
        params = request.params
        search = searches(params)
        self._requests[request.id] = set(sequence_ids)
        for index, sequence_id in enumerate(sequence_ids):
            text = self._vocabulary.stream(request.prompt_ids, params.skip_special_tokens, request.marks)
            self._sequences[sequence_id] = SequenceOutput(sequence_id, request, index, sink, text, search())

    def _step(self, step: StepTokens) -> None:
        sequences = self._sequences
        ended = {end.sequence_id: end for end in step.ended}
        has_logprobs = bool(step.logprobs)
        stopped: list[int] = []
        more = step.more
        for sequence_id, token_id in zip(step.sequence_ids, step.token_ids, strict=True):
            sequence = sequences.get(sequence_id)
            if sequence is None:
                continue  # aborted, or ended by a stop string before the scheduler knew
            try:
                if (
                    sequence.is_plain
                    and not has_logprobs
                    and sequence_id not in ended
                    and sequence_id not in more
                ):
                    sequence.num_tokens += 1
                    sequence.sink.push(Delta(sequence.index, sequence.text.add(token_id), [token_id]))
                    continue
                end = ended.get(sequence_id)
                delta = sequence.add(token_id, step, end)
                if delta.finish is not None and end is None:
                    stopped.append(sequence_id)
                self._push(sequence, delta)
            except Exception:
                self._give_up(sequence)
        for sequence_id, end in ended.items():
            if (sequence := sequences.get(sequence_id)) is not None:
                try:
                    delta = sequence.end(end, step)
                    delta.vector = step.vectors.get(sequence_id)
                    self._push(sequence, delta)
                except Exception:
                    self._give_up(sequence)
        if stopped:
            self._to_scheduler(Stopped(stopped))

    def _push(self, sequence: SequenceOutput, delta: Delta) -> None:
        """Pushes a delta. The request is closed before its last delta, so that a sink may reuse its id."""
        if delta.finish is not None:
            del self._sequences[sequence.id]
            unfinished = self._requests[sequence.request.id]
            unfinished.discard(sequence.id)
            if not unfinished:
                self._open_requests.close(sequence.request.id)
        sequence.sink.push(delta)

    def _give_up(self, sequence: SequenceOutput) -> None:
        """A sink or a text has raised, which is a bug: ends this request with an error, and no other."""
        request_id = sequence.request.id
        self._log.exception("a step's output could not be delivered", request=request_id, exc_info=True)
        if request_id in self._open_requests:
            self._to_scheduler(Abort(request_id))  # before `close`, which forgets the request's replica
            self._open_requests.close(request_id)
        try:
            sequence.sink.fail(
                InternalFault(
                    f"the output could not be delivered; the server's log has the details under {request_id}"
                )
            )
        except Exception:
            self._log.exception("its client could not be informed", request=request_id, exc_info=True)

    def _forget(self, request_id: str) -> None:
        for sequence_id in self._requests.pop(request_id, ()):
            self._sequences.pop(sequence_id, None)
