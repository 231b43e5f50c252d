"""Messages of the channels to and from the scheduler."""

from collections.abc import Callable
from typing import Literal

import numpy as np
from msgspec import Struct

from runtime.errors import RequestError
from runtime.messages.requests import NO_SOURCES, CacheSources, FinishReason, Request, TokenLogprob


class Abort(Struct, frozen=True, tag=True):
    """The client is gone or has asked to stop: finish every sequence of this request. Unknown ids are
    ignored."""

    request_id: str


class Stopped(Struct, frozen=True, tag=True):
    """The detokenizer has ended these sequences (stop string found): free their pages."""

    sequence_ids: list[int]


class Arrive(Struct, frozen=True, tag=True):
    """A tokenised request joins the waiting queue."""

    request: Request


# what becomes of the sequences that run: they end, wait again, or stay where they are
PauseMode = Literal["abort", "retract", "in_place"]


class Pause(Struct, frozen=True, tag=True):
    """Plan no steps until Continue. `answer` is called when no step is in flight any more."""

    mode: PauseMode
    answer: Callable[[None], None]


class Continue(Struct, frozen=True, tag=True):
    """Plan steps again."""


class SuspendPlanning(Struct, frozen=True, tag=True):
    """To the scheduler: plan no steps until ResumePlanning, as the ranks' memory changes. `answer` is called
    when no step is in flight any more, or with why that cannot be now. With `drops_pages` the device's pages
    go, and all prefixes that are nowhere else."""

    drops_pages: bool
    answer: Callable[[None | RequestError], None]


class ResumePlanning(Struct, frozen=True, tag=True):
    """To the scheduler: plan steps again, unless there is a Pause."""


class Unload(Struct, frozen=True, tag=True):
    """No request has this adapter any more: ranks may forget it."""

    adapter: int


class Flush(Struct, frozen=True, tag=True):
    """Empty the prefix cache. `answer` gets the number of pages that were freed, or why that cannot be done
    now."""

    answer: Callable[[int | RequestError], None]


ToScheduler = Arrive | Abort | Stopped | Pause | Continue | SuspendPlanning | ResumePlanning | Flush | Unload


class Opened(Struct, frozen=True, tag=True):
    """Sequences that exist from now on: the `n` sequences of a request, ids in order of their index."""

    request: Request
    sequence_ids: list[int]


class Ended(Struct, frozen=True):
    """A sequence has ended with the last token given for it (or without one)."""

    sequence_id: int
    reason: FinishReason
    matched: int | None  # the stop token id, unless it is the model's own eos
    cached_tokens: int
    loaded: CacheSources = NO_SOURCES  # of them


class StepTokens(Struct, frozen=True, tag=True):
    """The tokens of one step, in parallel lists, and the sequences that end with it."""

    sequence_ids: list[int]
    token_ids: list[int]
    ended: list[Ended]
    logprobs: dict[int, list[TokenLogprob]]  # by sequence id, where asked for: of each of its tokens
    prompt_logprobs: dict[int, list[TokenLogprob]]  # by sequence id, when the prompt is complete
    # by sequence id, with its first token: prompt tokens found in the prefix cache
    cached: dict[int, int] = {}
    loaded: dict[int, CacheSources] = {}  # of them, where there are any that the device did not have
    vectors: dict[int, np.ndarray] = {}  # by sequence id, of sequences that end with one in place of tokens
    # by sequence id, where asked for: float32 [n, size], the prompt's with the first token
    hidden: dict[int, np.ndarray] = {}
    # by sequence id: tokens that follow the one in `token_ids`, where a step brought several
    more: dict[int, list[int]] = {}


class Refused(Struct, frozen=True, tag=True):
    """The scheduler turned a request down (`status` 400, 429 or 503 with a safe message), or gave it up
    because it kills the ranks (500); nothing of it is running."""

    request_id: str
    status: int
    message: str
    param: str | None = None


ToDetokenizer = Opened | StepTokens | Refused
