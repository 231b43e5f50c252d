"""The `model` and `lora_path` fields: which model or adapter a request asks for.

A request names an adapter as its model (`NAME`, or `MODEL:NAME`), or in `lora_path`, as in SGLang.
"""

from collections.abc import Sequence

from runtime.errors import InvalidRequest
from runtime.http.errors import ModelNotFound
from runtime.service import ModelCard

LoraPath = str | list[str | None] | None


def adapter_named(card: ModelCard, model: str | None) -> str:
    """The adapter that a body's `model` names; "": the base model, which is also meant by leaving the field
    out and by "default". Raises ModelNotFound."""
    if model in (None, "default", card.name):
        return ""
    assert model is not None
    base, colon, name = model.partition(":")
    if model in card.adapters:
        return model
    if colon and base in ("default", card.name) and name in card.adapters:
        return name
    more = f" and the adapters {', '.join(card.adapters)}" if card.adapters else ""
    raise ModelNotFound(
        f"the model {model or repr(model)} is not served here; this server has {card.name}{more}",
        param="model",
    )


def adapters_of(card: ModelCard, model: str | None, paths: LoraPath, count: int) -> Sequence[str]:
    """The adapter of each of `count` prompts. Raises InvalidRequest, ModelNotFound."""
    named = adapter_named(card, model)
    if isinstance(paths, list) and len(paths) != count:
        raise InvalidRequest(f"lora_path has {len(paths)} entries for {count} prompts", param="lora_path")
    each = [path or "" for path in paths] if isinstance(paths, list) else [paths or ""] * count
    if named and any(path not in ("", named) for path in each):
        raise InvalidRequest(
            f"model asks for the adapter {named}, and lora_path for another one; give one of them",
            param="lora_path",
        )
    return [path or named for path in each]


def check_model(card: ModelCard, name: str | None) -> None:
    """Raises ModelNotFound, also for adapters: for routes that run without."""
    if adapter_named(card, name):
        raise ModelNotFound(
            f"{name} is an adapter, and this route computes with the plain model {card.name}", param="model"
        )


def response_model(card: ModelCard, name: str | None) -> str:
    """The model name of answers: an adapter as the client named it. Raises ModelNotFound."""
    return name if name is not None and adapter_named(card, name) else card.name
