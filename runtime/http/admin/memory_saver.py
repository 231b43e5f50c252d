"""What the ranks hold, over HTTP, in SGLang's words: memory that is given back and taken again, and weights
that are replaced."""

from typing import Any

from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.http.operation import Operation
from runtime.messages.memory import Part
from runtime.service import Service


class MemoryTagsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """/release_memory_occupation, /resume_memory_occupation. Without tags: everything."""

    tags: list[Part] | None = None


class UpdateBody(Struct, frozen=True, forbid_unknown_fields=True):
    """/update_weights_from_disk. In any case graphs are captured anew, memory that nobody holds goes back,
    and a pause stays as it is: the fields for that have no effect."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    is_async: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: dict[str, Any] | None = None


class ReleasedMemory(Struct, forbid_unknown_fields=True):
    """What is given back now."""

    success: bool
    message: str
    released: list[Part]


class Updated(Struct, forbid_unknown_fields=True):
    """The answer of /update_weights_from_disk."""

    success: bool
    message: str
    num_paused_requests: int
    weight_version: str


async def release(service: Service, body: MemoryTagsBody) -> Any:
    """Releases memory of the ranks."""
    return _released(list(await service.memory_saver.release(body.tags)))


async def resume(service: Service, body: MemoryTagsBody) -> Any:
    """Allocates released memory again."""
    return _released(list(await service.memory_saver.resume(body.tags)))


async def update(service: Service, body: UpdateBody) -> Any:
    """Loads other weights of the same model. Raises InvalidRequest."""
    if body.manifest is not None or body.is_async:
        raise InvalidRequest(
            "manifest and is_async are not served; leave them out",
            param="is_async" if body.manifest is None else "manifest",
        )
    if body.abort_all_requests:
        service.control.abort("")
    await service.memory_saver.update_weights(
        body.model_path, body.load_format, body.weight_version, flushes=body.flush_cache
    )
    load = service.load()
    return {
        "success": True,
        "message": "The weights were replaced.",
        "num_paused_requests": load.running + load.waiting,
        "weight_version": service.card.weight_version,
    }


def _released(parts: list[Part]) -> dict[str, Any]:
    return {"success": True, "message": f"given back: {', '.join(parts) or 'nothing'}", "released": parts}


OPERATIONS = (
    Operation(
        "GET POST",
        "/release_memory_occupation",
        "Give the ranks' memory back",
        body=MemoryTagsBody,
        example={"tags": ["kv_cache"]},
        answers=(ReleasedMemory,),
        call=release,
    ),
    Operation(
        "GET POST",
        "/resume_memory_occupation",
        "Take it again",
        body=MemoryTagsBody,
        example={"tags": ["kv_cache"]},
        answers=(ReleasedMemory,),
        call=resume,
    ),
    Operation(
        "POST",
        "/update_weights_from_disk",
        "Other weights of the same model",
        body=UpdateBody,
        example={"model_path": "/models/x"},
        answers=(Updated,),
        call=update,
    ),
)
