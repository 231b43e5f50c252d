"""Requests and their output: from a client's prompt to the deltas of its answer.

client ─ GenerateRequest ─► tokenizer ─ Request ─► scheduler ...  detokenizer ─ Delta ─► client
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Protocol, overload

import numpy as np
from msgspec import Struct

from runtime.errors import RequestError
from runtime.json_value import JsonDict
from runtime.messages.constraint import Grammar
from runtime.messages.media import MediaInput, MediaSource, MediaUsage
from runtime.messages.sampling import SamplingParams
from runtime.messages.tenants import DEFAULT_TENANT, Tenant
from runtime.messages.transfer import Transfer
from runtime.parsing.events import Event


class Text(Struct, frozen=True, tag=True):
    """A prompt as text. `add_special` adds what the tokenizer adds to a fresh text (a BOS token, mostly)."""

    text: str
    add_special: bool = True


class Tokens(Struct, frozen=True, tag=True):
    """A prompt as token ids."""

    ids: list[int]


class Chat(Struct, frozen=True, tag=True):
    """A conversation for the chat template: messages, tools and the template's own variables."""

    messages: list[JsonDict]
    tools: list[JsonDict] | None = None
    template_args: JsonDict = {}
    continue_final: bool = False  # the last message is the beginning of the answer


class Infill(Struct, frozen=True, tag=True):
    """Text before and after a gap that the model fills, in its fill-in-the-middle format."""

    prefix: str
    suffix: str


class Pair(Struct, frozen=True, tag=True):
    """Two texts that are tokenised one by one: a model scores how they go together, or continues both."""

    text: str
    second: str


class Embeds(Struct, tag=True):
    """A prompt as embeddings, one row of numbers for each token. The tokenizer replaces JSON rows, which are
    many times as large, by an array."""

    # a float32 array [tokens, hidden], or rows: as lists of numbers, or each as JSON (msgspec.Raw)
    rows: np.ndarray | Sequence[object]
    ids: list[int] | None = None  # token ids of the rows; None: they stand for no tokens


Prompt = Text | Tokens | Chat | Infill | Pair | Embeds


class AdapterRef(Struct, frozen=True):
    """The adapter that a request uses."""

    id: int
    digest: str  # of the adapter's files
    is_pinned: bool = False  # never leaves the device


class SessionParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of a request in a session (admin/sessions.py), with SGLang's field names."""

    id: str  # of the session
    rid: str | None = None  # id of the request to continue; None: begin anew
    # tokens to keep of the continued request; negative: to drop at its end; None, 0: keep all
    offset: int | None = None
    replace: bool | None = None  # end and forget requests that continued the same one before
    drop_previous_output: bool | None = None  # continue the prompt alone, without the output


class Before(Struct):
    """Tokens that a session puts before a request. The tokenizer sets `prompt_ids` to the whole prompt."""

    token_ids: list[int]
    prompt_ids: list[int] = []


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """A request as it came in, before its prompt is tokenized."""

    id: str
    prompt: Prompt
    params: SamplingParams
    arrival_s: float
    priority: int | None = None  # scheduling priority, as in Request.priority
    is_idle: bool = False  # as in Request.is_idle
    tenant: Tenant = DEFAULT_TENANT  # who sends it
    routing_key: str = ""  # as in Request.routing_key
    replica: int | None = None  # as in Request.replica
    transfer: Transfer | None = None  # as in Request.transfer
    cache_salt: str = ""  # the prefix cache is shared with requests of the same salt only
    adapter: str = ""  # name of a LoRA adapter; "": none
    adapter_ref: AdapterRef | None = None  # the adapter that has this name, set when the request is taken in
    queue_timeout_s: float | None = None  # longest wait for the first step
    timeout_s: float | None = None  # longest time from arrival to end
    session: SessionParams | None = None
    before: Before | None = None  # tokens of the session, set when the request is taken in
    marks: tuple[str, ...] = ()  # as in Request.marks
    labels: tuple[tuple[str, str], ...] = ()  # of the client, for metrics
    traceparent: str = ""  # W3C header that names the client's span; "": none
    prediction: str = ""  # what the client expects the answer to be like
    # images, videos and sounds, in the order of their parts in the prompt
    media: tuple[MediaSource, ...] = ()
    pools: bool = False  # the answer is a vector, not text
    # tokens of the prompt to keep; -1: as many as fit; None: all, or refuse. Only with `pools`
    truncate: int | None = None


class Thinking(Struct, frozen=True, array_like=True):
    """How many tokens a sequence may reason, and the markers of reasoning as tokens."""

    budget: int
    begins: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]  # of each of `begins`
    open: int  # place of the markers of the reasoning that the prompt left open; -1: none is open
    is_anywhere: bool = False  # reasoning may begin anywhere; else at the start, or behind other reasoning

    @property
    def is_never(self) -> bool:
        """Whether the answer is none but content."""
        return self.budget == 0 and self.open < 0 and not self.is_anywhere


class GrammarConstraint(Struct, frozen=True, array_like=True):
    """The grammar that the tokens of a sequence must follow, and the budget of its reasoning."""

    grammar: Grammar | None  # None: any text
    # the grammar applies after one of these token sequences was generated; (): from the first token on
    after_ids: tuple[tuple[int, ...], ...]
    stop_ids: tuple[int, ...]  # tokens that may end the text where the grammar allows an end
    thinking: Thinking | None = None  # None: reasoning has no budget


class TokenBans(Struct, frozen=True, array_like=True):
    """Tokens that a request excludes from its answer."""

    # uint8: bit i of byte k says whether token 8 k + i may be sampled; empty: every token may
    allowed: np.ndarray
    bad_words: tuple[tuple[int, ...], ...]  # token sequences that do not occur in the answer

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """Bad words of several tokens: whether their last token is banned depends on the answer so far."""
        return tuple([word for word in self.bad_words if len(word) > 1])


class Request(Struct, frozen=True, kw_only=True):
    """A tokenised request. `prompt_ids` is never empty; `seed` is always set, so that every run can be
    repeated."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_s: float  # monotonic clock
    priority: int | None = None  # scheduling priority; None: after all requests that have one
    # runs only with capacity that other requests leave, and is preempted by any of them
    is_idle: bool = False
    tenant: str = ""  # name of the tenant whose share of the runtime the request uses
    routing_key: str = ""  # requests of one key run together under --schedule-policy routing-key
    replica: int | None = None  # the replica that it asks for; None: any
    transfer: Transfer | None = (
        None  # another server computes the other half of it; None: all of it is done here
    )
    namespace: str = ""  # of the prefix cache: pages are shared within a namespace only (cache/namespace.py)
    queue_timeout_s: float | None = None  # longest wait for the first step
    timeout_s: float | None = None  # longest time from arrival to end
    grammar_constraint: GrammarConstraint | None = None
    token_bans: TokenBans | None = None  # of params.allowed_token_ids and params.bad_words
    # texts whose special tokens are not skipped: parsers of tool calls and reasoning need them in the answer
    marks: tuple[str, ...] = ()
    # float32 [prompt, hidden]: embeddings of the prompt's tokens, in place of the model's own
    embeds: np.ndarray | None = None
    adapter: AdapterRef | None = None
    media: tuple[MediaInput, ...] = ()  # in the order of `start`; their tokens do not overlap
    prediction: list[int] = []  # tokens that the client expects in the answer: drafts
    # position where the second of two texts begins, for models with token types; 0: there is one text
    second_at: int = 0

    @property
    def has_bad_sequences(self) -> bool:
        """Whether the ranks must know the answer so far to ban the last token of a bad word."""
        return self.token_bans is not None and bool(self.token_bans.sequences)


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # eos, a stop token or a stop string
    LENGTH = "length"  # max_new_tokens or the context length
    ABORT = "abort"  # the client left, or the request was aborted


class CacheSources(Struct, frozen=True, array_like=True):
    """How many of a sequence's cached tokens were not on the device when it was first admitted."""

    host: int = 0  # tokens that were in host memory
    storage: int = 0  # tokens that were fetched from storage


NO_SOURCES = CacheSources()


class Alternatives(Sequence[tuple[int, float]]):
    """Tokens and their log probabilities, as pairs that exist while they are looked at: an answer may have a
    million of them, and twenty objects a token would keep the garbage collector busy."""

    __slots__ = ("_ids", "_logprobs")

    def __init__(self, ids: bytes, logprobs: bytes) -> None:
        """`ids` and `logprobs`: the bytes of int32 and float32 [n]."""
        self._ids = ids
        self._logprobs = logprobs

    def __len__(self) -> int:
        return len(self._ids) // 4

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(memoryview(self._ids).cast("i"), memoryview(self._logprobs).cast("f"), strict=True)

    @overload
    def __getitem__(self, at: int) -> tuple[int, float]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, float]]: ...

    def __getitem__(self, at: int | slice) -> tuple[int, float] | Sequence[tuple[int, float]]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """A token with its log probability, before temperature and penalties, and those of alternatives. The
    garbage collector looks at none of it: there may be a million."""

    token_id: int
    logprob: float | None  # None: the first token of a prompt has none
    top: Sequence[tuple[int, float]]  # most probable tokens and their log probabilities
    picked: Sequence[tuple[int, float]] = ()  # those of the tokens in SamplingParams.logprob_ids


class DraftCounts(Struct):
    """What became of a sequence's drafts."""

    drafted: int = 0
    # of rows that verified drafts: how many had 0, 1, 2, ... of them accepted
    histogram: list[int] = []

    def add(self, drafted: int, accepted: int) -> None:
        """One more row."""
        self.drafted += drafted
        if accepted >= len(self.histogram):
            self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += 1

    @property
    def rows(self) -> int:
        """Rows that verified drafts."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Drafts that became tokens."""
        return sum([count * rows for count, rows in enumerate(self.histogram)])


class Finish(Struct, frozen=True):
    """How a sequence ended, and its token counts."""

    reason: FinishReason
    # the stop string, or the id of the stop token or end-of-text token, that ended it; None: another reason
    matched: str | int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that were found in the prefix cache
    loaded: CacheSources = NO_SOURCES  # tiers that cached tokens came from
    drafts: DraftCounts | None = None  # None: there were none
    media: MediaUsage | None = None  # None: the prompt has no images, videos or sounds


class Delta(Struct):
    """The output of one or more steps for sequence `index` of a request. The last delta of a sequence has
    `finish` set."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None  # of the whole prompt, in one delta
    finish: Finish | None = None
    prompt_tokens: int = 0  # set in the first delta of a sequence: streams report usage before the end
    cached_tokens: int = 0  # set in the first delta of a sequence
    prompt_ids: list[int] | None = None  # set in the first delta of a sequence
    # float32: the result of a model that pools, with the end of its sequence
    vector: np.ndarray | None = None
    # text, reasoning and tool calls parsed from the text (http/streaming/answer_reader.py); None: not parsed
    events: list[Event] | None = None
    reasoning_tokens: int = 0  # tokens that were recognised as reasoning since the previous delta
    loaded: CacheSources = NO_SOURCES  # tiers that cached tokens came from; set in the first delta
    hidden: list[np.ndarray] | None = None  # hidden states, float32 [n, size]; the first with the prompt's
    # with the end: routed experts, int32 [n, layers * top_k], of tokens from params.routed_experts on
    experts: list[np.ndarray] | None = None


class Sink(Protocol):
    """Receives a request's output. Called on the event loop, while a step's tokens are handed out: must not
    block or raise.

    For each of the `n` sequences exactly one Delta has `finish` set, unless `fail` is called: then nothing
    follows.
    """

    def push(self, delta: Delta) -> None:
        """Takes the next output of a sequence."""
        ...

    def fail(self, error: RequestError) -> None:
        """The request has ended with an error."""
        ...
