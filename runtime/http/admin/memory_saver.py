"""Sleep and wake over HTTP, in SGLang's form: memory of the ranks is released and resumed, weights are
updated."""

from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.http.operation import Operation
from runtime.json_value import JsonDict
from runtime.messages.memory import Part
from runtime.service import Service


class MemoryTagsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /release_memory_occupation and /resume_memory_occupation. Without tags: all memory."""

    tags: list[Part] | None = None


class UpdateBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /update_weights_from_disk. CUDA graphs are always captured again, unused memory is always
    freed and a pause always stays: the fields for these have no effect."""

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
    manifest: JsonDict | None = None


class ReleasedMemory(Struct, forbid_unknown_fields=True):
    """The memory that is released now."""

    success: bool
    message: str
    released: list[Part]


class Updated(Struct, forbid_unknown_fields=True):
    """The response of /update_weights_from_disk."""

    success: bool
    message: str
    num_paused_requests: int
    weight_version: str


async def release(service: Service, body: MemoryTagsBody) -> dict[str, object]:
    """Releases memory of the ranks."""
    return _released(list(await service.memory_saver.release(body.tags)))


async def resume(service: Service, body: MemoryTagsBody) -> dict[str, object]:
    """Allocates released memory again."""
    return _released(list(await service.memory_saver.resume(body.tags)))


async def update(service: Service, body: UpdateBody) -> dict[str, object]:
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


def _released(parts: list[Part]) -> dict[str, object]:
    return {"success": True, "message": f"given back: {', '.join(parts) or 'nothing'}", "released": parts}


OPERATIONS = (
    Operation(
        "GET POST",
        "/release_memory_occupation",
        "Release memory of the ranks",
        body=MemoryTagsBody,
        example={"tags": ["kv_cache"]},
        answers=(ReleasedMemory,),
        call=release,
    ),
    Operation(
        "GET POST",
        "/resume_memory_occupation",
        "Allocate released memory again",
        body=MemoryTagsBody,
        example={"tags": ["kv_cache"]},
        answers=(ReleasedMemory,),
        call=resume,
    ),
    Operation(
        "POST",
        "/update_weights_from_disk",
        "Load other weights of the same model",
        body=UpdateBody,
        example={"model_path": "/models/x"},
        answers=(Updated,),
        call=update,
    ),
)
