"""What the HTTP layer and the library face need from the runtime behind them: one narrow protocol.

`server.py` and `engine.py` provide it; tests of the HTTP layer provide a small one of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.messages.memory import Part
from runtime.messages.ranks import ExpertCounts, ExpertCountsAction, Profile
from runtime.messages.requests import GenerateRequest, Prompt, Sink
from runtime.messages.sampling import Limits
from runtime.messages.scheduler import PauseMode
from runtime.models.pooling import Pooling
from runtime.parsing.detect import Formats

State = Literal["loading", "ready", "paused", "released", "recovering", "draining", "failed", "closed"]


class Health(Struct, frozen=True):
    """The truth about this moment. While it is loading, paused, released or recovering, requests are taken in
    and wait. `detail` is safe to show."""

    state: State
    detail: str = ""


class CacheReport(Struct, frozen=True):
    """What `usage` says of cached tokens beyond their number: the tiers they came from."""

    storage: str | None  # the backend of the storage tier, where there is one


class AdapterCard(Struct, frozen=True):
    """A loaded adapter."""

    name: str
    folder: str
    rank: int
    created: int  # unix seconds
    is_pinned: bool


class ModelCard(Struct, frozen=True, kw_only=True):
    """The served model, as far as clients may know it."""

    name: str
    created: int  # unix seconds
    limits: Limits
    # fields of SamplingParams where an OpenAI request leaves them open, `preferred` among them
    sampling_defaults: dict[str, Any] = {}
    formats: Formats = Formats()  # of its answers
    preferred: dict[str, Any] = {}  # and where any request does: --preferred-sampling-params
    has_tags: bool = False  # free text can be held to structural tags (--grammar-backend xgrammar)
    pooling: Pooling | None = None  # None: it generates
    reads_items_apart: bool = False  # --multi-item-scoring-delimiter
    weight_version: str = "default"  # as the operator calls it
    storage: str | None = None  # the backend of the cache's storage tier
    adapters: Mapping[str, AdapterCard] = {}  # by name, as of now
    has_cache_report: bool = False  # `usage` says which tiers cached tokens came from

    @property
    def cache_report(self) -> CacheReport | None:
        return CacheReport(self.storage) if self.has_cache_report else None


def check_task(request: GenerateRequest, pooling: Pooling | None) -> None:
    """Raises InvalidRequest for a request that wants something else than the model makes."""
    if request.pools and pooling is None:
        raise InvalidRequest(
            "this model generates text; vectors and scores need an embedding model (--is-embedding) or a classifier"
        )
    if pooling is not None and not request.pools:
        raise InvalidRequest("this model makes vectors or scores of texts; it generates none")


class Load(Struct, frozen=True, kw_only=True):
    """How busy the runtime is now."""

    running: int
    waiting: int
    used_pages: int  # held by running sequences or by the prefix cache
    cached_pages: int  # of them, held by the prefix cache only: given up when needed
    total_pages: int
    page_size: int
    used_host_pages: int = 0  # copies of cached pages in host memory
    total_host_pages: int = 0
    # of sliding-window layers, where they have a pool of their own; the next is a part of them
    used_window_pages: int = 0
    cached_window_pages: int = 0
    total_window_pages: int = 0
    steps: int
    tokens_per_s: float
    waiting_tokens: int = 0  # known tokens of those that wait
    max_running: int = 0  # sequences that can run at once
    prompt_tokens: int = 0  # of prompts admitted since the start
    cached_tokens: int = 0  # of them, found in the prefix cache
    weights_bytes: int = 0
    pages_bytes: int = 0


class ExpertControls(Protocol):
    """What ranks record of experts."""

    async def count(self, action: ExpertCountsAction, folder: str = "") -> ExpertCounts:
        """Tells the counts so far, after `wish` was done. Raises InvalidRequest where nothing is recorded,
        Unavailable."""
        ...


class Controls(Protocol):
    """What may be asked of the runtime besides answers, by operators mostly.

    Everything raises Unavailable while the model loads, and when it cannot be served any more.
    """

    @property
    def experts(self) -> ExpertControls: ...

    async def pause(self, mode: PauseMode) -> None:
        """No steps are planned from now on; returns when none is in flight. Requests that come wait."""
        ...

    async def resume(self) -> None: ...

    async def flush(self) -> int:
        """Empties the prefix cache. -> pages freed. Raises Busy while sequences run."""
        ...

    async def clear_storage(self) -> int:
        """Empties the storage tier of this model's pages. -> how many. Raises InvalidRequest where there is
        none, Unavailable."""
        ...

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises InvalidRequest."""
        ...

    def abort(self, prefix: str) -> int:
        """Ends all requests whose id begins with `prefix`; their clients get what there is, with reason
        abort. -> how many"""
        ...

    def start_profile(self, wish: Profile) -> str:
        """Ranks record where their time goes. -> the folder of what they will write. Raises InvalidRequest
        when they do already."""
        ...

    def stop_profile(self) -> str:
        """They write it. -> the folder. Raises InvalidRequest."""
        ...

    def open_session(
        self,
        capacity: int,
        session_id: str | None = None,
        idle_s: float | None = None,
        *,
        is_line: bool = False,
    ) -> str:
        """-> its id. Raises InvalidRequest, Overloaded."""
        ...

    def close_session(self, session_id: str) -> None:
        """Raises NotFound."""
        ...


class MemoryControls(Protocol):
    """What the ranks hold. Requests wait while it changes or anything is given back. All raise Busy while
    requests run that are not paused, and Unavailable when the ranks cannot do it now."""

    async def release(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """Gives the parts back, None: all. -> what is given back now. Raises InvalidRequest on a server that
        keeps its memory."""
        ...

    async def resume(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """Takes them again. -> what is still given back. As above."""
        ...

    async def update_weights(
        self,
        model_path: str,
        load_format: str | None = None,
        version: str | None = None,
        *,
        flushes: bool = True,
    ) -> None:
        """Other weights for the same model; `version` is what the API calls them. Without `flushes` cached
        prefixes stay, as the weights so far computed them. Raises InvalidRequest for a checkpoint that is of
        no use; nothing has happened then."""
        ...


class AdapterControls(Protocol):
    """How adapters come and go."""

    async def load(self, name: str, folder: str, *, is_pinned: bool = False) -> None:
        """Returns when requests may ask for it. Raises InvalidRequest for one that cannot be used,
        Unavailable."""
        ...

    async def unload(self, name: str) -> None:
        """No new request gets it; returns when those that have it have ended. Raises InvalidRequest for an
        unknown name."""
        ...


class Service(Protocol):
    """The runtime as its faces see it. All methods are synchronous and run on the event loop."""

    card: ModelCard

    @property
    def adapters(self) -> AdapterControls | None:
        """None: this server has no adapters."""
        ...

    @property
    def control(self) -> Controls: ...

    @property
    def memory_saver(self) -> MemoryControls: ...

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request; its output goes to `sink`. Raises Overloaded or Unavailable, then `sink` is never
        called.

        Wrong content (unknown token ids, a prompt too long, a template that fails) arrives as
        `sink.fail(InvalidRequest)`.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request now; its sink hears nothing after this returns. Unknown and finished ids are
        ignored."""
        ...

    def health(self) -> Health: ...

    def load(self) -> Load: ...

    def server_info(self) -> dict[str, Any]:
        """Options in force (no secrets), version, limits, memory; JSON-serialisable."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for (may be half a character)."""
        ...

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        """The text of tokens. Raises Unavailable while the tokenizer loads."""
        ...
