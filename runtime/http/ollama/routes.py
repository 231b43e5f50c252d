"""The routes of Ollama's API that tell about models, and those that change them, which one server of one
model has not."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.errors import InvalidRequest
from runtime.http.body import discard_body
from runtime.http.json_routes import taking, telling
from runtime.http.native.native_response import Version
from runtime.http.ollama.ollama_request import NamedBody
from runtime.http.ollama.ollama_response import Processes, Shown, Tags
from runtime.http.ollama.serve import check_name
from runtime.http.settings import HttpSettings
from runtime.service import Service

NEVER = datetime(9999, 1, 1, tzinfo=UTC)  # when the model is unloaded
CHANGES = {
    "/api/pull": ["POST"],
    "/api/push": ["POST"],
    "/api/create": ["POST"],
    "/api/copy": ["POST"],
    "/api/delete": ["DELETE"],
    "/api/blobs/{digest}": ["POST", "HEAD"],
}


def routes(service: Service, settings: HttpSettings) -> list[Route]:
    async def show(body: NamedBody) -> Any:
        check_name(service.card, body.model or body.name or "")
        return shown(service)

    return [
        Route("/api/tags", telling(Tags, lambda _: {"models": [described(service)]})),
        Route("/api/ps", telling(Processes, lambda _: {"models": [running(service)]})),
        Route("/api/version", telling(Version, lambda _: {"version": service.server_info()["version"]})),
        Route("/api/show", taking(NamedBody, Shown, show, settings.max_body_bytes), methods=["POST"]),
        *[Route(path, _refusing(path), methods=methods) for path, methods in CHANGES.items()],
    ]


def described(service: Service) -> dict[str, Any]:
    """`digest` tells served models apart; it is not made of the weights."""
    card = service.card
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": datetime.fromtimestamp(card.created, UTC),
        "size": service.load().weights_bytes,
        "digest": sha256(f"{card.name} {card.created}".encode()).hexdigest(),
        "details": details(service),
    }


def running(service: Service) -> dict[str, Any]:
    return described(service) | {
        "expires_at": NEVER,
        "size_vram": service.load().weights_bytes,
        "context_length": service.card.limits.context_len,
    }


def details(service: Service) -> dict[str, Any]:
    family = service.server_info().get("architecture") or ""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def shown(service: Service) -> dict[str, Any]:
    card, family = service.card, service.server_info().get("architecture") or "unknown"
    info = {
        "general.architecture": family,
        "general.basename": card.name,
        f"{family}.context_length": card.limits.context_len,
        f"{family}.vocab_size": card.limits.vocab_size,
    }
    parameters = "\n".join(f"{name} {value}" for name, value in card.sampling_defaults.items())
    can = [
        "completion",
        *(["tools"] if card.formats.tools else []),
        *(["thinking"] if card.formats.thinking else []),
    ]
    if card.pooling is not None:
        can = ["embedding"]
    return {
        "modelfile": "",
        "parameters": parameters,
        "template": "",
        "details": details(service),
        "model_info": info,
        "capabilities": can,
        "modified_at": datetime.fromtimestamp(card.created, UTC),
    }


def _refusing(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        await discard_body(request.receive)
        raise InvalidRequest(
            f"{path} is not served: this server has one model, chosen with --model-path when it starts"
        )

    return endpoint
