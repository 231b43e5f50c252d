"""What HTTP, gRPC and the library use of the runtime: the Service protocol, and the types of its answers.

`core.py` provides it; tests of the HTTP layer provide a small one of their own (tests/http/fake.py).
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from runtime.errors import InvalidRequest
from runtime.json_value import Fields
from runtime.messages.media import AlignmentFacts, Media, MediaSource, TranscriptionFacts
from runtime.messages.memory import Part
from runtime.messages.ranks import ExpertCounts, ExpertCountsAction, Profile
from runtime.messages.requests import GenerateRequest, Prompt, Sink
from runtime.messages.sampling import Limits
from runtime.messages.scheduler import PauseMode
from runtime.messages.tenants import DEFAULT_TENANT, Tenant
from runtime.messages.transfer import Role
from runtime.messages.weight_facts import WeightFacts
from runtime.models.config.pooling import Pooling
from runtime.parsing.detect import AnswerFormats

State = Literal["loading", "ready", "paused", "released", "recovering", "draining", "failed", "closed"]


class Health(Struct, frozen=True):
    """What the runtime can do at this moment. While it is loading, paused, released or recovering, requests
    are taken in and wait. `detail` is safe to show. While it is loading or recovering, `phase` says what it
    does, and `fraction` how much of this phase is done, from 0 to 1."""

    state: State
    detail: str = ""
    phase: str | UnsetType = UNSET
    fraction: float | UnsetType = UNSET


class CacheReport(Struct, frozen=True):
    """How `usage` reports the tiers that cached tokens came from."""

    storage: str | None  # the backend of the storage tier; None: there is none


class AdapterCard(Struct, frozen=True):
    """A loaded adapter."""

    name: str
    folder: str
    rank: int
    created: int  # unix seconds
    is_pinned: bool
    owner: str = ""  # name of the tenant that loaded it and alone may use it; "": all tenants may


def adapters_for(tenant: Tenant, cards: Mapping[str, AdapterCard]) -> Mapping[str, AdapterCard]:
    """The adapters that exist for a tenant: those that are for all, and its own."""
    if tenant.sees_all:
        return cards
    return {name: card for name, card in cards.items() if not card.owner or card.owner == tenant.name}


class ModelCard(Struct, frozen=True, kw_only=True):
    """What clients may know of the served model."""

    name: str
    created: int  # unix seconds
    limits: Limits
    # defaults of SamplingParams for OpenAI requests, `preferred` among them
    sampling_defaults: Fields = {}
    formats: AnswerFormats = AnswerFormats()  # how tool calls and reasoning are written in answers
    preferred: Fields = {}  # defaults of SamplingParams for all requests: --preferred-sampling-params
    has_grammars: bool = False  # answers can be constrained
    pooling: Pooling | None = (
        None  # how an embedding model or classifier pools; None: the model generates text
    )
    reads_items_apart: bool = False  # --multi-item-scoring-delimiter
    weight_version: str = "default"  # the operator's name of the weights
    storage: str | None = None  # the backend of the storage tier; None: there is none
    adapters: Mapping[str, AdapterCard] = {}  # loaded adapters by name; changes as they come and go
    transcription: TranscriptionFacts | None = None  # None: the model transcribes nothing
    weights: WeightFacts = WeightFacts()
    has_cache_report: bool = False  # `usage` reports the tiers that cached tokens came from

    @property
    def cache_report(self) -> CacheReport | None:
        """How `usage` reports the tiers of cached tokens; None: it does not."""
        return CacheReport(self.storage) if self.has_cache_report else None


def check_task(request: GenerateRequest, pooling: Pooling | None) -> None:
    """Raises InvalidRequest for a request to generate from a model that pools, or to pool from one that
    generates."""
    if request.pools and pooling is None:
        raise InvalidRequest(
            "this model generates text; vectors and scores need an embedding model (--is-embedding) or a "
            "classifier"
        )
    if pooling is not None and not request.pools:
        raise InvalidRequest("this model makes vectors or scores of texts; it generates none")


class Load(Struct, frozen=True, kw_only=True):
    """How busy the runtime is now; of several replicas, the sums."""

    running: int = 0  # sequences
    waiting: int = 0  # sequences
    used_pages: int = 0  # held by running sequences or by the prefix cache
    cached_pages: int = 0  # held by the prefix cache only, which gives them up when they are needed
    total_pages: int = 0
    page_size: int  # tokens
    used_host_pages: int = 0  # copies of cached pages in host memory
    total_host_pages: int = 0
    used_window_pages: int = 0  # used pages of sliding-window layers, where they have a pool of their own
    cached_window_pages: int = 0  # used pages of sliding-window layers that only the prefix cache holds
    total_window_pages: int = 0  # pages of sliding-window layers; 0: they share the pages of all layers
    steps: int = 0  # planned since the start
    tokens_per_s: float = 0.0  # generated
    waiting_tokens: int = 0  # known tokens of waiting sequences
    max_running: int = 0  # sequences that can run at once
    prompt_tokens: int = 0  # tokens of prompts that were admitted since the start
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache since the start
    weights_bytes: int = 0  # device memory of all ranks
    pages_bytes: int = 0  # device memory of all ranks
    verified_rows: int = 0  # rows whose drafts were verified since the start
    drafted_tokens: int = 0  # drafts of these rows
    accepted_drafts: int = 0  # of them, those that became tokens
    each: tuple["Load", ...] = ()  # of several replicas: of each, by index

    @property
    def demand(self) -> float:
        """How often open requests would fill the pages, or the places of running sequences if that is more.
        Above 1.0 requests wait; waiting ones count with their known tokens."""
        tokens = (self.used_pages - self.cached_pages) * self.page_size + self.waiting_tokens
        sequences = self.running + self.waiting
        return max(tokens / max(self.total_pages * self.page_size, 1), sequences / max(self.max_running, 1))


class OpenRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that has not ended. Its tokens are the sums of its sequences."""

    rid: str
    tenant: str  # the name of its tenant
    state: Literal["tokenizing", "waiting", "running"]
    age_s: float | None = None  # seconds since it came; None while it is tokenised, as the numbers are 0 then
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that were found in the prefix cache
    completion_tokens: int = 0  # so far
    max_completion_tokens: int = 0


class TokenizerInfo(Struct, frozen=True):
    """What clients may know of the tokenizer."""

    special_tokens: dict[str, str]  # bos_token, eos_token, ...
    chat_template: str | None  # source of the template for ordinary chats


class LogChange(Struct, frozen=True, kw_only=True):
    """What to change of the log; None: nothing."""

    log_requests: bool | None = None
    log_requests_level: Literal[0, 1, 2, 3] | None = None
    log_requests_format: Literal["text", "json"] | None = None
    log_level: str | None = None  # a name in log.LEVELS


class ExpertControls(Protocol):
    """Counts of tokens per expert."""

    async def count(self, action: ExpertCountsAction, folder: str = "") -> ExpertCounts:
        """Does `action` (read, start, stop, or dump to `folder`). -> the counts so far. Raises InvalidRequest
        where nothing is recorded, Unavailable."""
        ...


class HalfControls(Protocol):
    """Which half of requests a server computes (--disaggregation-mode)."""

    async def change(self, mode: Literal["prefill", "decode"]) -> Role:
        """Takes the other half of requests from now on. -> what the server does now. Raises InvalidRequest
        where it cannot, Unavailable while it starts."""
        ...


class SoundControls(Protocol):
    """What transcriptions need beside their requests."""

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        """Files as the model takes them. Raises InvalidRequest, which names the file."""
        ...

    async def align(
        self, sound: Media, token_ids: list[int], num_given: int, facts: AlignmentFacts, tenant: str
    ) -> np.ndarray:
        """How well each token of a transcription goes with each position of the sound, float32 [tokens,
        positions]. `token_ids`: what the decoder is given, of which the first `num_given` are left out;
        `tenant`: name of the one that asks. Raises InvalidRequest, Unavailable."""
        ...


class Controls(Protocol):
    """What operators can do besides sending requests. Everything raises Unavailable while the model loads,
    and when it cannot be served any more."""

    @property
    def experts(self) -> ExpertControls:
        """Counts of tokens per expert."""
        ...

    @property
    def halves(self) -> HalfControls | None:
        """Of a server that computes a half of each request."""
        ...

    def configure_logging(self, change: LogChange) -> LogChange:
        """Changes what the server logs. -> what it logs now. Raises InvalidRequest where requests cannot be
        logged."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Plans no steps from now on; returns when none is in flight. Requests that come wait."""
        ...

    async def resume(self) -> None:
        """Plans steps again."""
        ...

    async def flush(self) -> int:
        """Empties the prefix cache. -> pages freed. Raises Busy while sequences run."""
        ...

    async def clear_storage(self) -> int:
        """Deletes this model's pages from the storage tier. -> how many. Raises InvalidRequest where there is
        no storage tier, Unavailable."""
        ...

    def tokenizer_info(self) -> TokenizerInfo:
        """What clients may know of the tokenizer."""
        ...

    async def tokenize(self, prompt: Prompt, media: Sequence[MediaSource] = ()) -> list[int]:
        """The token ids of a prompt with these images, videos and sounds. Raises InvalidRequest."""
        ...

    @property
    def sounds(self) -> "SoundControls":
        """What transcriptions need."""
        ...

    def abort(self, prefix: str, tenant: Tenant = DEFAULT_TENANT) -> int:
        """Ends those requests of `tenant` whose id begins with `prefix`; their clients get the tokens so far,
        with reason abort. -> how many"""
        ...

    def open_requests(self, most: int, tenant: Tenant = DEFAULT_TENANT) -> tuple[int, list[OpenRequest]]:
        """-> how many requests of `tenant` have not ended, and the oldest `most` of them."""
        ...

    def start_profile(self, params: Profile) -> str:
        """The ranks begin to record where their time goes. -> the folder that they will write to. Raises
        InvalidRequest while they record a profile."""
        ...

    def stop_profile(self) -> str:
        """The ranks write the profile. -> its folder. Raises InvalidRequest when none is recorded."""
        ...

    def open_session(
        self,
        capacity: int,
        session_id: str | None = None,
        idle_s: float | None = None,
        *,
        is_line: bool = False,
        tenant: Tenant = DEFAULT_TENANT,
    ) -> str:
        """Opens a session of `tenant` for up to `capacity` tokens. `idle_s`: seconds without a request after
        which it is closed; `is_line`: each request continues the last one. -> its id. Raises InvalidRequest,
        Overloaded."""
        ...

    def close_session(self, session_id: str, tenant: Tenant = DEFAULT_TENANT) -> None:
        """Closes a session. Raises NotFound, also for a session of another tenant."""
        ...


class MemoryControls(Protocol):
    """The ranks' memory. Requests wait while it changes, and while any part is released. All methods raise
    Busy while requests run that are not paused, and Unavailable when the ranks take no commands now."""

    async def release(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """Releases parts; None: all. -> the parts that are released now. Raises InvalidRequest on a server
        without --enable-memory-saver."""
        ...

    async def resume(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """Resumes parts; None: all. -> the parts that are still released. Raises InvalidRequest on a server
        without --enable-memory-saver."""
        ...

    async def update_weights(
        self,
        model_path: str,
        load_format: str | None = None,
        version: str | None = None,
        *,
        flushes: bool = True,
    ) -> None:
        """Replaces the weights by those of another checkpoint of the same model, which the API calls
        `version`. Without `flushes`, cached prefixes stay as the present weights have computed them. Raises
        InvalidRequest for a checkpoint that cannot be loaded, and changes nothing then."""
        ...


class AdapterControls(Protocol):
    """Loading and unloading of LoRA adapters."""

    async def load(
        self, name: str, folder: str, *, is_pinned: bool = False, tenant: Tenant = DEFAULT_TENANT
    ) -> None:
        """Loads an adapter of `tenant`; returns when requests may name it. Raises InvalidRequest for one that
        cannot be used, Unavailable."""
        ...

    async def unload(self, name: str, tenant: Tenant = DEFAULT_TENANT) -> None:
        """No new request gets the adapter; returns when those that have it have ended. Raises InvalidRequest
        for a name that is unknown, or of another tenant's adapter."""
        ...


class Service(Protocol):
    """The runtime as HTTP, gRPC and the library use it. All methods are synchronous and run on the event
    loop."""

    @property
    def card(self) -> ModelCard:
        """What clients may know of the served model."""
        ...

    @property
    def tenant(self) -> Tenant:
        """Who uses the runtime through this service."""
        ...

    @property
    def adapters(self) -> AdapterControls | None:
        """Loading and unloading of adapters; None: this server has no adapters (--enable-lora)."""
        ...

    @property
    def control(self) -> Controls:
        """What operators can do."""
        ...

    @property
    def memory_saver(self) -> MemoryControls:
        """The ranks' memory and weights."""
        ...

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request; its output goes to `sink`. When this raises, `sink` is never called. Raises
        Overloaded, Unavailable, NotFound for an unknown session, and InvalidRequest for an id that is open
        already, an unknown adapter, or a task that is not the model's.

        Errors in the prompt (unknown token ids, too many tokens, a template that fails) arrive later, as
        `sink.fail(InvalidRequest)`.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request; its sink gets nothing after this returns. Unknown and finished ids are ignored."""
        ...

    def health(self) -> Health:
        """What the runtime can do at this moment."""
        ...

    def load(self) -> Load:
        """How busy the runtime is now."""
        ...

    def server_info(self) -> Fields:
        """Version, model, state, options in force (secrets hidden), and memory of each rank;
        JSON-serialisable."""
        ...

    def metrics(self) -> bytes:
        """All metrics in Prometheus text format."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character."""
        ...

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        """The text of tokens."""
        ...
