"""GET /v1/models and /v1/models/{name}, for clients of OpenAI and of Anthropic."""

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from runtime.http.fields.model import adapter_named
from runtime.http.openai.completion_response import Model, Models
from runtime.http.operation import Operation, json_response
from runtime.service import AdapterCard, ModelCard, Service


def list_models(service: Service, request: Request) -> dict[str, object]:
    """The served model and its adapters, as a list."""
    card = service.card
    entries = [_described(card, request), *(adapter_object(card, one) for one in card.adapters.values())]
    return {
        "object": "list",
        "data": entries,
        "has_more": False,
        "first_id": entries[0]["id"],
        "last_id": entries[-1]["id"],
    }


def get_model(service: Service, request: Request) -> dict[str, object] | Response:
    """The served model, or one of its adapters; all of them for an empty name, which is a slash too many.
    Raises ModelNotFound."""
    if not request.path_params["name"]:
        return json_response(list_models(service, request))
    card = service.card
    name = adapter_named(card, request.path_params["name"])
    return adapter_object(card, card.adapters[name]) if name else _described(card, request)


def model_object(card: ModelCard) -> dict[str, object]:
    """The served model in OpenAI's form."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "runtime",
        "root": card.name,
        "max_model_len": card.limits.context_len,
    }


def adapter_object(card: ModelCard, adapter: AdapterCard) -> dict[str, object]:
    """An adapter in OpenAI's form; `parent` is the served model."""
    return model_object(card) | {"id": adapter.name, "created": adapter.created, "parent": card.name}


def anthropic_fields(card: ModelCard) -> dict[str, object]:
    """The fields in which Anthropic's clients look for a model."""
    return {
        "id": card.name,
        "type": "model",
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created, UTC),
        "max_input_tokens": card.limits.longest_prompt,
        "max_tokens": card.limits.longest,
    }


def _described(card: ModelCard, request: Request) -> dict[str, object]:
    more = anthropic_fields(card) if "anthropic-version" in request.headers else {}
    return model_object(card) | more


OPERATIONS = (
    Operation("GET", "/v1/models", "The served model, as a list", answers=(Models,), show=list_models),
    Operation(
        "GET",
        "/v1/models/{name}",
        "The served model",
        answers=(Model,),
        show=get_model,
        pattern="/v1/models/{name:path}",
    ),
)
