"""GET /v1/models, and the check of the `model` field."""

from typing import Any

from runtime.http.errors import ModelNotFound
from runtime.service import ModelCard


def check_model(card: ModelCard, name: str | None) -> None:
    """Raises ModelNotFound. Leaving the field out, or "default", means the served model, whatever its name."""
    if name not in (None, "default", card.name):
        raise ModelNotFound(f"the model {name} is not served here; this server has {card.name}", param="model")


def model_object(card: ModelCard) -> dict[str, Any]:
    return {"id": card.name, "object": "model", "created": card.created, "owned_by": "runtime", "root": card.name,
            "max_model_len": card.limits.context_len}
