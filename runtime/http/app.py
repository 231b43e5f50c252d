"""The HTTP API as an ASGI application: its routes, and what every route does with errors.

It can be mounted under any prefix of another application: it has no lifespan and no state of its own beyond
the service.
"""

from functools import partial

from msgspec import structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import Forbidden, RequestError
from runtime.http import errors
from runtime.http import websocket as socket
from runtime.http.access_log import AccessLog
from runtime.http.admin import memory_saver as memory_saver
from runtime.http.admin.health import SharedProbe
from runtime.http.auth import refuse_early, with_key_checks
from runtime.http.body_budget import LEASE, BodyBudget, BodyLease
from runtime.http.console import routes as console
from runtime.http.exact_routes import ExactRoutes
from runtime.http.fields.request_id import request_id, with_request_id
from runtime.http.hosts import AllowedHosts
from runtime.http.native.generate import generate
from runtime.http.openai.audio import routes as audio
from runtime.http.openai.stored_objects import StoredObjects
from runtime.http.operation import Serve
from runtime.http.request_cycle import EXTENSION
from runtime.http.schema import openapi
from runtime.http.schema.operations import OPERATIONS
from runtime.http.settings import DEFAULT, HttpSettings
from runtime.service import Service


def http_app(
    service: Service, settings: HttpSettings = DEFAULT, stored_objects: StoredObjects | None = None
) -> ASGIApp:
    """The application for one service. The caller runs `stored_objects`; without them, answers in the
    background are refused."""
    stored = stored_objects or StoredObjects(service)
    routes = [*_routes(service, settings), *stored.routes(settings)]
    app: ASGIApp = Starlette(
        routes=with_key_checks(routes, settings.keys),
        exception_handlers={
            RequestError: errors.on_request_error,
            HTTPException: errors.on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: errors.on_bug,
        },
    )

    app = ExactRoutes(routes, settings.keys, app)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )

    access = (
        None if settings.access_level is None else AccessLog(settings.access_level, settings.unlogged_paths)
    )

    budget = BodyBudget(settings.max_total_body_bytes)
    guarded = _checking_host(app, settings.allowed_hosts)

    async def entry(scope: Scope, receive: Receive, send: Send) -> None:
        scope[LEASE] = lease = BodyLease(budget)
        try:
            await serve(scope, receive, send)
        finally:
            lease.release()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await guarded(scope, receive, send)
            return
        cycle = scope.get("extensions", {}).get(EXTENSION)
        # going past `receive` and `send` is right only where nothing stands between us and the server
        if cycle is not None and cycle.own_send is send and cycle.own_receive is receive:
            scope[EXTENSION] = cycle
        # the header in which Anthropic's clients look for the id
        also = b"request-id" if errors.ANTHROPIC in scope["path"] else None
        name = request_id(scope["headers"])
        send = with_request_id(send, name, also=also)
        if access is None:
            await guarded(scope, receive, send)
        else:
            await access.serve(guarded, scope, receive, send, name)

    return entry


def _checking_host(app: ASGIApp, hosts: AllowedHosts) -> ASGIApp:
    """`app`, for requests that are addressed to this server; others get 403."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            hosts.check(scope["headers"])
        except Forbidden as error:
            await refuse_early(error, scope, receive, send)
        else:
            await app(scope, receive, send)

    return app if hosts.allows_any else check


def _routes(service: Service, settings: HttpSettings) -> list[Route | WebSocketRoute]:
    operations = [operation for operations in OPERATIONS.values() for operation in operations]
    generating = served(settings)
    bound = [
        structs.replace(operation, serve=generating.get(operation.path, operation.serve))
        for operation in operations
        if operation.is_stateless
    ]
    # Starlette tries one route after the other: those that generate come first
    bound.sort(key=lambda operation: operation.serve is None)
    return [
        *[operation.bind(service, settings) for operation in bound],
        *audio.routes(service, settings),
        SharedProbe(service).route(),
        *console.routes(is_enabled=settings.has_console),
        *openapi.routes(),
        socket.route(
            service,
            settings,
            {path: settings.unknown_fields.serving(serve, path) for path, serve in generating.items()},
        ),
    ]


def served(settings: HttpSettings) -> dict[str, Serve]:
    """The functions of the routes that generate, by path: those whose answers can be streams."""
    operations = [operation for operations in OPERATIONS.values() for operation in operations]
    by_path = {one.path: one.serve for one in operations if one.serve is not None and one.events}
    return by_path | {"/generate": partial(generate, is_disjoint=settings.stream_output)}


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """An answer for the log only: the client left while it sent its body."""
    return Response(status_code=499)
