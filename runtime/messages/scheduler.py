"""Messages of the channels to and from the scheduler."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from runtime.errors import RequestError
from runtime.messages.requests import NO_SOURCES, CacheSources, FinishReason, Request, TokenLogprob


class Abort(Struct, frozen=True, tag=True):
    """End every sequence of this request: its client has left, or it was aborted. Unknown ids are ignored."""

    request_id: str
    is_forwarded: bool = False  # by a replica that has handed its requests to others


class Stopped(Struct, frozen=True, tag=True):
    """End these sequences and free their pages: the detokenizer has found a stop string. Unknown ids are
    ignored."""

    sequence_ids: list[int]
    is_forwarded: bool = False  # as in Abort


class Arrive(Struct, frozen=True, tag=True):
    """A tokenised request joins the waiting queue."""

    request: Request


# running sequences end (abort), wait again (retract), or keep their pages (in_place)
PauseMode = Literal["abort", "retract", "in_place"]


class Pause(Struct, frozen=True, tag=True):
    """Plan no steps until Continue. `answer` is called when no step is in flight any more."""

    mode: PauseMode
    answer: Callable[[None | RequestError], None]


class Continue(Struct, frozen=True, tag=True):
    """Plan steps again."""


class SuspendPlanning(Struct, frozen=True, tag=True):
    """Plan no steps until ResumePlanning, while the ranks' memory changes. `answer` is called when no step is
    in flight any more, or with an error. With `drops_pages` the device's pages are lost, and all prefixes
    that are in no other tier."""

    drops_pages: bool
    answer: Callable[[None | RequestError], None]


class ResumePlanning(Struct, frozen=True, tag=True):
    """Plan steps again, unless there is a Pause."""


class Unload(Struct, frozen=True, tag=True):
    """No request has this adapter any more: the ranks may drop it."""

    adapter: int


class Flush(Struct, frozen=True, tag=True):
    """Empty the prefix cache. `answer` is called with the number of freed pages, or with an error."""

    answer: Callable[[int | RequestError], None]


ToScheduler = Arrive | Abort | Stopped | Pause | Continue | SuspendPlanning | ResumePlanning | Flush | Unload


class Opened(Struct, frozen=True, tag=True):
    """A request was added: the ids of its `n` sequences, in order of their indices."""

    request: Request
    sequence_ids: list[int]


class Ended(Struct, frozen=True):
    """A sequence has ended, with its last token in StepTokens or without one."""

    sequence_id: int
    reason: FinishReason
    matched: int | None  # the stop token or end-of-text token; None: a limit
    cached_tokens: int  # prompt tokens that were found in the prefix cache
    loaded: CacheSources = NO_SOURCES  # tiers that cached tokens came from


class StepTokens(Struct, frozen=True, tag=True):
    """The tokens of one step, in parallel lists, and the sequences that end with it."""

    sequence_ids: list[int]
    token_ids: list[int]
    ended: list[Ended]
    logprobs: dict[int, list[TokenLogprob]]  # by sequence id, where requested: one for each token
    # by sequence id, where requested, with the first token
    prompt_logprobs: dict[int, Sequence[TokenLogprob]]
    cached: dict[int, int] = {}  # by sequence id, with its first token: prompt tokens in the prefix cache
    # by sequence id, with its first token or its vector, where its prompt has media: how many of them were
    # encoded for it, and the seconds of the encoder
    encoded: dict[int, tuple[int, float]] = {}
    loaded: dict[int, CacheSources] = {}  # by sequence id: tiers that cached tokens came from
    vectors: dict[int, np.ndarray] = {}  # by sequence id: results of a model that pools, in place of tokens
    # by sequence id, where requested: hidden states, float32 [n, size]; the prompt's with the first token
    hidden: dict[int, np.ndarray] = {}
    # by sequence id, where requested: routed experts, int32 [n, layers * top_k]; as `hidden`
    experts: dict[int, np.ndarray] = {}
    # by sequence id: tokens after the one in `token_ids`, where a step brought several
    more: dict[int, list[int]] = {}
    # by sequence id: drafts that the step verified, and how many of them became tokens
    verified: dict[int, tuple[int, int]] = {}


class Refused(Struct, frozen=True, tag=True):
    """The scheduler refused a request (`status` 400, 429 or 503 with a safe message), or gave it up because
    it kills the ranks (500). None of its sequences runs."""

    request_id: str
    status: int
    message: str
    param: str | None = None


ToDetokenizer = Opened | StepTokens | Refused
