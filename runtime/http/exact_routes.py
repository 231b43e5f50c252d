"""Routes whose paths have no parameters, found by one look-up and served without the layers of a
framework."""

from collections.abc import Iterable
from inspect import iscoroutinefunction

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import RequestError
from runtime.http import errors
from runtime.http.auth import TENANT, Keys, level_of
from runtime.http.body import respond_early
from runtime.http.request_cycle import EXTENSION


class ExactRoutes:
    """Serves those of `routes` that it can, on our own server's HTTP/1.1 connections; `fallback` serves the
    rest.

    What comes of a request is the same either way: `fallback` has these routes too.
    """

    def __init__(self, routes: Iterable[BaseRoute], keys: Keys, fallback: ASGIApp) -> None:
        self._keys = keys
        self._fallback = fallback
        self._endpoints = {
            (method, route.path): (route.endpoint, level_of(route.path))
            for route in routes
            if isinstance(route, Route) and "{" not in route.path and iscoroutinefunction(route.endpoint)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = scope.get(EXTENSION)
        found = None
        if cycle is not None and not scope["root_path"]:
            found = self._endpoints.get((scope["method"], scope["path"]))
        if cycle is None or found is None:
            await self._fallback(scope, receive, send)
            return
        endpoint, level = found
        request = Request(scope, receive, send)
        try:
            try:
                scope[TENANT] = self._keys.identify(level, scope["headers"])
            except RequestError as error:
                await respond_early(errors.error_response(error, errors.form_of(scope)))(scope, receive, send)
                return
            answer = await endpoint(request)
            await answer(scope, receive, send)
        except RequestError as error:
            refusal = errors.on_request_error(request, error)
            await (refusal if cycle.has_whole_body else respond_early(refusal))(scope, receive, send)
        except HTTPException as error:
            await (await errors.on_http_error(request, error))(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception as error:
            if not cycle.is_started:
                await errors.on_bug(request, error)(scope, receive, send)
            raise
