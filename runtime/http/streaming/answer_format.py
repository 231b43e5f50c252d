"""How an API writes its answers, and the outputs of sequences from which it writes them."""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import structs

from runtime.errors import RequestError
from runtime.http.streaming.pace import joined
from runtime.messages.requests import NO_SOURCES, Delta, Finish, FinishReason, TokenLogprob
from runtime.parsing.events import Event


class Output:
    """The output of one sequence, as far as it has come."""

    __slots__ = (
        "text",
        "token_ids",
        "logprobs",
        "prompt_logprobs",
        "prompt_tokens",
        "cached_tokens",
        "loaded",
        "finish",
        "prompt_ids",
        "events",
        "reasoning_tokens",
        "vector",
        "hidden",
        "experts",
        "first_ns",
    )

    def __init__(self) -> None:
        self.first_ns = 0  # arrival of the first delta, on the monotonic clock
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.loaded = NO_SOURCES
        self.prompt_ids: list[int] = []
        self.events: list[Event] | None = None
        self.reasoning_tokens = 0
        self.finish: Finish | None = None
        self.vector: np.ndarray | None = None
        # hidden states: the prompt's, then a row for each token but the last
        self.hidden: list[np.ndarray] = []
        self.experts: list[np.ndarray] = []  # routed experts, in the same order

    def add(self, delta: Delta) -> None:
        """Appends a delta of the sequence."""
        self.first_ns = self.first_ns or time.monotonic_ns()
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.prompt_tokens = delta.prompt_tokens or self.prompt_tokens
        if delta.cached_tokens:
            self.cached_tokens, self.loaded = delta.cached_tokens, delta.loaded
        self.prompt_ids = delta.prompt_ids or self.prompt_ids
        self.events = joined(self.events, delta.events)
        self.reasoning_tokens += delta.reasoning_tokens
        self.finish = delta.finish or self.finish
        if delta.vector is not None:
            self.vector = delta.vector
        self.hidden += delta.hidden or ()
        self.experts += delta.experts or ()

    def as_delta(self) -> Delta:
        """The whole output as the only delta of sequence 0, for formats that write answers and streams
        alike."""
        return Delta(
            0,
            self.text,
            self.token_ids,
            self.logprobs or None,
            finish=self.finish,
            prompt_tokens=self.prompt_tokens,
            events=self.events,
            reasoning_tokens=self.reasoning_tokens,
        )

    def silence(self) -> None:
        """Takes the generated text and tokens out; log probabilities stay."""
        self.text, self.token_ids = "", []
        self.finish = None if self.finish is None else _nothing(self.finish)


def silenced(delta: Delta) -> Delta:
    """A delta without its text and tokens; log probabilities stay."""
    return structs.replace(
        delta, text="", token_ids=[], finish=None if delta.finish is None else _nothing(delta.finish)
    )


def _nothing(finish: Finish) -> Finish:
    reason = finish.reason if finish.reason is FinishReason.ABORT else FinishReason.LENGTH
    return Finish(
        reason, None, finish.prompt_tokens, 0, finish.cached_tokens, finish.loaded, media=finish.media
    )


class AnswerFormat(Protocol):
    """How an API writes the answer to one request. Choices are numbered over all prompts of the request."""

    @property
    def answer_type(self) -> object:
        """The type of the answer in one piece, as in the OpenAPI document."""
        ...

    def events(self, choice: int, delta: Delta) -> bytes:
        """The stream events of a delta; empty for a delta without news."""
        ...

    def tail(self) -> bytes:
        """The last events of a stream that went well."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that failed."""
        ...

    def body(self, outputs: list[Output]) -> object:
        """The answer in one piece: a value of the type `answer_type`, or one that converts to it."""
        ...
