"""Ollama's routes about models. Those that would change models are refused: a server has one model."""

from datetime import UTC, datetime
from hashlib import sha256
from typing import NoReturn

from starlette.requests import Request

from runtime.errors import InvalidRequest
from runtime.http.native.info import Version
from runtime.http.ollama.ollama_request import NamedBody
from runtime.http.ollama.ollama_response import Processes, Shown, Tags
from runtime.http.ollama.serve import check_name
from runtime.http.operation import Operation, Show
from runtime.service import Service

NEVER = datetime(9999, 1, 1, tzinfo=UTC)  # when the model would be unloaded
CHANGES = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{digest}")


async def show(service: Service, body: NamedBody) -> dict[str, object]:
    """POST /api/show. Raises ModelNotFound."""
    check_name(service.card, body.model or body.name or "")
    return shown(service)


def described(service: Service) -> dict[str, object]:
    """The served model as an entry of /api/tags. `digest` identifies the model; it is not computed from the
    weights."""
    card = service.card
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": datetime.fromtimestamp(card.created, UTC),
        "size": service.load().weights_bytes,
        "digest": sha256(f"{card.name} {card.created}".encode()).hexdigest(),
        "details": details(service),
    }


def running(service: Service) -> dict[str, object]:
    """The served model as an entry of /api/ps."""
    return described(service) | {
        "expires_at": NEVER,
        "size_vram": service.load().weights_bytes,
        "context_length": service.card.limits.context_len,
    }


def details(service: Service) -> dict[str, object]:
    """`details` of the served model."""
    weights = service.card.weights
    family = service.server_info().get("architecture") or ""
    return {
        "parent_model": "",
        "format": weights.format,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": short(weights.num_weights) if weights.num_weights else "",
        "quantization_level": weights.level,
    }


def short(number: int) -> str:
    """A number as Ollama writes that of the weights: 8B, 8.2B, 361.82M, 999K."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if number >= unit:
            return f"{number / unit:.{0 if number % unit == 0 else digits}f}{letter}"
    return str(number)


def shown(service: Service) -> dict[str, object]:
    """The response of /api/show."""
    card, family = service.card, service.server_info().get("architecture") or "unknown"
    info = {
        "general.architecture": family,
        "general.basename": card.name,
        **({"general.parameter_count": card.weights.num_weights} if card.weights.num_weights else {}),
        f"{family}.context_length": card.limits.context_len,
        f"{family}.vocab_size": card.limits.vocab_size,
    }
    parameters = "\n".join(f"{name} {value}" for name, value in card.sampling_defaults.items())
    can = [
        "completion",
        *(["tools"] if card.formats.tool_calls else []),
        *(["thinking"] if card.formats.reasoning else []),
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


def _refusing(path: str) -> Show:
    def refuse(service: Service, request: Request) -> NoReturn:
        raise InvalidRequest(
            f"{path} is not served: this server has one model, chosen with --model-path when it starts"
        )

    return refuse


OPERATIONS = (
    Operation(
        "GET",
        "/api/tags",
        "The served model, as a list",
        answers=(Tags,),
        show=lambda service, _: {"models": [described(service)]},
    ),
    Operation(
        "GET",
        "/api/ps",
        "The served model, which is loaded",
        answers=(Processes,),
        show=lambda service, _: {"models": [running(service)]},
    ),
    Operation(
        "GET",
        "/api/version",
        "Version of this server",
        answers=(Version,),
        show=lambda service, _: {"version": service.server_info()["version"]},
    ),
    Operation(
        "POST",
        "/api/show",
        "About the served model",
        body=NamedBody,
        example={"model": "default"},
        answers=(Shown,),
        call=show,
    ),
    *[
        Operation(
            "DELETE" if path == "/api/delete" else "POST",
            path,
            "Refused: this server has one model, chosen when it starts",
            show=_refusing(path),
            undocumented="HEAD" if "blobs" in path else "",
        )
        for path in CHANGES
    ],
)
