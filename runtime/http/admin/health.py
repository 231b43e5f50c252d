"""GET /health, /ping, /health_generate and /metrics: whether the server serves, and its metrics."""

import time
from typing import Literal
from uuid import uuid4

import anyio
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

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

    def body(self, outputs: list[Output]) -> object:
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


class SharedProbe:
    """/health_generate: one probe runs at a time, and all who ask meanwhile share its answer. So probes,
    which need no key, take one place in the queue at most."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.turn = anyio.Lock()  # held by the task whose probe runs
        self.num_ended = 0
        self.last: Probed | RequestError | None = None  # of the probe that ended last

    def route(self) -> Route:
        """The route of /health_generate."""
        return PROBE.route(self._serve)

    async def _serve(self, _: Request) -> ASGIApp:
        return json_response(await self.answer())

    async def answer(self) -> Probed:
        """The answer of the probe that runs, or of a new one. Raises RequestError."""
        num_ended_before = self.num_ended
        async with self.turn:
            if self.num_ended == num_ended_before:  # none ended while this task waited for its turn
                try:
                    answer = await probe(self.service).complete()
                    assert isinstance(answer, Probed)
                    self.last = answer
                except RequestError as error:
                    self.last = error
                self.num_ended += 1
            assert self.last is not None
            if isinstance(self.last, RequestError):
                raise self.last.with_traceback(None)
            return self.last


def health(service: Service, _: Request) -> Response:
    """GET /health: the state of the server; 503 while it does not serve."""
    state = service.health()
    return json_response(state, 200 if state.state in SERVING else 503)


def metrics(service: Service, _: Request) -> Response:
    """GET /metrics, in Prometheus' text format."""
    return Response(service.metrics(), media_type="text/plain; version=0.0.4")


PROBE = Operation("GET", "/health_generate", "Whether it serves, by generating a token", answers=(Probed,))

OPERATIONS = (
    Operation("GET", "/health", "Whether it serves", answers=(Health,), show=health),
    Operation("GET POST", "/ping", "Whether it serves", answers=(Health,), show=health),
    PROBE,
    Operation("GET", "/metrics", "Figures for Prometheus", media="text", show=metrics),
)
