"""GET /v1/models, and the check of the `model` field."""

from typing import Any

from runtime.http.admin.adapters import adapter_named
from runtime.http.errors import ModelNotFound
from runtime.service import AdapterCard, ModelCard


def check_model(card: ModelCard, name: str | None) -> None:
    """Raises ModelNotFound, also for adapters: for what is computed without."""
    if adapter_named(card, name):
        raise ModelNotFound(
            f"{name} is an adapter, and this route computes with the plain model {card.name}", param="model"
        )


def told_model(card: ModelCard, name: str | None) -> str:
    """What answers call the model: an adapter as the client did. Raises ModelNotFound."""
    return name if name is not None and adapter_named(card, name) else card.name


def model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "runtime",
        "root": card.name,
        "max_model_len": card.limits.context_len,
    }


def adapter_object(card: ModelCard, adapter: AdapterCard) -> dict[str, Any]:
    return model_object(card) | {"id": adapter.name, "created": adapter.created, "parent": card.name}
