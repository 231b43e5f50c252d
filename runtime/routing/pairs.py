"""Servers of two kinds: some compute prompts, the others the answers (docs/disaggregation.md).

    client ──► router ── request, room, SOURCE: - ──► prefill server ── one token, which is thrown away
                  │                                        │ pages of the room
                  └──── request, room, SOURCE: … ──► decode server ──► answer

Both get the same request at the same time. The decode server waits for the pages, and computes what does not
come; so a prefill server that dies costs time and nothing else. Where servers of one kind lack, those of the
other kind do all of the work.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import anyio
from msgspec import Struct, structs

from runtime import log
from runtime.errors import InvalidRequest, RequestError, Unavailable
from runtime.json_value import Fields
from runtime.messages.transfer import ROOMS, Transfer
from runtime.routing.upstream import UpstreamAnswer, UpstreamError
from runtime.routing.worker import Worker
from runtime.routing.workers import NamedWorker, RouteSettings, UpstreamRequest, Workers
from runtime.transfer.key import HEADER, header_value

LOG = log.get("route")
# what is computed in two halves; everything else goes to a decode server whole
HALVED = frozenset(
    {
        *(b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"),
        *(b"/api/chat", b"/api/generate", b"/generate"),
    }
)
_HEADER = HEADER.encode()


class PairSettings(Struct, frozen=True, kw_only=True):
    """Settings of pairs."""

    key: bytes  # that the servers have as well
    local_prompt_bytes: int = 0  # prompts of fewer bytes of JSON go to a decode server alone


class Pairs:
    """The servers of both kinds. What they have in common with Workers has its names and meanings."""

    def __init__(self, prefill: RouteSettings, decode: RouteSettings, settings: PairSettings) -> None:
        """`prefill`, `decode`: settings of each kind, which differ in the policy alone."""
        self.prefill, self.decode = Workers([], prefill), Workers([], decode)
        self.settings = decode
        self.send = self.decode.send
        self._ports: dict[str, int] = {}  # of prefill servers, at which pages are asked for
        self._pairs = settings
        self._random = Random()

    def add(self, url: str, port: int | None) -> None:
        """Adds a server for prompts, with the port at which pages are asked for, or one for answers. Raises
        InvalidRequest."""
        if port is None:
            self.decode.add(url)
        else:
            self._ports[self.prefill.add(url).url] = port

    def add_named(self, named: NamedWorker) -> None:
        """Adds a server of a kind. Raises InvalidRequest."""
        if named.worker_type == "decode":
            self.add(named.url, None)
        elif named.worker_type == "prefill" and 0 < named.bootstrap_port < 65536:
            self.add(named.url, named.bootstrap_port)
        else:
            raise InvalidRequest(
                'worker_type must be "decode", or "prefill" with a bootstrap_port', param="worker_type"
            )

    def describe(self, worker: Worker) -> Fields:
        """What /workers shows of a server besides."""
        kind = "prefill" if worker.url in self._ports else "decode"
        return {"worker_type": kind} | (
            {"bootstrap_port": self._ports[worker.url]} if kind == "prefill" else {}
        )

    def remove(self, url: str) -> bool:
        """See Workers.remove."""
        self._ports.pop(url.rstrip("/"), None)
        return any([self.prefill.remove(url), self.decode.remove(url)])

    @property
    def by_url(self) -> dict[str, Worker]:
        """All servers."""
        return self.prefill.by_url | self.decode.by_url

    @property
    def healthy(self) -> list[Worker]:
        """The servers that take requests."""
        return self.decode.healthy + self.prefill.healthy

    @property
    def num_requests(self) -> dict[str, int]:
        """Attempts at each server."""
        return self.prefill.num_requests | self.decode.num_requests

    @property
    def num_retries(self) -> int:
        """Attempts after a failed one."""
        return self.prefill.num_retries + self.decode.num_retries

    @property
    def needs_text(self) -> bool:
        """Whether prompts are looked at."""
        return bool(self._pairs.local_prompt_bytes) or self.prefill.needs_text or self.decode.needs_text

    async def watch(self) -> None:
        """Checks the health of all servers, forever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.prefill.watch)
            tasks.start_soon(self.decode.watch)

    def close(self) -> None:
        """Closes the connections that no request uses."""
        self.prefill.close()
        self.decode.close()

    @asynccontextmanager
    async def answer(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        """See Workers.answer."""
        # what a client says of halves is none of its business
        headers = [(name, value) for name, value in request.headers if name.lower() != _HEADER]
        request = structs.replace(request, headers=headers)
        kind = self.decode if self.decode.healthy or not self.prefill.healthy else self.prefill
        if kind is self.decode and self._is_halved(request):
            failure: RequestError | UpstreamError | None = None
            has_begun = False
            source = self.prefill.choose(request, set())
            async with anyio.create_task_group() as tasks:
                room, host = self._random.randrange(ROOMS), source.host
                host = f"[{host}]" if ":" in host else host
                transfer = Transfer(room, f"{host}:{self._ports[source.url]}")
                tasks.start_soon(self._compute_prompt, source, self._half(request, Transfer(room)))
                try:
                    async with self.decode.answer(self._half(request, transfer)) as answer:
                        has_begun = True
                        yield answer
                except (RequestError, UpstreamError) as error:
                    failure = error
                tasks.cancel_scope.cancel()
            if failure is None:
                return
            if has_begun or not request.is_repeatable or not self.prefill.healthy:
                raise failure
            kind = self.prefill  # no server for answers was left
        async with kind.answer(request) as answer:
            yield answer

    def _is_halved(self, request: UpstreamRequest) -> bool:
        path = request.target.partition(b"?")[0]
        is_long = len(request.text) >= self._pairs.local_prompt_bytes
        return request.method == "POST" and path in HALVED and is_long and bool(self.prefill.healthy)

    def _half(self, request: UpstreamRequest, transfer: Transfer) -> UpstreamRequest:
        value = header_value(self._pairs.key, transfer).encode()
        return structs.replace(request, headers=[*request.headers, (_HEADER, value)])

    async def _compute_prompt(self, worker: Worker, request: UpstreamRequest) -> None:
        """Lets a server compute a prompt; what it answers is thrown away. The decode server notices by itself
        when its pages do not come."""
        try:
            async with self.prefill.answer_of(worker, request) as answer:
                while await answer.read():
                    pass
                if answer.status != 200:
                    LOG.warning("a prompt was refused", url=worker.url, status=answer.status)
        except (Unavailable, UpstreamError) as error:
            LOG.warning("a prompt was not computed", url=worker.url, error=str(error))
