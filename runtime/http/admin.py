"""What operators and load balancers ask: is it well, how busy is it, what is it."""

import time
from typing import Any
from uuid import uuid4

from runtime.http.exchange import Answer, Output
from runtime.messages import Ask, Tokens
from runtime.request import Delta
from runtime.sampling import SamplingParams
from runtime.service import Load, Service

PROBE_TOKEN = 0  # a vocabulary has at least this one


class ProbeDialect:
    """The answer of /health_generate."""

    def events(self, choice: int, delta: Delta) -> bytes:
        raise AssertionError("a probe is not streamed")

    def tail(self) -> bytes:
        raise AssertionError("a probe is not streamed")

    def body(self, outputs: list[Output]) -> Any:
        return {"state": "ready", "output_ids": outputs[0].token_ids}


def probe(service: Service) -> Answer:
    """Generates one token, through everything that a request goes through."""
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    ask = Ask(id=f"probe-{uuid4().hex}", prompt=Tokens([PROBE_TOKEN]), params=params, arrival_s=time.monotonic())
    return Answer(service, [ask], ProbeDialect(), is_stream=False, names={})


def loads(load: Load) -> dict[str, Any]:
    """The load in SGLang's names, one entry for each scheduler."""
    return {
        "timestamp": time.time(),
        "dp_rank_count": 1,
        "loads": [{
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_total_reqs": load.running + load.waiting,
            "num_used_tokens": (load.used_pages - load.cached_pages) * load.page_size,
            "num_cached_tokens": load.cached_pages * load.page_size,
            "max_total_num_tokens": load.total_pages * load.page_size,
            "token_usage": (load.used_pages - load.cached_pages) / max(load.total_pages, 1),
            "gen_throughput": load.tokens_per_s,
            "num_steps": load.steps,
        }],
    }
