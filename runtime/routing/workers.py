"""The servers behind the router: requests to them, retries at others, and health checks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from msgspec import Struct

from runtime import log
from runtime.errors import InvalidRequest, Unavailable
from runtime.json_value import Fields
from runtime.routing.policies import POLICIES, PolicySettings
from runtime.routing.upstream import Headers, UpstreamAnswer, UpstreamError, connect
from runtime.routing.worker import Worker

CONNECT_S = 5.0
RECHECK_S = 1.0  # between two checks of a server that takes no requests
RETRIED_STATUSES = frozenset({502, 503, 504})  # of servers that are draining or start
LOG = log.get("route")


class RouteSettings(Struct, frozen=True, kw_only=True):
    """Settings of the router, by the names of its options. Times are in seconds."""

    policy: str = "cache_aware"
    limits: PolicySettings = PolicySettings()
    max_payload_size: int = 64 * 2**20  # bytes of a request's body
    request_timeout_secs: float = 1800.0  # without a byte from the server
    retry_max_retries: int = 5  # at other servers, before the first byte
    health_check_interval_secs: float = 10.0
    health_check_timeout_secs: float = 5.0
    health_failure_threshold: int = 3  # failed checks or requests in a row that eject a server


class UpstreamRequest(Struct, frozen=True, kw_only=True):
    """A request as it goes to a server. `target`: path and query; `text`: the prompt, for the policy;
    `is_repeatable`: it may be sent again although a server may have begun to act on it."""

    method: str
    target: bytes
    headers: Headers
    body: bytes = b""
    text: bytes = b""
    is_repeatable: bool = False


class NamedWorker(Struct, forbid_unknown_fields=True):
    """A server as /workers takes it, with the names of SGLang's router. `worker_type` and `bootstrap_port`
    are for pairs (pairs.py)."""

    url: str
    worker_type: str = ""
    bootstrap_port: int = 0


class Workers:
    """The servers by URL. Counters are for /metrics."""

    def __init__(self, urls: list[str], settings: RouteSettings) -> None:
        """Raises InvalidRequest for what is no URL."""
        self.settings = settings
        self.policy = POLICIES[settings.policy](settings.limits, Random())
        self.by_url: dict[str, Worker] = {}
        self.num_requests: dict[str, int] = {}
        self.num_retries = 0
        for url in urls:
            self.add(url)

    def add(self, url: str) -> Worker:
        """Adds a server; one that is here already stays as it is. Raises InvalidRequest."""
        worker = Worker(url)
        return self.by_url.setdefault(worker.url, worker)

    def add_named(self, named: NamedWorker) -> None:
        """Adds a server. Raises InvalidRequest."""
        if named.worker_type or named.bootstrap_port:
            raise InvalidRequest("only with --pd-disaggregation servers have a type", param="worker_type")
        self.add(named.url)

    def describe(self, worker: Worker) -> Fields:
        """What /workers shows of a server besides."""
        return {}

    def remove(self, url: str) -> bool:
        """Takes a server away; running answers end in order. False: there is none of this URL."""
        worker = self.by_url.pop(url.rstrip("/"), None)
        if worker is not None:
            self.num_requests.pop(worker.url, None)
            self._eject(worker)
        return worker is not None

    @property
    def healthy(self) -> list[Worker]:
        """The servers that take requests."""
        return [worker for worker in self.by_url.values() if worker.is_healthy]

    @asynccontextmanager
    async def answer(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        """The answer of the server that the policy chooses, its head read; of another one if that fails.
        Leaving early ends the request at the server. Raises Unavailable when no server answers, and
        UpstreamError from the answer's body when it breaks off."""
        tried: set[str] = set()
        while True:
            worker = self.choose(request, tried)
            worker.load += 1
            try:
                is_last = len(tried) > self.settings.retry_max_retries
                answer = await self._attempt(worker, request, tried, is_last=is_last)
                if answer is None:
                    continue
                try:
                    yield answer
                finally:
                    answer.close()
                    if answer.can_be_kept:
                        worker.keep(answer.connection)
                return
            finally:
                worker.load -= 1

    def choose(self, request: UpstreamRequest, tried: set[str]) -> Worker:
        """The server that the policy chooses of those that were not tried; it is added to them. Raises
        Unavailable."""
        candidates = [worker for worker in self.healthy if worker.url not in tried]
        if not candidates:
            raise Unavailable(f"none of {len(self.by_url)} servers answers; try again")
        worker = self.policy.choose(candidates, request.text)
        self.num_retries += bool(tried)
        tried.add(worker.url)
        self.num_requests[worker.url] = self.num_requests.get(worker.url, 0) + 1
        return worker

    @property
    def needs_text(self) -> bool:
        """Whether the policy looks at prompts."""
        return self.settings.policy == "cache_aware"

    @asynccontextmanager
    async def answer_of(self, worker: Worker, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        """The answer of a server that was chosen. Raises Unavailable, and UpstreamError from its body."""
        worker.load += 1
        try:
            answer = await self._attempt(worker, request, set(self.by_url), is_last=True)
            assert answer is not None, "there is no other one to try"
            try:
                yield answer
            finally:
                answer.close()
                if answer.can_be_kept:
                    worker.keep(answer.connection)
        finally:
            worker.load -= 1

    async def _attempt(
        self, worker: Worker, request: UpstreamRequest, tried: set[str], *, is_last: bool
    ) -> UpstreamAnswer | None:
        """The answer of a server; None, unless `is_last`: try another one."""
        try:
            answer = await self.send(worker, request, self.settings.request_timeout_secs)
        except _NotSent as error:
            LOG.warning("a server is out of reach", url=worker.url, error=str(error))
            self._eject(worker)
            if is_last:
                raise Unavailable("the servers can't be reached; try again") from None
            return None
        except UpstreamError as error:
            LOG.warning("a request failed at a server", url=worker.url, error=str(error))
            worker.report_failure(self.settings.health_failure_threshold)
            if not worker.is_healthy:
                self.policy.forget(worker)
            if is_last or not request.is_repeatable:
                raise Unavailable("the server failed before it answered; try again") from None
            return None
        worker.failures = 0
        others = any(other.url not in tried for other in self.healthy)
        if answer.status in RETRIED_STATUSES and request.is_repeatable and others and not is_last:
            answer.connection.close()
            answer.close()
            return None
        return answer

    async def send(self, worker: Worker, request: UpstreamRequest, timeout_s: float) -> UpstreamAnswer:
        """One attempt at one server, on an idle connection if it has one. Raises UpstreamError; when the
        connection could not even be made, one that says the server is out of reach."""
        while True:
            while worker.idle and not worker.idle[-1].is_open:
                worker.idle.pop().close()
            # the server may be closing an idle connection just now: then the request is sent again
            connection = worker.idle.pop() if worker.idle and request.is_repeatable else None
            if connection is None:
                try:
                    connection = await connect(worker, CONNECT_S)
                except UpstreamError as error:
                    raise _NotSent(str(error)) from None
            headers = [(b"host", worker.authority.encode()), *request.headers]
            target = worker.root_path.encode() + request.target
            answer = None
            try:
                answer = await connection.request(request.method, target, headers, request.body, timeout_s)
                return answer
            except UpstreamError:
                if not connection.is_reused:
                    raise
            finally:
                if answer is None:  # also when the client left
                    connection.close()

    async def watch(self) -> None:
        """Checks the health of all servers, forever: of those that take no requests every second."""
        interval_s, now_s = self.settings.health_check_interval_secs, asyncio.get_running_loop().time
        while True:
            async with asyncio.TaskGroup() as tasks:
                for worker in list(self.by_url.values()):
                    if now_s() >= worker.next_check_s or not worker.is_healthy:
                        worker.next_check_s = now_s() + interval_s
                        tasks.create_task(self._check(worker))
            await asyncio.sleep(min(interval_s, RECHECK_S))

    def close(self) -> None:
        """Closes the connections that no request uses."""
        for worker in self.by_url.values():
            worker.close_idle()

    async def _check(self, worker: Worker) -> None:
        """Asks a server for its health; it counts as healthy when it answers 200."""
        request = UpstreamRequest(method="GET", target=b"/health", headers=(), is_repeatable=True)
        is_well = False
        try:
            answer = await self.send(worker, request, self.settings.health_check_timeout_secs)
            is_well = answer.status == 200
            answer.connection.close()
            answer.close()
        except UpstreamError as error:
            LOG.debug("a health check failed", url=worker.url, error=str(error))
        was_healthy = worker.is_healthy
        if is_well:
            worker.report_success()
        else:
            worker.report_failure(self.settings.health_failure_threshold)
        if worker.is_healthy != was_healthy:
            LOG.info("a server's health changed", url=worker.url, is_healthy=worker.is_healthy)
            if not worker.is_healthy:
                self.policy.forget(worker)

    def _eject(self, worker: Worker) -> None:
        worker.eject()
        self.policy.forget(worker)


class _NotSent(UpstreamError):
    """A connection could not be made, so the server knows nothing of the request."""
