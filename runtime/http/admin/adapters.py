"""Routes that load and unload LoRA adapters."""

from typing import Annotated as A

from msgspec import Meta, Struct
from starlette.responses import Response

from runtime.errors import Forbidden, InvalidRequest
from runtime.http.operation import Operation
from runtime.messages.tenants import tenant_of
from runtime.service import AdapterControls, Service


class LoadBody(Struct, frozen=True):
    """The body of /load_lora_adapter; vLLM's load_inplace is not supported. `tenant`: who alone may use the
    adapter; without it, the administrator loads adapters for all."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None
    load_inplace: bool | None = None
    tenant: A[str, Meta(min_length=1, max_length=256)] | None = None


class UnloadBody(Struct, frozen=True):
    """The body of /unload_lora_adapter; vLLM's lora_int_id is ignored."""

    lora_name: str
    lora_int_id: int | None = None


class Adapters(Struct, forbid_unknown_fields=True):
    """The loaded adapters after a change: name and folder."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


async def load(service: Service, body: LoadBody) -> dict[str, object]:
    """Loads an adapter. Raises Forbidden, InvalidRequest, Overloaded."""
    if body.load_inplace:
        raise InvalidRequest("adapters are not replaced in place; unload it first", param="load_inplace")
    tenant = service.tenant
    if body.tenant is not None and body.tenant != tenant.name:
        if not tenant.sees_all:
            raise Forbidden("only the admin key loads adapters for other tenants; leave tenant out")
        tenant = tenant_of(body.tenant)
    await _controls(service).load(body.lora_name, body.lora_path, is_pinned=bool(body.pinned), tenant=tenant)
    return _loaded(service)


async def unload(service: Service, body: UnloadBody) -> dict[str, object]:
    """Unloads an adapter when its requests have ended. Raises InvalidRequest."""
    await _controls(service).unload(body.lora_name, service.tenant)
    return _loaded(service)


async def load_v1(service: Service, body: LoadBody) -> Response:
    """As `load`, with vLLM's answer."""
    await load(service, body)
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")


async def unload_v1(service: Service, body: UnloadBody) -> Response:
    """As `unload`, with vLLM's answer."""
    await unload(service, body)
    return Response(
        f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain"
    )


def _controls(service: Service) -> AdapterControls:
    if service.adapters is None:
        raise InvalidRequest("this server has no adapters; start it with --enable-lora or --lora-paths")
    return service.adapters


def _loaded(service: Service) -> dict[str, object]:
    loaded = {card.name: card.folder for card in service.card.adapters.values()}
    return {"success": True, "error_message": "", "loaded_adapters": loaded}


OPERATIONS = (
    Operation(
        "POST",
        "/load_lora_adapter",
        "Load an adapter",
        body=LoadBody,
        example={"lora_name": "x", "lora_path": "/adapters/x"},
        answers=(Adapters,),
        call=load,
    ),
    Operation(
        "POST",
        "/unload_lora_adapter",
        "Unload an adapter, when its requests have ended",
        body=UnloadBody,
        example={"lora_name": "x"},
        answers=(Adapters,),
        call=unload,
    ),
    Operation(
        "POST",
        "/v1/load_lora_adapter",
        "The same, as vLLM has it",
        body=LoadBody,
        example={"lora_name": "x", "lora_path": "/adapters/x"},
        media="text",
        call=load_v1,
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        "The same, as vLLM has it",
        body=UnloadBody,
        example={"lora_name": "x"},
        media="text",
        call=unload_v1,
    ),
)
