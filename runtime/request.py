"""A request (what was asked) and a sequence (its tokens and how far they are computed)."""

from array import array
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from runtime.constraint import Grammar
from runtime.errors import RequestError
from runtime.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # eos, a stop token or a stop string
    LENGTH = "length"  # max_new_tokens or the context length
    ABORT = "abort"  # the client left or asked for it


class Guide(Struct, frozen=True, array_like=True):
    """What the tokens of a sequence must keep to."""

    grammar: Grammar
    after_ids: tuple[tuple[int, ...], ...]  # the grammar holds from where one of these was generated; (): from the first token on
    stop_ids: tuple[int, ...]  # what may end the text where the grammar lets it end


class AdapterRef(Struct, frozen=True):
    """A loaded adapter, as a request has it."""

    id: int
    digest: str  # of what it holds
    is_pinned: bool = False  # never leaves the device


class Request(Struct, frozen=True, kw_only=True):
    """A tokenised request. `prompt_ids` is never empty; `seed` is always set, so every run can be repeated."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_s: float  # monotonic
    priority: int | None = None  # None: after all that have one
    is_idle: bool = False  # runs in what others leave, and gives way to any of them
    tenant: str = ""  # whose share of the runtime it uses; "": nobody's in particular
    routing_key: str = ""  # requests of one key run together under --schedule-policy routing-key
    namespace: str = ""  # of the prefix cache: nothing is shared across, in any tier (see cache/namespace.py)
    queue_timeout_s: float | None = None  # longest wait for its first step
    timeout_s: float | None = None  # longest life
    guide: Guide | None = None
    marks: tuple[str, ...] = ()  # special tokens in these texts are not skipped: calls and thoughts are read out of the answer by them
    embeds: np.ndarray | None = None  # float32 [prompt, hidden]: what the prompt's tokens are embedded as, in place of the model's own
    adapter: AdapterRef | None = None
    second_at: int = 0  # where the second of two texts begins, for models that tell them apart; 0: there is one


class Loaded(Struct, frozen=True, array_like=True):
    """Of a sequence's cached tokens, those that the device did not have when it was first admitted."""

    host: int = 0  # were in host memory
    storage: int = 0  # were fetched from storage for it


NOTHING_LOADED = Loaded()


class Sequence:
    """One of a request's `n` answers: prompt and generated tokens, and the pages that hold their keys and values.

    Invariant: 0 <= cached_len <= computed_len <= len(tokens) + in_flight and len(tokens) <= max_len.

    [0, cached_len)             came from the prefix cache when the sequence was last admitted
    [cached_len, computed_len)  keys and values written by steps that were submitted since
    [computed_len, len(tokens)) known tokens still to be computed
    in_flight                   sampled by submitted steps, not yet known here
    repeated                    sampled by submitted steps, but known here from a run of tokens that came before
    """

    __slots__ = ("id", "request", "index", "tokens", "prompt_len", "max_len", "cached_len", "computed_len",
                 "in_flight", "pages", "slot", "node", "first_cached_len", "loaded_len", "is_finished", "stop_ids", "level", "match",
                 "window", "state", "fetched_len", "first_loaded", "repeated")

    def __init__(self, id: int, request: Request, index: int, max_len: int, stop_ids: frozenset[int]) -> None:
        self.id = id
        self.request = request
        self.index = index
        self.tokens = array("i", request.prompt_ids)
        self.prompt_len = len(request.prompt_ids)
        self.max_len = max_len
        self.stop_ids = stop_ids  # the model's eos among them, unless ignored
        self.cached_len = 0
        self.computed_len = 0
        self.in_flight = 0
        self.repeated = 0
        self.pages: list[int] = []
        self.slot = -1
        self.node: Any = None  # cache.prefix.Node: deepest locked node of the prefix tree
        self.window: Any = None  # cache.window.Span: what it holds in the windows' pool, where there is one
        self.state: Any = None  # cache.states.Held: its state slots, where the model has recurrent layers
        self.loaded_len = 0  # of cached_len: came back from host memory
        self.fetched_len = 0  # tokens whose pages were fetched from storage while it waited
        self.first_loaded = NOTHING_LOADED  # at the first admission
        self.first_cached_len = -1  # cached tokens at the first admission; what usage reports
        self.is_finished = False
        self.level = 0  # the lower, the sooner it is taken and the later it gives way: from the priority, or from ageing
        self.match: Any = None  # cache.prefix.Node: where the tree was last seen to match, while waiting

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def is_decoding(self) -> bool:
        """Whether a submitted step has computed the prompt, so that its first own token exists or is in flight."""
        return len(self.tokens) + self.in_flight > self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Asked for, and not given yet."""
        return self.request.params.prompt_logprobs is not None and len(self.tokens) == self.prompt_len

    @property
    def wants_prompt_hidden(self) -> bool:
        """Hidden states of the whole prompt: asked for, and not given yet."""
        return self.request.params.hidden_states == "all" and len(self.tokens) == self.prompt_len

    @property
    def is_whole(self) -> bool:
        """All of its prompt must be computed, whatever is cached: something is told of each of its tokens."""
        return self.wants_prompt_logprobs or self.wants_prompt_hidden


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token with its log probability before temperature and penalties, and the alternatives beside it."""

    token_id: int
    logprob: float | None  # None: the first token of a prompt has none
    top: list[tuple[int, float]]
    picked: list[tuple[int, float]] = []  # of the tokens that the request names in logprob_ids


class Finish(Struct, frozen=True):
    """How a sequence ended, and what it used."""

    reason: FinishReason
    matched: str | int | None  # the stop string or token id that ended it; None for eos and length
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    loaded: Loaded = NOTHING_LOADED  # of them


class Delta(Struct):
    """What one or more steps added to sequence `index` of a request. The last one of a sequence has `finish` set."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    prompt_tokens: int = 0  # this and the next are set in the first delta of a sequence: streams report usage before the end
    cached_tokens: int = 0
    prompt_ids: list[int] | None = None
    vector: np.ndarray | None = None  # float32: with the end of a sequence of a model that pools
    events: list[Any] | None = None  # what it says, where an answer is read for more than text (http/reading.py)
    thought_tokens: int = 0  # that are known to be thoughts since the delta before
    loaded: Loaded = NOTHING_LOADED  # of the cached tokens; set with them
    hidden: list[np.ndarray] | None = None  # float32 [n, size] of each token; the first brings the prompt's


class Sink(Protocol):
    """Where a request's output goes. Called on the event loop, within the step's fan-out: must not block or raise.

    For each of the `n` sequences exactly one Delta has `finish` set, unless `fail` is called: then nothing follows.
    """

    def push(self, delta: Delta) -> None: ...

    def fail(self, error: RequestError) -> None: ...
