"""The HTTP face as an ASGI application: routes, and what every route does with errors.

It can be mounted under any prefix of another application: it has no lifespan and no state of its own beyond
the service.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import RequestError, TooLarge
from runtime.http import errors
from runtime.http import websocket as socket
from runtime.http.access_log import AccessLog
from runtime.http.admin import adapters
from runtime.http.admin import control as admin
from runtime.http.admin import expert_load as experts
from runtime.http.admin import memory_saver as memory_saver
from runtime.http.admin.adapters import adapter_named
from runtime.http.anthropic.message_request import CountBody
from runtime.http.anthropic.message_response import TokenCount
from runtime.http.anthropic.messages import count_tokens, messages, model_fields
from runtime.http.auth import guarded
from runtime.http.body import read_body, refusing
from runtime.http.embeddings.embeddings import embeddings, encode, pooled
from runtime.http.embeddings.scores import classify, rerank, score
from runtime.http.fields.headers import origin
from runtime.http.fields.request_id import request_id, telling_id
from runtime.http.json_routes import json, taking, telling
from runtime.http.native import info, parse
from runtime.http.native.generate import generate
from runtime.http.ollama import routes as ollama
from runtime.http.ollama.embed import embed as ollama_embed
from runtime.http.ollama.embed import embeddings as ollama_embeddings
from runtime.http.ollama.serve import chat as ollama_chat
from runtime.http.ollama.serve import generate as ollama_generate
from runtime.http.openai.chat import chat
from runtime.http.openai.completion_response import Model, Models
from runtime.http.openai.completions import completions
from runtime.http.openai.models import adapter_object, model_object
from runtime.http.openai.stored_objects import Kept
from runtime.http.schema import openapi
from runtime.http.settings import DEFAULT, HttpSettings
from runtime.http.streaming.connection import EXTENSION
from runtime.http.streaming.exchange import DIRECT, Answer
from runtime.service import Service

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Serve = Callable[[Service, bytes], Answer | Response]  # body of a request -> its answer; raises RequestError


def http_app(service: Service, settings: HttpSettings = DEFAULT, kept: Kept | None = None) -> ASGIApp:
    """The application for one service. `kept`, if it is given, runs beside it; if not, answers in the
    background are refused."""
    stored = (kept or Kept(service)).routes(settings)
    app: ASGIApp = Starlette(
        routes=guarded([*_routes(service, settings), *stored], settings.keys),
        exception_handlers={
            RequestError: errors.on_request_error,
            HTTPException: errors.on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: errors.on_bug,
        },
    )

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

    async def entry(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection, own_send = scope.get("extensions", {}).get(EXTENSION, (None, None))
        # writing past `send` is right only where nothing stands between us and the server
        if connection is not None and own_send is send:
            scope[DIRECT] = connection
        # where Anthropic's clients look for it
        also = b"request-id" if errors.ANTHROPIC in scope["path"] else None
        name = request_id(scope["headers"])
        send = telling_id(send, name, also=also)
        if access is None:
            await app(scope, receive, send)
        else:
            await access.serve(app, scope, receive, send, name)

    return entry


def _routes(service: Service, settings: HttpSettings) -> list[Route | WebSocketRoute]:
    def model(request: Request) -> Any:
        name = adapter_named(service.card, request.path_params["name"])
        return adapter_object(service.card, service.card.adapters[name]) if name else described(request)

    def models(request: Request) -> Any:
        entries = [
            described(request),
            *(adapter_object(service.card, adapter) for adapter in service.card.adapters.values()),
        ]
        return {
            "object": "list",
            "data": entries,
            "has_more": False,
            "first_id": entries[0]["id"],
            "last_id": entries[-1]["id"],
        }

    def described(request: Request) -> Any:
        more = model_fields(service.card) if "anthropic-version" in request.headers else {}
        return model_object(service.card) | more

    return [
        *[
            Route(
                path,
                _answering(service, serve, settings),
                methods=["POST", "PUT"] if path in ("/generate", "/encode") else ["POST"],
            )
            for path, serve in (served(settings) | VECTORS).items()
        ],
        Route(
            "/v1/messages/count_tokens",
            taking(CountBody, TokenCount, partial(count_tokens, service), settings.max_body_bytes),
            methods=["POST"],
        ),
        Route("/v1/models", telling(Models, models)),
        Route("/v1/models/{name:path}", telling(Model, model)),
        Route("/", _greet),
        Route("/health", _health(service)),
        Route("/health_generate", _probe(service)),
        Route("/ping", _health(service)),
        Route("/metrics", _metrics(service)),
        *info.routes(service, settings),
        *parse.routes(service, settings),
        *ollama.routes(service, settings),
        *openapi.routes(),
        *admin.routes(service, settings),
        *adapters.routes(service, settings),
        *experts.routes(service, settings),
        *memory_saver.routes(service, settings),
        socket.route(service, settings, served(settings)),
    ]


# of models that make vectors or scores of texts, and scores of those that generate
VECTORS: dict[str, Serve] = {
    "/v1/embeddings": embeddings,
    "/api/embed": ollama_embed,
    "/api/embeddings": ollama_embeddings,
    "/pooling": pooled,
    "/encode": encode,
    "/score": score,
    "/v1/score": score,
    "/rerank": rerank,
    "/v1/rerank": rerank,
    "/v2/rerank": partial(rerank, tells_documents=False),
    "/classify": classify,
    "/v1/classify": classify,
}


def served(settings: HttpSettings) -> dict[str, Serve]:
    """The routes that generate."""
    return {
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
        "/v1/messages": messages,
        "/api/chat": ollama_chat,
        "/api/generate": ollama_generate,
        "/generate": partial(generate, is_disjoint=settings.stream_output),
    }


def _answering(service: Service, serve: Serve, settings: HttpSettings) -> Endpoint:
    """Endpoint that reads a body and answers it."""

    async def endpoint(request: Request) -> ASGIApp:
        try:
            body = await read_body(request.scope, request.receive, settings.max_body_bytes)
        except TooLarge as error:
            return refusing(errors.error_response(error, errors.path_of(request)))
        answer = serve(service, body)
        if isinstance(answer, Answer):
            answer.exchange.come_from(origin(request.headers, settings.tenant_is))
            answer.interval = max(settings.stream_interval, answer.interval)
        return answer

    return endpoint


async def _greet(_: Request) -> Response:
    """Clients of Ollama ask here whether anybody is there."""
    return Response("runtime is running; docs tells what it serves\n", media_type="text/plain")


def _health(service: Service) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        health = service.health()
        # the last two are what somebody wished
        return json(health, 200 if health.state in ("ready", "paused", "released") else 503)

    return endpoint


def _probe(service: Service) -> Endpoint:
    async def endpoint(_: Request) -> ASGIApp:
        return admin.probe(service)

    return endpoint


def _metrics(service: Service) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return Response(service.metrics(), media_type="text/plain; version=0.0.4")

    return endpoint


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client left while it sent its body: nobody reads this."""
    return Response(status_code=499)
