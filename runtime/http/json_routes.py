"""Routes that answer at once, in one piece of JSON."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.http.body import discard_body, read_body
from runtime.http.errors import decode

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


def json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def telling(gives: Any, tell: Callable[[Request], Any]) -> Endpoint:
    """Endpoint that answers with what `tell` returns, as the JSON of a `gives`. It wants no body; one that
    comes is read all the same: an answer that overtook it would end the connection."""

    async def endpoint(request: Request) -> Response:
        if request.method != "GET":
            await discard_body(request.receive)
        return json(msgspec.convert(tell(request), gives))

    return endpoint


def taking(kind: type[T], gives: Any, serve: Callable[[T], Awaitable[Any]], max_bytes: int) -> Endpoint:
    """Endpoint that reads a `kind`, an empty body being {}, and answers with what `serve` returns: a
    Response, or what becomes the JSON of a `gives`."""
    decoder = msgspec.json.Decoder(kind)

    async def endpoint(request: Request) -> Response:
        body = await read_body(request.scope, request.receive, max_bytes)
        answer = await serve(decode(body or b"{}", decoder))
        return answer if isinstance(answer, Response) else json(msgspec.convert(answer, gives))

    return endpoint
