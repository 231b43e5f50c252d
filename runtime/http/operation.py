"""An operation: one row from which a route, its endpoint and its part of the OpenAPI document are made.

A row names one function that does the work:

    serve   (service, bytes of the body) -> Answer   generates, also over the WebSocket
    call    async (service, decoded body) -> value   reads a JSON body and answers at once
    show    (service, request) -> value              answers at once, without a body

A row without a function belongs to an object with state (stored responses, files, batches), which makes the
route itself with `route`, `json_route`, `body_route` or `request_route`.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from runtime.errors import RequestError
from runtime.http import errors
from runtime.http.body import discard_body, read_body, read_cut_body, respond_early
from runtime.http.cut_body import attempt
from runtime.http.fields.headers import read_headers
from runtime.http.settings import HttpSettings
from runtime.http.streaming.exchange import Answer
from runtime.http.tenant_service import service_for, tenant_in
from runtime.http.unknown_fields import UnknownFields, warned
from runtime.messages.tenants import Tenant
from runtime.service import Service

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Serve = Callable[[Service, bytes], Answer | Response]  # raises RequestError
# the second argument is a body of the row's type, `Operation.body`; raises RequestError
Call = Callable[[Service, Any], Awaitable[object]]
Show = Callable[[Service, Request], object]  # raises RequestError

# What an answer is encoded as. "sse" and "ndjson": where the body asks for a stream; otherwise JSON.
Media = Literal["json", "sse", "ndjson", "text", "binary", "html", "any"]


class EmptyBody(Struct, frozen=True):
    """The body of a route that takes none; any JSON object is accepted and ignored."""


class Operation(Struct, frozen=True):
    """One route: its methods, path and types, an example, and the function that serves it.

    `answers` are the types of which the JSON of an answer is one; none: the
    answer has no JSON. `events` are the types of which each event of its stream is one.
    """

    methods: str  # separated by spaces; all of them do the same
    path: str
    summary: str
    body: type[Struct] | None = None
    example: Mapping[str, object] = {}  # of the body
    answers: tuple[object, ...] = ()
    events: tuple[object, ...] = ()
    media: Media = "json"
    form: Mapping[str, str] = {}  # of a body that is a form: the fields that it must have, with examples
    form_options: tuple[str, ...] = ()  # the fields that it may have
    query: tuple[str, ...] = ()  # query parameters
    serve: Serve | None = None
    call: Call | None = None
    show: Show | None = None
    pattern: str = ""  # Starlette's path pattern, where it differs from `path`
    undocumented: str = ""  # more methods, which the document leaves out

    @property
    def is_stateless(self) -> bool:
        """Whether the row names the function that serves it."""
        return not (self.serve is None and self.call is None and self.show is None)

    def bind(self, service: Service, settings: HttpSettings) -> Route:
        """The route of a row that names its function."""
        if self.serve is not None:
            return self.route(_answering(service, self.path, self.serve, settings))
        if self.call is not None:
            call = self.call
            return self.body_route(
                lambda tenant, body: call(service_for(service, tenant), body),
                settings.max_body_bytes,
                settings.unknown_fields,
            )
        assert self.show is not None
        show = self.show
        return self.json_route(lambda request: show(service_for(service, tenant_in(request.scope)), request))

    def route(self, endpoint: Endpoint) -> Route:
        """A route with an endpoint of its own."""
        return Route(
            self.pattern or self.path, endpoint, methods=[*self.methods.split(), *self.undocumented.split()]
        )

    def json_route(self, show: Callable[[Request], object]) -> Route:
        """A route that answers with what `show` returns: a Response, an Answer, or a value of a type in
        `answers`.

        It needs no body. A body that comes is read all the same: an answer sent before the end of the body
        would end the connection.
        """

        async def endpoint(request: Request) -> ASGIApp:
            if request.method != "GET":
                await discard_body(request.receive)
            return self._response(show(request))

        return self.route(endpoint)

    def body_route(
        self, call: Callable[[Tenant, Any], Awaitable[object]], max_bytes: int, unknown_fields: UnknownFields
    ) -> Route:
        """A route that decodes a body of type `body`, an empty one being {}, and answers with what `call`
        returns for the tenant and the body: a Response, or a value of one of `answers`."""
        return self.request_route(
            lambda request, body: call(tenant_in(request.scope), body), max_bytes, unknown_fields
        )

    def request_route(
        self, call: Callable[[Request, Any], Awaitable[object]], max_bytes: int, unknown_fields: UnknownFields
    ) -> Route:
        """As `body_route`, for a `call` that needs the request too, for what its path names."""
        decoder: msgspec.json.Decoder[Struct] = msgspec.json.Decoder(self.body or EmptyBody)

        async def endpoint(request: Request) -> ASGIApp:
            content = await read_body(request.scope, request.receive, max_bytes)
            body, ignored = unknown_fields.attempt(
                partial(errors.decode, decoder=decoder), content or b"{}", self.path
            )
            return warned(self._response(await call(request, body)), ignored)

        return self.route(endpoint)

    def _response(self, value: object) -> ASGIApp:
        if isinstance(value, Response | Answer):
            return value
        (kind,) = self.answers
        return json_response(msgspec.convert(value, kind))


HELLO = [{"role": "user", "content": "Hello!"}]  # messages, for examples


def json_response(content: object, status: int = 200) -> Response:
    """`content` as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _answering(service: Service, path: str, serve: Serve, settings: HttpSettings) -> Endpoint:
    async def endpoint(request: Request) -> ASGIApp:
        try:
            body = await read_cut_body(request.scope, request.receive, settings.max_body_bytes)
        except RequestError as error:  # not all of it has been read
            return respond_early(errors.error_response(error, errors.path_of(request)))
        own = service_for(service, tenant_in(request.scope))
        answer, ignored = attempt(
            body,
            lambda content: settings.unknown_fields.attempt(partial(serve, own), content, path),
            lambda taken: isinstance(taken[0], Answer) and taken[0].exchange.take_files(body.texts),
        )
        if isinstance(answer, Answer):
            answer.exchange.apply_headers(read_headers(request.headers, settings.label_header))
            answer.interval = max(settings.stream_interval, answer.interval)
        return warned(answer, ignored)

    return endpoint
