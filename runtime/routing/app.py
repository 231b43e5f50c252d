"""The router as an ASGI application: routes of its own, and everything else goes to a server."""

import anyio
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime import log
from runtime.errors import Forbidden, InvalidRequest, NotFound, RequestError
from runtime.http.auth import Keys
from runtime.http.body import read_bytes, respond_early
from runtime.http.body_budget import LEASE, BodyBudget, BodyLease
from runtime.http.errors import ANTHROPIC, error_response, on_http_error
from runtime.json_value import Fields
from runtime.routing.pairs import Pairs
from runtime.routing.upstream import UpstreamAnswer, UpstreamError, header_of
from runtime.routing.workers import NamedWorker, UpstreamRequest, Workers

# what is sent again to another server when one fails before its first byte: it keeps nothing for the client
REPEATABLE = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/tokenize", "/v1/detokenize"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *("/generate", "/encode", "/classify", "/rerank", "/tokenize", "/detokenize"),
    }
)
# headers that belong to one connection (RFC 9110, 7.6.1), and those that are written anew
OWN_HEADERS = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"),
        *(b"upgrade", b"host", b"content-length", b"expect"),
    }
)
ANSWER_HEADERS = OWN_HEADERS - {b"content-length"}
PROMPT_FIELDS = ("tools", "system", "messages", "prompt", "text", "input_ids", "input")  # in a prompt's order
MAX_WORKER_BYTES = 64 * 1024
MAX_PARSED_BYTES = 2**20
BODIES = 4  # of the largest size: what all requests together may hold
LOG = log.get("route")
BROKEN = "the server failed while it answered; send the request again"


class RouterApp:
    """Answers requests by `workers`. `keys` guard /workers."""

    def __init__(self, workers: Workers | Pairs, keys: Keys) -> None:
        self._workers = workers
        self._keys = keys
        self._budget = BodyBudget(BODIES * workers.settings.max_payload_size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1011, "reason": "the router has no WebSockets"})
            return
        own = {"/health": self._health, "/metrics": self._metrics, "/v1/models": self._models}
        path = scope["path"]
        scope[LEASE] = lease = BodyLease(self._budget)
        body = _Body(scope, receive)
        try:
            if scope["method"] == "GET" and path in own:
                await (await own[path](scope))(scope, receive, send)
            elif path == "/workers":
                await (await self._list_or_change(scope, body))(scope, receive, send)
            else:
                await self._relay(scope, body, receive, send)
        except RequestError as error:
            response = error_response(error, path)
            await (response if body.is_read else respond_early(response))(scope, receive, send)
        except HTTPException as error:  # of a body that stopped coming
            await (await on_http_error(Request(scope, receive), error))(scope, receive, send)
        except ClientDisconnect:
            return
        except UpstreamError as error:  # in the middle of an answer, which the connection's end cuts off
            LOG.warning("an answer broke off", path=path, error=str(error))
        finally:
            lease.release()

    async def _health(self, scope: Scope) -> Response:
        count = len(self._workers.healthy)
        body: Fields = {"healthy_workers": count, "workers": len(self._workers.by_url)}
        return _json(body, 200 if count else 503)

    async def _metrics(self, scope: Scope) -> Response:
        return Response(prometheus(self._workers), media_type="text/plain; version=0.0.4")

    async def _models(self, scope: Scope) -> Response:
        """The models of all servers, each once."""
        request = UpstreamRequest(method="GET", target=b"/v1/models", headers=_headers(scope))
        found: dict[str, Fields] = {}
        timeout_s = self._workers.settings.health_check_timeout_secs
        last: Response | None = None
        for worker in self._workers.healthy:
            try:
                answer = await self._workers.send(worker, request, timeout_s)
                try:
                    body = await _whole(answer)
                finally:
                    answer.connection.close()
                    answer.close()
                if answer.status == 200:
                    found |= {one["id"]: one for one in msgspec.json.decode(body, type=_Models).data}
                else:
                    last = Response(body, answer.status, media_type="application/json")
            except (UpstreamError, msgspec.MsgspecError, KeyError):
                continue  # of one server; the others have models as well
        if not found and last is not None:
            return last
        return _json({"object": "list", "data": list(found.values())})

    async def _list_or_change(self, scope: Scope, body: "_Body") -> Response:
        """GET lists servers; POST and DELETE with {"url": ...} add one and take one away. Of pairs, POST has
        "worker_type" as well."""
        self._keys.identify("admin", scope["headers"])
        method = scope["method"]
        if method != "GET":
            if header_of(scope["headers"], b"content-type").partition(b";")[0].strip() != b"application/json":
                raise InvalidRequest("send content-type: application/json", param="content-type")
            raw = await body.read(MAX_WORKER_BYTES)
            try:
                named = msgspec.json.decode(raw, type=NamedWorker)
            except msgspec.MsgspecError:
                raise InvalidRequest('the body must be {"url": "http://HOST:PORT"}', param="url") from None
            url = named.url
            if method == "POST":
                self._workers.add_named(named)
            elif method != "DELETE":
                raise Forbidden("/workers takes GET, POST and DELETE")
            elif not self._workers.remove(url):
                raise NotFound(f"no server has the URL {url}", param="url")
        listed = [
            {"url": one.url, "is_healthy": one.is_healthy, "load": one.load} | self._workers.describe(one)
            for one in self._workers.by_url.values()
        ]
        return _json({"workers": listed})

    async def _relay(self, scope: Scope, body: "_Body", receive: Receive, send: Send) -> None:
        """Sends a request to a server and its answer to the client, until either is gone."""
        raw = await body.read(self._workers.settings.max_payload_size)
        query = scope.get("query_string", b"")
        is_post = scope["method"] == "POST"
        needs_text = is_post and self._workers.needs_text
        request = UpstreamRequest(
            method=scope["method"],
            target=scope["raw_path"] + (b"?" + query if query else b""),
            headers=_headers(scope),
            body=raw,
            text=prompt_text(raw) if needs_text else b"",
            is_repeatable=scope["path"] in REPEATABLE or scope["method"] in ("GET", "HEAD"),
        )
        failure: RequestError | UpstreamError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
            try:
                async with self._workers.answer(request) as answer:
                    await _send_answer(answer, scope["path"], send)
            except (RequestError, UpstreamError) as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure


class _Body:
    """The body of a request. `is_read`: all of it has come."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope, self._receive = scope, receive
        self.is_read = False

    async def read(self, max_bytes: int) -> bytes:
        """See read_bytes."""
        raw = await read_bytes(self._scope, self._receive, max_bytes)
        self.is_read = True
        return raw


class _Models(msgspec.Struct):
    data: list[Fields]


async def _send_answer(answer: UpstreamAnswer, path: str, send: Send) -> None:
    """Hands an answer on as it comes. A stream of events that breaks off ends with an event that says so;
    any other answer raises UpstreamError, by which the connection ends in the middle of it."""
    headers = [(name, value) for name, value in answer.headers if name not in ANSWER_HEADERS]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    try:
        while piece := await answer.read():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except UpstreamError:
        if not header_of(answer.headers, b"content-type").startswith(b"text/event-stream"):
            raise
        await send({"type": "http.response.body", "body": broken_event(path), "more_body": False})
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _whole(answer: UpstreamAnswer) -> bytes:
    pieces: list[bytes] = []
    while piece := await answer.read():
        pieces.append(piece)
    return b"".join(pieces)


async def _cancel_on_disconnect(receive: Receive, running: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    running.cancel()


def broken_event(path: str) -> bytes:
    """The last event of a stream whose server failed, in the form of the path's API."""
    if path.startswith(ANTHROPIC):
        body: Fields = {"type": "error", "error": {"type": "api_error", "message": BROKEN}}
        return b"\n\nevent: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
    error = {"message": BROKEN, "type": "server_error", "param": None, "code": "unavailable"}
    return b"\n\ndata: " + msgspec.json.encode({"error": error}) + b"\n\n"


def prompt_text(body: bytes) -> bytes:
    """What of a body decides about the prompt, in the order of the prompt. A body that is no JSON object is
    taken whole, as the server will refuse it; so is one over MAX_PARSED_BYTES, as others wait meanwhile."""
    if len(body) > MAX_PARSED_BYTES:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return body
    return b"".join(bytes(fields[name]) for name in PROMPT_FIELDS if name in fields)


def prometheus(workers: Workers | Pairs) -> str:
    """Metrics in Prometheus' text format."""
    rows: list[tuple[str, str, str, dict[str, int]]] = [
        ("runtime_route_requests_total", "counter", "Attempts at a server.", workers.num_requests),
        (
            *("runtime_route_running_requests", "gauge", "Requests that run at a server."),
            {one.url: one.load for one in workers.by_url.values()},
        ),
        (
            *("runtime_route_worker_health", "gauge", "1: the server takes requests."),
            {one.url: int(one.is_healthy) for one in workers.by_url.values()},
        ),
    ]
    lines: list[str] = []
    for name, kind, about, values in rows:
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        for url, value in values.items():
            label = url.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'{name}{{worker="{label}"}} {value}')
    name = "runtime_route_retries_total"
    lines += [f"# HELP {name} Attempts after a failed one.", f"# TYPE {name} counter"]
    return "\n".join([*lines, f"{name} {workers.num_retries}", ""])


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The client's headers as they go on, keys among them, without those of the connection."""
    named = header_of(scope["headers"], b"connection").lower().split(b",")
    dropped = OWN_HEADERS.union([name.strip() for name in named])
    return [(name, value) for name, value in scope["headers"] if name not in dropped]


def _json(body: Fields, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
