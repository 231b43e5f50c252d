"""/v1/ws: many requests at once over one WebSocket. Bodies and answers are those of the HTTP routes, each in
a message with an id.

    in     {"id", "path", "body"}      a request to one of the routes that generate; "id" is the client's,
                                       unique among its open requests
           {"id", "abort": true}       ends it
    out    {"id", "event"}             one event of its stream
           {"id", "answer"}            its answer in one piece, where the body asks for no stream
           {"id", "error", "status"}   refused, with the body and status of an HTTP answer
           {"id", "done": true}        the last message of a stream, and of one that was aborted

Bodies count in the server's BodyBudget. A client that leaves aborts all of its requests. One that takes
nothing for MAX_SEND_S is cut off.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated as A
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from runtime import log
from runtime.errors import InternalFault, InvalidRequest, RequestError, TooLarge
from runtime.http.body_budget import LEASE, BodyBudget, BodyLease
from runtime.http.cut_body import CutBody, attempt, uncut
from runtime.http.errors import decode, error_body
from runtime.http.fields.headers import RequestHeaders, read_headers
from runtime.http.json_weight import joined_body
from runtime.http.settings import HttpSettings
from runtime.http.streaming.exchange import MAX_SEND_S, Answer
from runtime.http.streaming.sse import encode
from runtime.http.tenant_service import service_for, tenant_in
from runtime.service import Service

PATH = "/v1/ws"
# ASGI extension of our own server: a function that returns when the server begins to stop
TERMINATED = "runtime.terminated"
MAX_OPEN = 1024  # open requests of one socket
POLICY, GOING_AWAY = 1008, 1001  # why a socket is closed

Serve = Callable[[Service, bytes], Answer | Response]


class ClientMessage(Struct, forbid_unknown_fields=True):
    """A message from the client: a request, or the abort of one."""

    id: A[str, Meta(min_length=1, max_length=256)]
    path: str | None = None
    body: msgspec.Raw = msgspec.Raw()
    abort: bool = False


class MessageId(Struct):
    """The part of a message that is needed to refuse it."""

    id: str = ""


_message_decoder = msgspec.json.Decoder(ClientMessage)
_id_decoder = msgspec.json.Decoder(MessageId)


def route(service: Service, settings: HttpSettings, served: Mapping[str, Serve]) -> WebSocketRoute:
    """The WebSocket's route; `served` has the functions of the routes that generate, by path."""

    async def endpoint(websocket: WebSocket) -> None:
        if not is_allowed_origin(websocket, settings.cors_origins):
            await websocket.close(POLICY)  # before it was accepted: an answer 403
            return
        try:
            headers = read_headers(websocket.headers, settings.label_header)
        except RequestError:
            await websocket.close(POLICY)
            return
        await websocket.accept()
        own = service_for(service, tenant_in(websocket.scope))
        await Socket(own, settings, served, websocket, headers).run()

    return WebSocketRoute(PATH, endpoint)


def is_allowed_origin(websocket: WebSocket, cors_origins: tuple[str, ...]) -> bool:
    """Whether the `Origin` header, which browsers send and other programs don't, is of a page that may
    connect: one of this server, or of `cors_origins`."""
    page = websocket.headers.get("origin")
    return (
        page is None
        or "*" in cors_origins
        or page in cors_origins
        or (_host_of(page) or None) == websocket.headers.get("host", "")
    )


def _host_of(page: str) -> str:
    """Host and port of an origin; empty for text that has none."""
    try:
        return urlsplit(page).netloc
    except ValueError:  # half a bracket: http://[
        return ""


class Socket:
    """One WebSocket and its open requests."""

    def __init__(
        self,
        service: Service,
        settings: HttpSettings,
        served: Mapping[str, Serve],
        websocket: WebSocket,
        headers: RequestHeaders,
    ) -> None:
        self.service = service
        self.settings = settings
        self.served = served
        self.websocket = websocket
        self.headers = headers
        lease: BodyLease | None = websocket.scope.get(LEASE)  # counts the message that is being read
        self.budget = BodyBudget(settings.max_total_body_bytes) if lease is None else lease.budget
        self.open: dict[str, anyio.CancelScope] = {}
        self.num_serving = 0  # requests that are open, or whose last message is being sent
        self.emptied = anyio.Event()  # no request is being served
        self.lock = anyio.Lock()  # one message goes out at a time

    async def run(self) -> None:
        """Serves requests until the client leaves, or until the server stops and the open requests have
        ended."""
        terminated = self.websocket.scope.get("extensions", {}).get(TERMINATED)
        try:
            async with anyio.create_task_group() as tasks:
                if terminated is not None:
                    tasks.start_soon(self._close_at_end, terminated, tasks)
                while True:
                    message = await self.websocket.receive()
                    if message["type"] == "websocket.disconnect":
                        break
                    await self._handle(
                        message.get("bytes") or (message.get("text") or "").encode("utf-8", "surrogatepass"),
                        tasks,
                    )
                tasks.cancel_scope.cancel()
        except* (WebSocketDisconnect, TimeoutError):
            pass  # the task that was sending met it first

    async def _handle(self, data: bytes, tasks: TaskGroup) -> None:
        try:
            if len(data) > self.settings.max_body_bytes:
                raise TooLarge(
                    f"the message has {len(data)} bytes; this server takes {self.settings.max_body_bytes}"
                )
            body = await joined_body([data], self.settings.max_body_bytes)
            data, message = attempt(
                body, read_message, lambda read: not {read[1].id, read[1].path} & body.texts.keys()
            )
            body = body if data is body.content else uncut(data)
            if message.abort:
                if (scope := self.open.get(message.id)) is not None:
                    scope.cancel()
                return
            if message.path is None or message.path not in self.served:
                raise InvalidRequest(f"path must be one of {', '.join(self.served)}", param="path")
            if message.id in self.open:
                raise InvalidRequest("a request with this id is open; choose another id", param="id")
            if self.num_serving >= MAX_OPEN:
                raise InvalidRequest(
                    f"{MAX_OPEN} requests are open on this socket, which is the most", param="id"
                )
        except RequestError as error:
            await self._send(_refusal(_id_of(data), error, ""))
            return
        self.open[message.id] = scope = anyio.CancelScope()
        self.num_serving += 1
        tasks.start_soon(self._serve, message, body, scope)

    async def _serve(self, message: ClientMessage, body: CutBody, scope: anyio.CancelScope) -> None:
        id, path = message.id, message.path or ""
        last: dict[str, object] = {"id": id, "done": True}
        lease = BodyLease(self.budget)
        try:
            with scope:
                lease.add(body.num_bytes)
                last = await self._answer(message, body)
        except RequestError as error:
            last = _refusal(id, error, path)
        except (WebSocketDisconnect, TimeoutError):
            raise
        except Exception:  # of one request: the others go on
            log.get("socket").exception("a request over a socket failed", path=path, exc_info=True)
            last = _refusal(
                id, InternalFault("something went wrong in the server; its log has the details"), path
            )
        finally:
            del self.open[id]  # before the last message: the client may use the id again at once
            lease.release()
        await self._send(last)
        self.num_serving -= 1
        if not self.num_serving:
            self.emptied.set()

    async def _answer(self, message: ClientMessage, body: CutBody) -> dict[str, object]:
        """Answers the request of a message, which was read from `body` without the files in it. -> the last
        message about it"""
        id, serve = message.id, self.served[message.path or ""]

        def take(data: bytes) -> Answer | Response:
            one = message if data is body.content else read_message(data)[1]
            return serve(self.service, bytes(one.body) or b"{}")

        def keep(taken: Answer | Response) -> bool:
            return isinstance(taken, Answer) and taken.exchange.take_files(body.texts)

        answer = attempt(body, take, keep)
        if not isinstance(answer, Answer):
            return {"id": id, "answer": msgspec.Raw(bytes(answer.body))}
        answer.exchange.apply_headers(self.headers)
        answer.interval = max(self.settings.stream_interval, answer.interval)
        if not answer.is_stream:
            return {"id": id, "answer": await answer.complete()}

        async def send(events: bytes) -> None:
            for payload in payloads(events):
                await self._send({"id": id, "event": msgspec.Raw(payload)})

        await answer.stream_to(send)
        return {"id": id, "done": True}

    async def _send(self, message: object) -> None:
        """Sends a message. Raises TimeoutError and WebSocketDisconnect; the socket is of no use then."""
        async with self.lock:
            # half a message would make the rest unreadable
            with anyio.CancelScope(shield=True), anyio.fail_after(MAX_SEND_S):
                await self.websocket.send_text(encode(message).decode())

    async def _close_at_end(self, terminated: Callable[[], Awaitable[None]], tasks: TaskGroup) -> None:
        await terminated()
        while self.num_serving:
            self.emptied = anyio.Event()
            await self.emptied.wait()
        await self.websocket.close(GOING_AWAY)
        tasks.cancel_scope.cancel()


def read_message(data: bytes) -> tuple[bytes, ClientMessage]:
    """-> the data, and the message of a client in it. Raises InvalidRequest."""
    return data, decode(data, _message_decoder)


def _refusal(id: str, error: RequestError, path: str) -> dict[str, object]:
    return {"id": id, "status": error.status, **msgspec.to_builtins(error_body(error, path))}


def payloads(events: bytes) -> list[bytes]:
    """The JSON objects of a stream's events or lines."""
    found: list[bytes] = []
    for line in events.split(b"\n"):
        if line.startswith(b"data: {"):
            found.append(line[6:])
        elif line.startswith(b"{"):
            found.append(line)
    return found


def _id_of(data: bytes) -> str:
    """The id of a message that is wrong in some other way; empty without one."""
    try:
        return _id_decoder.decode(data).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
