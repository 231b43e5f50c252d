"""Which adapter a body asks for, and the routes by which adapters come and go.

A request names one as its model (`NAME`, or `MODEL:NAME`), or in `lora_path`, in SGLang's words.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from starlette.responses import Response
from starlette.routing import Route

from runtime.errors import InvalidRequest
from runtime.http.errors import ModelNotFound
from runtime.http.json_routes import taking
from runtime.http.native.native_response import Adapters
from runtime.http.settings import HttpSettings
from runtime.service import AdapterControls, ModelCard, Service

LoraPath = str | list[str | None] | None


def adapter_named(card: ModelCard, model: str | None) -> str:
    """The adapter that a body's `model` means; "": the plain model. Raises ModelNotFound. Leaving the field
    out, or "default", means the served model, whatever its name."""
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
        f"the model {model} is not served here; this server has {card.name}{more}", param="model"
    )


def adapters_of(card: ModelCard, model: str | None, paths: LoraPath, count: int) -> Sequence[str]:
    """One for each of `count` prompts. Raises InvalidRequest, ModelNotFound."""
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


class LoadBody(Struct, frozen=True):
    """/load_lora_adapter; vLLM's load_inplace is not served."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None
    load_inplace: bool | None = None


class UnloadBody(Struct, frozen=True):
    """/unload_lora_adapter; the number that vLLM's clients may give is not looked at."""

    lora_name: str
    lora_int_id: int | None = None


def routes(service: Service, settings: HttpSettings) -> list[Route]:
    def controls() -> AdapterControls:
        if service.adapters is None:
            raise InvalidRequest("this server has no adapters; start it with --enable-lora or --lora-paths")
        return service.adapters

    async def load(body: LoadBody) -> Any:
        if body.load_inplace:
            raise InvalidRequest("adapters are not replaced in place; unload it first", param="load_inplace")
        await controls().load(body.lora_name, body.lora_path, is_pinned=bool(body.pinned))
        return told()

    async def unload(body: UnloadBody) -> Any:
        await controls().unload(body.lora_name)
        return told()

    def told() -> dict[str, Any]:
        loaded = {card.name: card.folder for card in service.card.adapters.values()}
        return {"success": True, "error_message": "", "loaded_adapters": loaded}

    async def load_v1(body: LoadBody) -> Any:
        await load(body)
        return Response(
            f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain"
        )

    async def unload_v1(body: UnloadBody) -> Any:
        await unload(body)
        return Response(
            f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain"
        )

    size = settings.max_body_bytes
    return [
        Route("/load_lora_adapter", taking(LoadBody, Adapters, load, size), methods=["POST"]),
        Route("/unload_lora_adapter", taking(UnloadBody, Adapters, unload, size), methods=["POST"]),
        Route("/v1/load_lora_adapter", taking(LoadBody, Any, load_v1, size), methods=["POST"]),
        Route("/v1/unload_lora_adapter", taking(UnloadBody, Any, unload_v1, size), methods=["POST"]),
    ]
