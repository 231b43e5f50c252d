"""`--grpc-mode`: the gRPC server, on the same event loop, in place of the HTTP one. Authentication and checks
are those of the HTTP routes."""

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import TypeAlias

import anyio
import grpc
import grpc.aio
from google.protobuf.message import Message

from runtime.errors import InternalFault, Overloaded, RequestError, StartError
from runtime.http.auth import Level
from runtime.http.body_budget import BodyLease
from runtime.http.grace import GRACE_S, cancel_after_grace
from runtime.http.settings import HttpSettings
from runtime.messages.tenants import Tenant
from runtime.regular_file import read_regular
from runtime.rpc.calls import STUCK_S, Caller, Calls, Write
from runtime.rpc.messages import Messages
from runtime.rpc.schema import SERVICE, load
from runtime.service import Service

LOG = logging.getLogger("runtime.rpc")
LEVELS: dict[str, Level] = {"Health": "open", "Abort": "admin"}  # all other methods need a user's key
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

END_S = 1.0  # within which calls end whose connections are gone

OPTIONS = {
    "grpc.so_reuseport": 0,
    "grpc.max_concurrent_streams": 1024,  # of one connection; further calls wait in the client
    "grpc.server_handshake_timeout_ms": 15_000,
    "grpc.compression_enabled_algorithms_bitset": 1,  # none: compressed messages are refused
    "grpc.keepalive_time_ms": 60_000,  # a client that is gone without a word is noticed
    "grpc.keepalive_timeout_ms": 20_000,
}

Context: TypeAlias = grpc.aio.ServicerContext
Call: TypeAlias = Callable[[Message, Caller, Write], Awaitable[None]]


class Rpc:
    """A gRPC server. It listens from its construction on.

    Whatever a call says is read after its key was checked; a call without an answer to come (Health) is not
    read at all.
    """

    def __init__(
        self,
        service: Service,
        settings: HttpSettings,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
        max_connections: int = 8192,
    ) -> None:
        """`max_connections`: open at once, and calls that run at once. Raises StartError when the address
        cannot be used."""
        self.settings = settings
        self.messages = Messages(settings.max_body_bytes, settings.max_total_body_bytes)
        self.max_calls = max_connections
        self.num_calls: Counter[str] = Counter()  # that run now, by tenant
        self.tasks: set[asyncio.Task[None]] = set()  # grpc's own, one for each call
        limits = {"grpc.max_receive_message_length": settings.max_body_bytes} | OPTIONS
        self.server = grpc.aio.server(
            options=[*limits.items(), ("grpc.max_allowed_incoming_connections", max_connections)]
        )
        calls, (types, methods) = Calls(service, settings), load()
        handlers: dict[str, grpc.RpcMethodHandler] = {}
        for name, takes, several, gives in methods:
            call = getattr(calls, name.lower())
            # calls with one message are the same on the wire, and this kind reads it when it is asked to
            handlers[name] = grpc.stream_stream_rpc_method_handler(
                self._method(LEVELS.get(name, "user"), types[takes], call if several else answering(call)),
                response_serializer=types[gives].SerializeToString,
            )
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = (
                self.server.add_insecure_port(address)
                if credentials is None
                else self.server.add_secure_port(address, credentials)
            )
        except RuntimeError:
            raise StartError(f"cannot listen on {address}; choose another --port or --host") from None

    async def serve(self, shutdown: anyio.Event, remaining_s: Callable[[], float] = lambda: inf) -> None:
        """Serves until `shutdown`; running calls then have GRACE_S to end, and no longer than `remaining_s`
        says. Returns when all have ended."""
        await self.server.start()
        try:
            await shutdown.wait()
        finally:
            with anyio.CancelScope(shield=True):
                if shutdown.is_set():
                    await self._drain(remaining_s)
                await self.server.stop(0)  # cuts connections, and does not wait for the calls
                if self.tasks:
                    await asyncio.wait(self.tasks, timeout=END_S)

    async def _drain(self, remaining_s: Callable[[], float]) -> None:
        """Takes no more calls; returns when those that run have ended, or at the deadline."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_after_grace, tasks.cancel_scope, remaining_s)
            await self.server.stop(GRACE_S)
            tasks.cancel_scope.cancel()

    def _method(
        self, level: Level, kind: type[Message], call: Call
    ) -> Callable[[object, Context], Awaitable[None]]:
        async def method(_: object, context: Context) -> None:
            if task := asyncio.current_task():
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            lease = BodyLease(self.messages.budget)
            tenant = None
            try:
                caller = self._authenticate(level, context)
                if level == "open":
                    message = kind()
                else:
                    self._begin(caller.tenant)
                    tenant = caller.tenant
                    message = await self.messages.read(kind, context.read, lease)
                await call(message, caller, context.write)
            except Exception as error:
                lease.release()
                await _refuse(error, context)
            finally:
                lease.release()
                if tenant is not None:
                    self._end(tenant)

        return method

    def _begin(self, tenant: Tenant) -> None:
        """One more call of a tenant runs. Raises Overloaded for too many, of all tenants or of this one."""
        if self.num_calls.total() >= self.max_calls or self.num_calls[tenant.name] >= tenant.most(
            self.max_calls
        ):
            raise Overloaded(
                "as many calls run as this server takes (--max-connections, --tenant-quota); try again"
            )
        self.num_calls[tenant.name] += 1

    def _end(self, tenant: Tenant) -> None:
        self.num_calls[tenant.name] -= 1
        if not self.num_calls[tenant.name]:
            del self.num_calls[tenant.name]

    def _authenticate(self, level: Level, context: Context) -> Caller:
        metadata = context.invocation_metadata() or ()
        headers = [
            (key.encode(), value if isinstance(value, bytes) else value.encode()) for key, value in metadata
        ]
        return Caller(self.settings.keys.identify(level, headers), headers)


def answering(call: Callable[[Message, Caller], Awaitable[Message]]) -> Call:
    """A call with one answer as one that writes it."""

    async def answer(message: Message, caller: Caller, write: Write) -> None:
        answer = await call(message, caller)
        with anyio.move_on_after(STUCK_S) as limit:
            await write(answer)
        if limit.cancelled_caught:
            raise Overloaded("the client does not take the answer")

    return answer


async def _refuse(error: Exception, context: Context) -> None:
    if not isinstance(error, RequestError):
        LOG.error("a call failed", exc_info=error)
        error = InternalFault("something went wrong in the server; its log has the details")
    if error.param is not None:
        context.set_trailing_metadata((("param", error.param.encode("ascii", "replace").decode()),))
    with suppress(grpc.aio.InternalError):  # the client is gone
        await context.abort(CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message)


def credentials_of(
    certfile: str | None,
    keyfile: str | None,
    password: str | None,
    ca_certs: str | None,
    checked: ssl.SSLContext | None,
) -> grpc.ServerCredentials | None:
    """The server's TLS credentials; None without TLS. `checked` is the TLS context of the same files, which
    were checked with it: gRPC reports less about errors. Raises StartError."""
    if checked is None or certfile is None:
        return None
    if password is not None:
        raise StartError(
            "--ssl-keyfile-password does not work with --grpc-mode; give a key without a password"
        )
    chain = read_regular(certfile)
    key = chain if keyfile is None else read_regular(keyfile)
    authorities = None if ca_certs is None else read_regular(ca_certs)
    return grpc.ssl_server_credentials([(key, chain)], authorities, authorities is not None)
