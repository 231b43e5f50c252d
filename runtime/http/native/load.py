"""GET /v1/loads and /get_load: how busy the server is, in SGLang's form."""

import time

from msgspec import Struct

from runtime.http.operation import Operation
from runtime.service import Load


class Memory(Struct, forbid_unknown_fields=True):
    """Memory of the devices."""

    weight_gb: float
    kv_cache_gb: float
    token_capacity: int


class SchedulerLoad(Struct, kw_only=True, forbid_unknown_fields=True):
    """Load of one scheduler."""

    dp_rank: int
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    num_cached_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int
    num_steps: int
    page_size: int
    memory: Memory
    queues: dict[str, int]


class AllLoads(Struct, forbid_unknown_fields=True):
    """Load of all schedulers together."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float


class Loads(Struct, forbid_unknown_fields=True):
    """The response of /v1/loads."""

    timestamp: float
    dp_rank_count: int
    loads: list[SchedulerLoad]
    aggregate: AllLoads


class OldLoad(Struct, forbid_unknown_fields=True):
    """An entry of the response of /get_load."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    ts_tic: float


class ServerLoad(Struct, forbid_unknown_fields=True):
    """The response of /load, as in vLLM."""

    server_load: int  # requests that run or wait


def loads(load: Load) -> dict[str, object]:
    """The load of all replicas together and of each, in SGLang's form. num_cached_tokens, num_steps and
    page_size are additions."""
    now, each = time.time(), load.each or (load,)
    return {
        "timestamp": now,
        "dp_rank_count": len(each),
        "loads": [_of_replica(one, index, now) for index, one in enumerate(each)],
        "aggregate": {
            "total_running_reqs": load.running,
            "total_waiting_reqs": load.waiting,
            "total_reqs": load.running + load.waiting,
            "avg_token_usage": _usage(load),
            "avg_throughput": load.tokens_per_s / len(each),
        },
    }


def _usage(load: Load) -> float:
    return (load.used_pages - load.cached_pages) / max(load.total_pages, 1)


def _used_tokens(load: Load) -> int:
    return (load.used_pages - load.cached_pages) * load.page_size


def _of_replica(load: Load, index: int, now: float) -> dict[str, object]:
    used, usage = _used_tokens(load), _usage(load)
    return {
        "dp_rank": index,
        "timestamp": now,
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


def old_loads(load: Load) -> list[dict[str, object]]:
    """The load of each replica in the form of SGLang's older /get_load."""
    return [
        {
            "dp_rank": index,
            "num_reqs": one.running + one.waiting,
            "num_waiting_reqs": one.waiting,
            "num_tokens": _used_tokens(one) + one.waiting_tokens,
            "ts_tic": time.monotonic(),
        }
        for index, one in enumerate(load.each or (load,))
    ]


def server_load(load: Load) -> dict[str, int]:
    """The load in vLLM's form; a request with several answers counts as several."""
    return {"server_load": load.running + load.waiting}


OPERATIONS = (
    Operation(
        "GET", "/v1/loads", "How busy it is", answers=(Loads,), show=lambda service, _: loads(service.load())
    ),
    Operation(
        "GET",
        "/load",
        "How many requests run or wait",
        answers=(ServerLoad,),
        show=lambda service, _: server_load(service.load()),
    ),
    Operation(
        "GET",
        "/get_load",
        "How busy it is, in an older form",
        answers=(list[OldLoad],),
        show=lambda service, _: old_loads(service.load()),
    ),
)
