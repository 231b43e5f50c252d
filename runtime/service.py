"""What the HTTP layer and the library face need from the runtime behind them: one narrow protocol.

`server.py` and `engine.py` provide it; tests of the HTTP layer provide a small one of their own.
"""

from typing import Any, Literal, Protocol

from msgspec import Struct

from runtime.messages import Ask
from runtime.request import Sink
from runtime.sampling import Limits

State = Literal["loading", "ready", "recovering", "draining", "failed"]


class Health(Struct, frozen=True):
    """The truth about this moment. While it is loading or recovering, requests are taken in and wait. `detail` is safe to show."""

    state: State
    detail: str = ""


class ModelCard(Struct, frozen=True, kw_only=True):
    """The served model, as far as clients may know it."""

    name: str
    created: int  # unix seconds
    limits: Limits
    sampling_defaults: dict[str, Any] = {}  # from generation_config.json: temperature, top_p, top_k, ...


class Load(Struct, frozen=True, kw_only=True):
    """How busy the runtime is now."""

    running: int
    waiting: int
    used_pages: int  # held by running sequences or by the prefix cache
    cached_pages: int  # of them, held by the prefix cache only: given up when needed
    total_pages: int
    page_size: int
    steps: int
    tokens_per_s: float


class Service(Protocol):
    """The runtime as its faces see it. All methods are synchronous and run on the event loop."""

    card: ModelCard

    def submit(self, ask: Ask, sink: Sink) -> None:
        """Takes a request; its output goes to `sink`. Raises Overloaded or Unavailable, then `sink` is never called.

        Wrong content (unknown token ids, a prompt too long, a template that fails) arrives as `sink.fail(InvalidRequest)`.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request now; its sink hears nothing after this returns. Unknown and finished ids are ignored."""
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

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included."""
        ...
