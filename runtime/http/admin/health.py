"""GET /, /health, /ping, /health_generate and /metrics: whether the server serves, and its metrics."""

import time
from typing import Any, Literal
from uuid import uuid4

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import RequestError, Unavailable
from runtime.http.operation import Operation, json_response
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.exchange import Answer
from runtime.messages.requests import Delta, GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.service import Health, Service

PROBE_TOKEN = 0  # the smallest vocabulary has it
SERVING = ("ready", "paused", "released")  # paused and released: as an operator asked


class Probed(Struct, forbid_unknown_fields=True):
    """The response of /health_generate."""

    state: Literal["ready"]
    output_ids: list[int]


class ProbeAnswerFormat:
    """The answer of a probe, never streamed."""

    answer_type = Probed

    def events(self, choice: int, delta: Delta) -> bytes:
        """Not called: a probe is not streamed."""
        raise AssertionError("a probe is not streamed")

    def tail(self) -> bytes:
        """Not called: a probe is not streamed."""
        raise AssertionError("a probe is not streamed")

    def failure(self, error: RequestError) -> bytes:
        """Not called: a probe is not streamed."""
        raise AssertionError("a probe is not streamed")

    def body(self, outputs: list[Output]) -> Any:
        """The token of the probe."""
        return {"state": "ready", "output_ids": outputs[0].token_ids}


def probe(service: Service) -> Answer:
    """Generates one token, the way of every request. Raises Unavailable while generation is paused or memory
    is released."""
    if service.health().state == "paused":
        raise Unavailable("generation is paused (/pause_generation); /continue_generation ends that")
    if service.health().state == "released":
        raise Unavailable(
            "memory of the ranks is released (/release_memory_occupation); "
            "/resume_memory_occupation allocates it again"
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


def greet(_: Service, __: Request) -> Response:
    """GET /, by which Ollama's clients look for a server."""
    return Response("runtime is running; /docs lists what it serves\n", media_type="text/plain")


def health(service: Service, _: Request) -> Response:
    """GET /health: the state of the server; 503 while it does not serve."""
    state = service.health()
    return json_response(state, 200 if state.state in SERVING else 503)


def metrics(service: Service, _: Request) -> Response:
    """GET /metrics, in Prometheus' text format."""
    return Response(service.metrics(), media_type="text/plain; version=0.0.4")


OPERATIONS = (
    Operation("GET", "/health", "Whether it serves", answers=(Health,), show=health),
    Operation("GET", "/ping", "Whether it serves", answers=(Health,), show=health),
    Operation(
        "GET", "/", "A greeting, by which Ollama's clients look for a server", media="text", show=greet
    ),
    Operation(
        "GET",
        "/health_generate",
        "Whether it serves, by generating a token",
        answers=(Probed,),
        show=lambda service, _: probe(service),
    ),
    Operation("GET", "/metrics", "Figures for Prometheus", media="text", show=metrics),
)
