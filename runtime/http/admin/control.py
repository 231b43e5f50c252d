"""Routes by which operators pause and continue generation, empty caches, abort requests and profile ranks."""

from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.http.operation import EmptyBody, Operation
from runtime.messages.ranks import Profile
from runtime.messages.scheduler import PauseMode
from runtime.messages.transfer import Role
from runtime.service import OpenRequest, Service

MAX_LISTED = 500  # open requests in one answer


class PauseBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /pause_generation."""

    mode: PauseMode = "abort"  # as in SGLang


class RoleBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /disaggregation_mode."""

    mode: Literal["prefill", "decode"]


class AbortBody(Struct, frozen=True):
    """The body of /abort_request: the prefix of request ids, or `abort_all`."""

    rid: str = ""
    abort_all: bool = False


class ProfileBody(Struct, frozen=True):
    """The body of /start_profile, in SGLang's form; unknown fields are accepted without effect."""

    output_dir: str | None = None
    num_steps: A[int, Meta(ge=1)] | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


class Done(Struct, forbid_unknown_fields=True):
    """A control request that succeeded."""

    status: Literal["ok"]
    message: str


class Aborted(Struct, forbid_unknown_fields=True):
    """The number of aborted requests."""

    aborted: int


class OpenRequests(Struct, forbid_unknown_fields=True):
    """The requests that have not ended: how many there are, and the oldest of them."""

    total: int
    requests: list[OpenRequest]


class Profiled(Struct, forbid_unknown_fields=True):
    """The folder of the profiles."""

    message: str
    output_dir: str


async def pause(service: Service, body: PauseBody) -> dict[str, object]:
    """Plans no steps until generation is continued."""
    await service.control.pause(body.mode)
    return {"status": "ok", "message": "Generation paused successfully."}


async def resume(service: Service, _: EmptyBody) -> dict[str, object]:
    """Continues generation after a pause."""
    await service.control.resume()
    return {"status": "ok", "message": "Generation continued successfully."}


async def flush_cache(service: Service, _: EmptyBody) -> Response:
    """Empties the prefix cache."""
    pages = await service.control.flush()
    return Response(f"Cache flushed: {pages} pages are free again.\n", media_type="text/plain")


async def clear_storage(service: Service, _: EmptyBody) -> Response:
    """Empties the storage tier of the prefix cache."""
    pages = await service.control.clear_storage()
    return Response(f"Storage cleared: {pages} pages are gone.\n", media_type="text/plain")


async def change_role(service: Service, body: RoleBody) -> dict[str, object]:
    """Takes the other half of requests from now on."""
    if (halves := service.control.halves) is None:
        raise InvalidRequest("this server computes whole requests (--disaggregation-mode)", param="mode")
    role: dict[str, object] = msgspec.to_builtins(await halves.change(body.mode))
    return role


async def abort(service: Service, body: AbortBody) -> dict[str, object]:
    """Aborts requests whose id begins with `rid`, or all. Raises InvalidRequest when neither is given."""
    if not body.rid and not body.abort_all:
        raise InvalidRequest(
            "give rid, the beginning of the ids of the requests to abort, or abort_all", param="rid"
        )
    return {"aborted": service.control.abort("" if body.abort_all else body.rid, service.tenant)}


def open_requests(service: Service, _: Request) -> dict[str, object]:
    """The requests that have not ended, oldest first, without their texts."""
    total, requests = service.control.open_requests(MAX_LISTED, service.tenant)
    return {"total": total, "requests": msgspec.to_builtins(requests)}


async def start_profile(service: Service, body: ProfileBody) -> dict[str, object]:
    """Starts torch's profiler on the ranks."""
    folder = service.control.start_profile(
        Profile(
            folder=body.output_dir or "",
            activities=tuple(body.activities or ("CPU", "GPU")),
            with_stack=bool(body.with_stack),
            record_shapes=bool(body.record_shapes),
            num_steps=body.num_steps,
        )
    )
    return {"message": "The ranks record; when they stop, each writes a file.", "output_dir": folder}


async def stop_profile(service: Service, _: EmptyBody) -> dict[str, object]:
    """Stops the profiler; each rank writes a file."""
    return {
        "message": "The ranks write what they recorded, which takes a moment.",
        "output_dir": service.control.stop_profile(),
    }


OPERATIONS = (
    Operation(
        "POST",
        "/pause_generation",
        "Pause generation: no steps are planned",
        body=PauseBody,
        example={"mode": "in_place"},
        answers=(Done,),
        call=pause,
    ),
    Operation("POST", "/continue_generation", "Continue generation", answers=(Done,), call=resume),
    Operation("GET POST", "/flush_cache", "Empty the prefix cache", media="text", call=flush_cache),
    Operation(
        "GET POST",
        "/clear_hicache_storage_backend",
        "Empty the storage tier",
        media="text",
        call=clear_storage,
    ),
    Operation(
        "POST",
        "/disaggregation_mode",
        "Compute the other half of requests",
        body=RoleBody,
        example={"mode": "prefill"},
        answers=(Role,),
        call=change_role,
    ),
    Operation(
        "POST",
        "/abort_request",
        "Abort requests by the prefix of their ids",
        body=AbortBody,
        example={"rid": "x"},
        answers=(Aborted,),
        call=abort,
    ),
    Operation(
        "GET",
        "/open_requests",
        "Requests that wait and run, without their texts",
        answers=(OpenRequests,),
        show=open_requests,
    ),
    Operation(
        "GET POST",
        "/start_profile",
        "Record where the ranks' time goes",
        body=ProfileBody,
        example={"num_steps": 5},
        answers=(Profiled,),
        call=start_profile,
    ),
    Operation("GET POST", "/stop_profile", "Write what was recorded", answers=(Profiled,), call=stop_profile),
)
