"""/v1/ws: many requests at once over one WebSocket. What goes over it is what the HTTP routes take and give,
with an id around it.

    in     {"id", "path", "body"}      a request to one of the routes that generate; "id" is the client's, unique among its open ones
           {"id", "abort": true}       ends it
    out    {"id", "event"}             one event of its stream
           {"id", "answer"}            its answer in one piece, where the body asks for no stream
           {"id", "error", "status"}   refused, with the body and status of an HTTP answer
           {"id", "done": true}        the last message of a stream, and of one that was aborted

A client that leaves aborts all of its requests. One that takes nothing for MAX_SEND_S is cut off.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated as A
from typing import Any
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
from runtime.http.errors import decode, error_body
from runtime.http.fields.headers import Origin, origin
from runtime.http.settings import HttpSettings
from runtime.http.streaming.exchange import MAX_SEND_S, Answer
from runtime.http.streaming.sse import encode
from runtime.service import Service

PATH = "/v1/ws"
# ASGI extension of our own server: a function that returns when the server is told to stop
TERMINATED = "runtime.terminated"
MAX_OPEN = 1024  # requests of one socket
POLICY, GOING_AWAY = 1008, 1001  # why a socket is closed

Serve = Callable[[Service, bytes], Answer | Response]


class Said(Struct, forbid_unknown_fields=True):
    """A message of the client."""

    id: A[str, Meta(min_length=1, max_length=256)]
    path: str | None = None
    body: msgspec.Raw = msgspec.Raw()
    abort: bool = False


class Named(Struct):
    """As much of a message as must be right to answer it."""

    id: str = ""


_said = msgspec.json.Decoder(Said)
_named = msgspec.json.Decoder(Named)


def route(service: Service, settings: HttpSettings, served: Mapping[str, Serve]) -> WebSocketRoute:
    async def endpoint(websocket: WebSocket) -> None:
        if not is_welcome(websocket, settings.cors_origins):
            await websocket.close(POLICY)  # before it was accepted: an answer 403
            return
        try:
            who = origin(websocket.headers, settings.tenant_is)
        except RequestError:
            await websocket.close(POLICY)
            return
        await websocket.accept()
        await Socket(service, settings, served, websocket, who).run()

    return WebSocketRoute(PATH, endpoint)


def is_welcome(websocket: WebSocket, cors_origins: tuple[str, ...]) -> bool:
    """Browsers let a page of any site open a socket and tell whose it is; other programs tell nothing."""
    page = websocket.headers.get("origin")
    return (
        page is None
        or "*" in cors_origins
        or page in cors_origins
        or urlsplit(page).netloc == websocket.headers.get("host")
    )


class Socket:
    """One WebSocket and its open requests."""

    def __init__(
        self,
        service: Service,
        settings: HttpSettings,
        served: Mapping[str, Serve],
        websocket: WebSocket,
        who: Origin,
    ) -> None:
        self.service = service
        self.settings = settings
        self.served = served
        self.websocket = websocket
        self.who = who
        self.open: dict[str, anyio.CancelScope] = {}
        self.num_serving = 0  # those that are open, and those whose last message is on its way
        self.emptied = anyio.Event()  # there are none
        self.lock = anyio.Lock()  # one message goes out at a time

    async def run(self) -> None:
        """Until the client leaves, or the server stops and what is open has ended."""
        terminated = self.websocket.scope.get("extensions", {}).get(TERMINATED)
        try:
            async with anyio.create_task_group() as tasks:
                if terminated is not None:
                    tasks.start_soon(self._close_at_end, terminated, tasks)
                while True:
                    message = await self.websocket.receive()
                    if message["type"] == "websocket.disconnect":
                        break
                    await self._hear(
                        message.get("bytes") or (message.get("text") or "").encode("utf-8", "surrogatepass"),
                        tasks,
                    )
                tasks.cancel_scope.cancel()
        except* (WebSocketDisconnect, TimeoutError):
            pass  # whoever was sending saw it first

    async def _hear(self, data: bytes, tasks: TaskGroup) -> None:
        try:
            if len(data) > self.settings.max_body_bytes:
                raise TooLarge(
                    f"the message has {len(data)} bytes; this server takes {self.settings.max_body_bytes}"
                )
            said = decode(data, _said)
            if said.abort:
                if (scope := self.open.get(said.id)) is not None:
                    scope.cancel()
                return
            if said.path is None or said.path not in self.served:
                raise InvalidRequest(f"path must be one of {', '.join(self.served)}", param="path")
            if said.id in self.open:
                raise InvalidRequest("a request with this id is open; choose another id", param="id")
            if self.num_serving >= MAX_OPEN:
                raise InvalidRequest(
                    f"{MAX_OPEN} requests are open on this socket, which is the most", param="id"
                )
        except RequestError as error:
            await self._say(_refusal(_id_of(data), error, ""))
            return
        self.open[said.id] = scope = anyio.CancelScope()
        self.num_serving += 1
        tasks.start_soon(self._serve, said.id, said.path, bytes(said.body) or b"{}", scope)

    async def _serve(self, id: str, path: str, body: bytes, scope: anyio.CancelScope) -> None:
        last: Any = {"id": id, "done": True}
        try:
            with scope:
                last = await self._answer(id, path, body)
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
            del self.open[id]  # before its end is told: the client may use the id at once
        await self._say(last)
        self.num_serving -= 1
        if not self.num_serving:
            self.emptied.set()

    async def _answer(self, id: str, path: str, body: bytes) -> Any:
        """-> the last message on it"""
        answer = self.served[path](self.service, body)
        if not isinstance(answer, Answer):
            return {"id": id, "answer": msgspec.Raw(bytes(answer.body))}
        answer.exchange.come_from(self.who)
        answer.interval = max(self.settings.stream_interval, answer.interval)
        if not answer.is_stream:
            return {"id": id, "answer": await answer.complete()}

        async def say(events: bytes) -> None:
            for payload in payloads(events):
                await self._say({"id": id, "event": msgspec.Raw(payload)})

        await answer.tell(say)
        return {"id": id, "done": True}

    async def _say(self, message: Any) -> None:
        """Raises TimeoutError, WebSocketDisconnect: then the socket is done for."""
        async with self.lock:
            # half a message would be the end of all
            with anyio.CancelScope(shield=True), anyio.fail_after(MAX_SEND_S):
                await self.websocket.send_text(encode(message).decode())

    async def _close_at_end(self, terminated: Callable[[], Awaitable[None]], tasks: TaskGroup) -> None:
        await terminated()
        while self.num_serving:
            self.emptied = anyio.Event()
            await self.emptied.wait()
        await self.websocket.close(GOING_AWAY)
        tasks.cancel_scope.cancel()


def _refusal(id: str, error: RequestError, path: str) -> dict[str, Any]:
    return {"id": id, "status": error.status, **msgspec.to_builtins(error_body(error, path))}


def payloads(events: bytes) -> list[bytes]:
    """The JSON of events and lines; it has no line breaks of its own."""
    found = []
    for line in events.split(b"\n"):
        if line.startswith(b"data: {"):
            found.append(line[6:])
        elif line.startswith(b"{"):
            found.append(line)
    return found


def _id_of(data: bytes) -> str:
    """Of a message that is wrong in some other way."""
    try:
        return _named.decode(data).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
