"""`--grpc-mode`: the gRPC server, on the same event loop, in place of the HTTP one. Authentication and checks
are those of the HTTP routes."""

import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from math import inf
from typing import TypeAlias

import anyio
import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from runtime.errors import InternalFault, InvalidRequest, RequestError, StartError
from runtime.http.auth import Level
from runtime.http.settings import HttpSettings
from runtime.regular_file import read_regular
from runtime.rpc.calls import Caller, Calls
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
GRACE_S = 30.0  # for running calls, after shutdown

Context: TypeAlias = grpc.aio.ServicerContext


class Rpc:
    """A gRPC server. It listens from its construction on."""

    def __init__(
        self,
        service: Service,
        settings: HttpSettings,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Raises StartError when the address cannot be used."""
        self.settings = settings
        self.server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", settings.max_body_bytes), ("grpc.so_reuseport", 0)]
        )
        calls, (types, methods) = Calls(service, settings), load()
        handlers: dict[str, grpc.RpcMethodHandler] = {}
        for name, takes, several, gives in methods:
            level = LEVELS.get(name, "user")
            call = getattr(calls, name.lower())
            make = grpc.unary_stream_rpc_method_handler if several else grpc.unary_unary_rpc_method_handler
            method = (self._several if several else self._one)(level, types[takes], call)
            # messages are decoded after authentication
            handlers[name] = make(method, response_serializer=types[gives].SerializeToString)
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
        says."""
        await self.server.start()
        try:
            await shutdown.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self.server.stop(min(GRACE_S, remaining_s()) if shutdown.is_set() else 0)

    def _one(
        self, level: Level, kind: type[Message], call: Callable[[Message, Caller], Awaitable[Message]]
    ) -> Callable[[bytes, Context], Awaitable[Message]]:
        async def method(data: bytes, context: Context) -> Message:
            try:
                caller = self._authenticate(level, context)
                return await call(_read(kind, data), caller)
            except Exception as error:
                await _refuse(error, context)

        return method

    def _several(
        self,
        level: Level,
        kind: type[Message],
        call: Callable[[Message, Caller], AsyncGenerator[Message, None]],
    ) -> Callable[[bytes, Context], AsyncIterator[Message]]:
        async def method(data: bytes, context: Context) -> AsyncIterator[Message]:
            answers = None
            try:
                caller = self._authenticate(level, context)
                answers = call(_read(kind, data), caller)
                async for message in answers:
                    yield message
            except Exception as error:
                await _refuse(error, context)
            finally:
                if answers is not None:
                    await answers.aclose()

        return method

    def _authenticate(self, level: Level, context: Context) -> Caller:
        metadata = context.invocation_metadata() or ()
        headers = [
            (key.encode(), value if isinstance(value, bytes) else value.encode()) for key, value in metadata
        ]
        return Caller(self.settings.keys.identify(level, headers), headers)


def _read(kind: type[Message], data: bytes) -> Message:
    """Raises InvalidRequest."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the message is no {kind.DESCRIPTOR.name} of runtime.proto: {error}") from None


async def _refuse(error: Exception, context: Context) -> None:
    if not isinstance(error, RequestError):
        LOG.error("a call failed", exc_info=error)
        error = InternalFault("something went wrong in the server; its log has the details")
    if error.param is not None:
        context.set_trailing_metadata((("param", error.param.encode("ascii", "replace").decode()),))
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
