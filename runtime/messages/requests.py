"""Requests and what becomes of them: from a client's prompt to the deltas of its answer.

client ─ GenerateRequest ─► tokenizer ─ Request ─► scheduler ...  detokenizer ─ Delta ─► client
"""

from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from runtime.errors import RequestError
from runtime.messages.constraint import Grammar
from runtime.messages.sampling import SamplingParams


class Text(Struct, frozen=True, tag=True):
    """A prompt as text. `add_special` adds what the tokenizer adds to a fresh text (a BOS token, mostly)."""

    text: str
    add_special: bool = True


class Tokens(Struct, frozen=True, tag=True):
    """A prompt as token ids."""

    ids: list[int]


class Chat(Struct, frozen=True, tag=True):
    """A conversation for the chat template: messages, tools and the template's own variables."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = {}
    continue_final: bool = False  # the last message is the beginning of the answer


class Infill(Struct, frozen=True, tag=True):
    """What stands before and after the text that is wanted, for the model's fill-in-the-middle format."""

    prefix: str
    suffix: str


class Pair(Struct, frozen=True, tag=True):
    """Two texts that are read apart: a model judges how they go together, or goes on from both."""

    text: str
    second: str


class Embeds(Struct, tag=True):
    """A prompt as embeddings, one row of numbers for each token. As JSON they are many times their size, so
    the tokenizer puts what it made of them in their place."""

    rows: Any  # a float32 array [tokens, hidden], anything that makes one, or each row as JSON (msgspec.Raw)
    ids: list[int] | None = None  # the tokens that they stand for, where there are any


Prompt = Text | Tokens | Chat | Infill | Pair | Embeds


class AdapterRef(Struct, frozen=True):
    """A loaded adapter, as a request has it."""

    id: int
    digest: str  # of what it holds
    is_pinned: bool = False  # never leaves the device


class SessionParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in a session a request belongs (admin/sessions.py), in SGLang's words."""

    id: str
    rid: str | None = None  # the request that it goes on from; None: a new beginning
    # tokens of that one's text to keep; negative: to leave off at its end; None, 0: all
    offset: int | None = None
    replace: bool | None = None  # what went on from there before ends and is forgotten
    drop_previous_output: bool | None = None  # go on from the prompt alone


class Before(Struct):
    """The tokens before a session's request; `prompt_ids` is set by the tokenizer, to all that the request
    begins with."""

    token_ids: list[int]
    prompt_ids: list[int] = []


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """A request as it came in, before its prompt is tokenized."""

    id: str
    prompt: Prompt
    params: SamplingParams
    arrival_s: float
    priority: int | None = None  # this and the next: see Request
    is_idle: bool = False
    tenant: str = ""
    routing_key: str = ""
    cache_salt: str = ""  # the prefix cache is shared with requests of the same salt only
    adapter: str = ""  # by name; "": the plain model
    adapter_ref: AdapterRef | None = None  # the same, as it is now: set at the door
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    session: SessionParams | None = None
    before: Before | None = None  # of its session: set at the door
    marks: tuple[str, ...] = ()  # see Request
    pools: bool = False  # it wants a vector, not text
    # keep so many tokens of the prompt; -1: as many as fit; None: all, or refuse. Only with `pools`
    truncate: int | None = None


class GrammarConstraint(Struct, frozen=True, array_like=True):
    """What the tokens of a sequence must keep to."""

    grammar: Grammar
    # the grammar holds from where one of these was generated; (): from the first token on
    after_ids: tuple[tuple[int, ...], ...]
    stop_ids: tuple[int, ...]  # what may end the text where the grammar lets it end


class Request(Struct, frozen=True, kw_only=True):
    """A tokenised request. `prompt_ids` is never empty; `seed` is always set, so every run can be
    repeated."""

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
    grammar_constraint: GrammarConstraint | None = None
    # special tokens in these texts are not skipped: calls and thoughts are read out of the answer by them
    marks: tuple[str, ...] = ()
    # float32 [prompt, hidden]: what the prompt's tokens are embedded as, in place of the model's own
    embeds: np.ndarray | None = None
    adapter: AdapterRef | None = None
    # where the second of two texts begins, for models that tell them apart; 0: there is one
    second_at: int = 0


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # eos, a stop token or a stop string
    LENGTH = "length"  # max_new_tokens or the context length
    ABORT = "abort"  # the client left or asked for it


class CacheSources(Struct, frozen=True, array_like=True):
    """Of a sequence's cached tokens, those that the device did not have when it was first admitted."""

    host: int = 0  # were in host memory
    storage: int = 0  # were fetched from storage for it


NO_SOURCES = CacheSources()


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
    loaded: CacheSources = NO_SOURCES  # of them


class Delta(Struct):
    """What one or more steps added to sequence `index` of a request. The last one of a sequence has `finish`
    set."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    # this and the next are set in the first delta of a sequence: streams report usage before the end
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_ids: list[int] | None = None
    vector: np.ndarray | None = None  # float32: with the end of a sequence of a model that pools
    # what it says, where an answer is read for more than text (http/streaming/answer_reader.py)
    events: list[Any] | None = None
    reasoning_tokens: int = 0  # that are known to be thoughts since the delta before
    loaded: CacheSources = NO_SOURCES  # of the cached tokens; set with them
    hidden: list[np.ndarray] | None = None  # float32 [n, size] of each token; the first brings the prompt's


class Sink(Protocol):
    """Where a request's output goes. Called on the event loop, within the step's fan-out: must not block or
    raise.

    For each of the `n` sequences exactly one Delta has `finish` set, unless `fail` is called: then nothing
    follows.
    """

    def push(self, delta: Delta) -> None: ...

    def fail(self, error: RequestError) -> None: ...
