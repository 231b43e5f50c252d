"""What operators ask and order: is it well, how busy is it; pause, go on, empty the cache, abort requests of
others."""

import time
from typing import Annotated as A
from typing import Any
from uuid import uuid4

from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.routing import Route

from runtime.errors import InvalidRequest, RequestError, Unavailable
from runtime.http.json_routes import taking, telling
from runtime.http.native.native_response import Aborted, Done, Loads, OldLoad, Probed, Profiled
from runtime.http.settings import HttpSettings
from runtime.http.streaming.exchange import Answer
from runtime.http.streaming.writer import Output
from runtime.messages.ranks import Profile
from runtime.messages.requests import Delta, GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import PauseMode
from runtime.service import Load, Service

PROBE_TOKEN = 0  # a vocabulary has at least this one
EITHER = ["GET", "POST"]


class PauseBody(Struct, frozen=True, forbid_unknown_fields=True):
    """/pause_generation"""

    mode: PauseMode = "abort"  # as in SGLang


class AbortBody(Struct, frozen=True):
    """/abort_request: the beginning of the ids, or `abort_all`."""

    rid: str = ""
    abort_all: bool = False


class OpenSessionBody(Struct, frozen=True):
    """/open_session. `streaming`: each request goes on from the last one."""

    capacity_of_str_len: A[int, Meta(ge=1, le=2**40)]
    session_id: A[str, Meta(min_length=1, max_length=256)] | None = None
    streaming: bool | None = None
    # seconds without a request, after which it is closed
    timeout: A[float, Meta(gt=0, le=31_536_000)] | None = None


class CloseSessionBody(Struct, frozen=True):
    """/close_session"""

    session_id: str


class ProfileBody(Struct, frozen=True):
    """/start_profile, in SGLang's words; what it knows besides is accepted without effect."""

    output_dir: str | None = None
    num_steps: A[int, Meta(ge=1)] | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


class NoBody(Struct, frozen=True):
    """Whatever is sent is as good as nothing."""


class ProbeAnswerFormat:
    """The answer of /health_generate."""

    gives = Probed

    def events(self, choice: int, delta: Delta) -> bytes:
        raise AssertionError("a probe is not streamed")

    def tail(self) -> bytes:
        raise AssertionError("a probe is not streamed")

    def failure(self, error: RequestError) -> bytes:
        raise AssertionError("a probe is not streamed")

    def body(self, outputs: list[Output]) -> Any:
        return {"state": "ready", "output_ids": outputs[0].token_ids}


def probe(service: Service) -> Answer:
    """Generates one token, through everything that a request goes through. Raises Unavailable while nothing
    is generated."""
    if service.health().state == "paused":
        raise Unavailable("generation is paused (/pause_generation); /continue_generation ends that")
    if service.health().state == "released":
        raise Unavailable(
            "memory of the ranks is given back (/release_memory_occupation); /resume_memory_occupation takes it again"
        )
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(
        id=f"probe-{uuid4().hex}",
        prompt=Tokens([PROBE_TOKEN]),
        params=params,
        arrival_s=time.monotonic(),
        pools=service.card.pooling is not None,
    )
    return Answer(service, [request], ProbeAnswerFormat(), is_stream=False, names={})


def routes(service: Service, settings: HttpSettings) -> list[Route]:
    control = service.control

    async def pause(body: PauseBody) -> Any:
        await control.pause(body.mode)
        return {"status": "ok", "message": "Generation paused successfully."}

    async def go_on(_: NoBody) -> Any:
        await control.resume()
        return {"status": "ok", "message": "Generation continued successfully."}

    async def flush(_: NoBody) -> Any:
        pages = await control.flush()
        return Response(f"Cache flushed: {pages} pages are free again.\n", media_type="text/plain")

    async def clear_storage(_: NoBody) -> Any:
        pages = await control.clear_storage()
        return Response(f"Storage cleared: {pages} pages are gone.\n", media_type="text/plain")

    async def abort(body: AbortBody) -> Any:
        if not body.rid and not body.abort_all:
            raise InvalidRequest(
                "give rid, the beginning of the ids of the requests to abort, or abort_all", param="rid"
            )
        return {"aborted": control.abort("" if body.abort_all else body.rid)}

    async def open_session(body: OpenSessionBody) -> Any:
        return control.open_session(
            body.capacity_of_str_len, body.session_id, body.timeout, is_line=bool(body.streaming)
        )

    async def close_session(body: CloseSessionBody) -> Any:
        control.close_session(body.session_id)
        return Response()

    async def start_profile(body: ProfileBody) -> Any:
        folder = control.start_profile(
            Profile(
                folder=body.output_dir or "",
                activities=tuple(body.activities or ("CPU", "GPU")),
                with_stack=bool(body.with_stack),
                record_shapes=bool(body.record_shapes),
                num_steps=body.num_steps,
            )
        )
        return {"message": "The ranks record; when they stop, each writes a file.", "output_dir": folder}

    async def stop_profile(_: NoBody) -> Any:
        return {
            "message": "The ranks write what they recorded, which takes a moment.",
            "output_dir": control.stop_profile(),
        }

    size = settings.max_body_bytes
    return [
        Route("/pause_generation", taking(PauseBody, Done, pause, size), methods=["POST"]),
        Route("/continue_generation", taking(NoBody, Done, go_on, size), methods=["POST"]),
        Route("/flush_cache", taking(NoBody, Any, flush, size), methods=EITHER),
        Route("/clear_hicache_storage_backend", taking(NoBody, Any, clear_storage, size), methods=EITHER),
        Route("/abort_request", taking(AbortBody, Aborted, abort, size), methods=["POST"]),
        Route("/open_session", taking(OpenSessionBody, str, open_session, size), methods=EITHER),
        Route("/close_session", taking(CloseSessionBody, Any, close_session, size), methods=EITHER),
        Route("/start_profile", taking(ProfileBody, Profiled, start_profile, size), methods=EITHER),
        Route("/stop_profile", taking(NoBody, Profiled, stop_profile, size), methods=EITHER),
        Route("/v1/loads", telling(Loads, lambda _: loads(service.load()))),
        Route("/get_load", telling(list[OldLoad], lambda _: old_loads(service.load()))),
    ]


def loads(load: Load) -> dict[str, Any]:
    """The load in SGLang's names, one entry for each scheduler. What only we tell: num_cached_tokens,
    num_steps, page_size."""
    used = (load.used_pages - load.cached_pages) * load.page_size
    usage = (load.used_pages - load.cached_pages) / max(load.total_pages, 1)
    return {
        "timestamp": time.time(),
        "dp_rank_count": 1,
        "loads": [
            {
                "dp_rank": 0,
                "timestamp": time.time(),
                "num_running_reqs": load.running,
                "num_waiting_reqs": load.waiting,
                "num_total_reqs": load.running + load.waiting,
                "num_used_tokens": used,
                "num_total_tokens": used + load.waiting_tokens,
                "num_cached_tokens": load.cached_pages * load.page_size,
                "max_total_num_tokens": load.total_pages * load.page_size,
                "token_usage": usage,
                "gen_throughput": load.tokens_per_s,
                "cache_hit_rate": load.cached_tokens / max(load.prompt_tokens, 1),
                "utilization": max(usage, load.running / max(load.max_running, 1)),
                "max_running_requests": load.max_running,
                "num_steps": load.steps,
                "page_size": load.page_size,
                "memory": {
                    "weight_gb": load.weights_bytes / 1e9,
                    "kv_cache_gb": load.pages_bytes / 1e9,
                    "token_capacity": load.total_pages * load.page_size,
                },
                "queues": {"waiting": load.waiting},
            }
        ],
        "aggregate": {
            "total_running_reqs": load.running,
            "total_waiting_reqs": load.waiting,
            "total_reqs": load.running + load.waiting,
            "avg_token_usage": usage,
            "avg_throughput": load.tokens_per_s,
        },
    }


def old_loads(load: Load) -> list[dict[str, Any]]:
    """The load as SGLang's older /get_load has it."""
    tokens = (load.used_pages - load.cached_pages) * load.page_size + load.waiting_tokens
    return [
        {
            "dp_rank": 0,
            "num_reqs": load.running + load.waiting,
            "num_waiting_reqs": load.waiting,
            "num_tokens": tokens,
            "ts_tic": time.monotonic(),
        }
    ]
