"""gRPC clients that send without a key or an end, take nothing, or ask for too much: `--grpc-mode` has the
bounds of HTTP. A client of HTTP/2 frames says what gRPC's own client would not."""

import gc
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import grpc
import grpc.aio
import pytest

from runtime.errors import InvalidRequest, TooLarge
from runtime.http.auth import Keys
from runtime.http.body_budget import BodyLease
from runtime.http.json_weight import MIN_WEIGHT
from runtime.http.settings import DEFAULT, HttpSettings
from runtime.http.streaming import stream as streams
from runtime.rpc import calls, messages, server
from runtime.rpc.schema import SERVICE, load
from runtime.rpc.server import Rpc
from runtime.rpc.wire_weight import wire_weight
from tests.hostile import http2_client
from tests.http.fake import FakeService
from tests.http.serving import stepping
from tests.rpc.test_server import Client, refused

pytestmark = pytest.mark.anyio
TYPES, _ = load()
HEADERS = {"content-type": "application/grpc", "te": "trailers"}
MB = 2**20
HI = TYPES["GenerateRequest"](text="hi")


@asynccontextmanager
async def serving(
    service: FakeService, settings: HttpSettings = DEFAULT, *, max_connections: int = 8192
) -> AsyncIterator[Rpc]:
    shutdown = anyio.Event()
    rpc = Rpc(service, settings, "127.0.0.1", 0, None, max_connections)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rpc.serve, shutdown, lambda: 0.0 if shutdown.is_set() else 1e9)
        try:
            yield rpc
        finally:
            shutdown.set()
    # grpc reports what a call left to the loop that served it, when the call is freed: not to the next test's
    gc.collect()
    await anyio.sleep(0.05)


@asynccontextmanager
async def client_of(rpc: Rpc, **options: int) -> AsyncIterator[Client]:
    own = [
        ("grpc.use_local_subchannel_pool", 1),
        *((f"grpc.{name}", value) for name, value in options.items()),
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rpc.port}", options=own) as channel:
        yield Client(channel)


@asynccontextmanager
async def frames_to(rpc: Rpc, window: int = 65_535) -> AsyncIterator[http2_client.Client]:
    async with http2_client.talking(("127.0.0.1", rpc.port), window) as client:
        yield client


def framed(message: bytes, length: int | None = None, *, is_compressed: bool = False) -> bytes:
    """A message as gRPC sends it; `length`: what it says of itself."""
    return struct.pack(">BI", is_compressed, len(message) if length is None else length) + message


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


async def status_of(client: http2_client.Client, number: int) -> int:
    """The gRPC status of a call, which comes in trailers or, without an answer, in the only headers."""
    await client.read_until(lambda: b"grpc-status" in client.heads.get(number, {}))
    return int(client.heads[number][b"grpc-status"])


# ── before and while a message comes ─────────────────────────────────────────────


async def test_a_key_is_checked_before_the_message_has_come() -> None:
    """Unfinished messages of strangers get their answer, and are not read."""
    async with serving(FakeService(), HttpSettings(keys=Keys(("k",)))) as rpc, frames_to(rpc) as client:
        numbers = [
            await client.ask(f"/{SERVICE}/{name}", framed(b"x", 15 * MB), ends=False, **HEADERS)
            for name in ("Generate", "Embed", "Abort")
        ]
        assert {await status_of(client, number) for number in numbers} == {
            grpc.StatusCode.UNAUTHENTICATED.value[0]
        }
        assert rpc.messages.budget.peak_bytes == 0 and not rpc.messages._reading


async def test_health_reads_nothing() -> None:
    async with serving(FakeService(), HttpSettings(keys=Keys(("k",)))) as rpc, frames_to(rpc) as client:
        number = await client.ask(f"/{SERVICE}/Health", framed(b"x", 15 * MB), ends=False, **HEADERS)
        assert await status_of(client, number) == 0
        assert (
            client.bodies[number][5:]
            == TYPES["HealthResponse"](
                state="ready", detail="as the test says", model="org/fake"
            ).SerializeToString()
        )


async def test_unfinished_messages_hold_few_places_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred clients that never finish: some of them are read at once, for a moment only while others
    wait, and an honest one comes through."""
    monkeypatch.setattr(messages, "HURRIED_S", 0.05)
    async with serving(FakeService()) as rpc, frames_to(rpc) as hostile, client_of(rpc) as honest:
        for _ in range(100):
            await hostile.ask(f"/{SERVICE}/Generate", framed(b"x", 15 * MB), ends=False, **HEADERS)
        await until(lambda: len(rpc.messages._reading) == messages.PLACES)
        with anyio.fail_after(20):
            assert await honest.collect(text="hi")
        assert rpc.messages.budget.peak_bytes < 100


async def test_messages_have_a_bound_together() -> None:
    settings = HttpSettings(max_body_bytes=50_000, max_total_body_bytes=400_000)
    service = FakeService(hold=True)
    async with serving(service, settings) as rpc, client_of(rpc) as client:
        budget, refusals = rpc.messages.budget, []

        async def ask() -> None:
            try:
                await client.collect(text="x" * 49_000)
            except grpc.aio.AioRpcError as error:
                refusals.append((error.code(), error.details()))

        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(ask)
            await until(lambda: len(service.running) + len(refusals) == 12)
            assert 0 < len(service.running) <= 8 and 0 < budget.num_bytes <= budget.max_bytes < 400_000
            service.run()
        assert {code for code, _ in refusals} == {grpc.StatusCode.UNAVAILABLE}
        assert all("--max-total-body-bytes" in (details or "") for _, details in refusals)
        await until(lambda: budget.num_bytes == 0)
        assert budget.peak_bytes <= budget.max_bytes
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "max"):
            await client.collect(text="x" * 60_000)


async def test_compressed_messages_are_refused() -> None:
    """A compressed message may be a thousand times as large as it looks."""
    async with serving(FakeService()) as rpc:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{rpc.port}", compression=grpc.Compression.Gzip
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await Client(channel).collect(text="x" * 15 * MB)
            assert error.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
        assert rpc.messages.budget.peak_bytes < MB


MANY = 2 * MIN_WEIGHT
HEAVY = {
    "numbers": TYPES["GenerateRequest"](input_ids=[1] * MANY),
    "rows": TYPES["GenerateRequest"](input_embeds=[TYPES["Embedding"]()] * MANY),
    "numbers in rows": TYPES["GenerateRequest"](input_embeds=[TYPES["Embedding"](values=[1.5] * MANY)]),
    "texts": TYPES["EmbedRequest"](texts=[""] * MANY),
    "biases": TYPES["GenerateRequest"](
        text="x", sampling_params=TYPES["SamplingParams"](logit_bias={i: 1.0 for i in range(300_000)})
    ),
    "stop strings": TYPES["GenerateRequest"](
        text="x", sampling_params=TYPES["SamplingParams"](stop=[""] * MANY)
    ),
}


@pytest.mark.parametrize("name", HEAVY)
async def test_millions_of_values_are_refused_before_they_are_decoded(name: str) -> None:
    kind, data = type(HEAVY[name]), HEAVY[name].SerializeToString()

    async def read() -> bytes:
        return data

    held = messages.Messages(16 * MB, 512 * MB)
    with pytest.raises(TooLarge, match="too many"):
        await held.read(kind, read, BodyLease(held.budget))


def test_a_message_weighs_what_it_has() -> None:
    def weight(message: object) -> int:
        data = message.SerializeToString()  # type: ignore[attr-defined]
        return wire_weight(data, message.DESCRIPTOR, 10**9)  # type: ignore[attr-defined]

    generate, row = TYPES["GenerateRequest"], TYPES["Embedding"]
    assert weight(generate(text="x" * 10**6)) == 4
    assert weight(generate(input_ids=[5, 70_000, -1])) == 3
    assert weight(generate(input_embeds=[row(values=[1.5] * 10), row(values=[2.5] * 7)])) == 2 * 5 + 17
    assert weight(generate(priority=7, return_logprob=True, timeout=1.5)) == 3
    for broken in (b"\x0a\xff", b"\xff" * 12, b"\x0b", b"\x09\x00", b"\x0d\x00", b"\x12\x05ab"):
        with pytest.raises(InvalidRequest):
            wire_weight(broken, generate.DESCRIPTOR, 10**9)


# ── calls and connections ────────────────────────────────────────────────────────


async def test_calls_have_a_bound_and_a_tenant_has_its_part() -> None:
    keys = Keys({"k1": "alice", "k2": "bob"}, quota=0.5)
    service = FakeService(hold=True)
    async with serving(service, HttpSettings(keys=keys), max_connections=8) as rpc, client_of(rpc) as client:
        calls = [client.generate(HI, metadata=(("x-api-key", "k1"),)) for _ in range(4)]
        await until(lambda: len(service.running) == 4)
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "--tenant-quota"):
            await client.generate(HI, metadata=(("x-api-key", "k1"),)).read()
        calls += [client.generate(HI, metadata=(("x-api-key", "k2"),)) for _ in range(4)]
        await until(lambda: len(service.running) == 8)
        assert (await client.health(TYPES["HealthRequest"]())).state == "ready", "health needs no place"
        calls[0].cancel()
        await until(lambda: len(service.running) == 7)
        assert rpc.num_calls == {"alice": 3, "bob": 4}
        service.run()
        for call in calls[1:]:
            assert [message async for message in call]
        await until(lambda: not rpc.num_calls)


async def test_connections_have_a_bound() -> None:
    async with serving(FakeService(), max_connections=3) as rpc, AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(frames_to(rpc)) for _ in range(3)]
        for client in idle:
            await client.read()
        late = await stack.enter_async_context(frames_to(rpc))
        with pytest.raises((EOFError, ConnectionError)), anyio.fail_after(20):
            while True:
                await late.read()
        await stack.aclose()
        async with client_of(rpc) as honest:  # the server may not have noticed yet that they left
            assert [message async for message in honest.generate(HI, wait_for_ready=True)]


# ── readers that take nothing ────────────────────────────────────────────────────


async def test_tokens_for_a_reader_that_takes_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_WAITING_TOKENS", 600)
    monkeypatch.setattr(calls, "MAX_WAITING_TOKENS", 600)
    made: list[calls.Waiting] = []
    init = calls.Waiting.__init__
    monkeypatch.setattr(calls.Waiting, "__init__", lambda self, it: (made.append(self), init(self, it))[1])
    service = FakeService(hold=True)
    sampling = TYPES["SamplingParams"](max_new_tokens=50_000)
    body = framed(TYPES["GenerateRequest"](text="hi", sampling_params=sampling).SerializeToString())
    most = 0
    async with serving(service) as rpc, frames_to(rpc, window=0) as hostile:
        for _ in range(5):
            await hostile.ask(f"/{SERVICE}/Generate", body, **HEADERS)
        await until(lambda: len(service.running) == 5)
        async with stepping(service):

            def all_left() -> bool:
                nonlocal most
                most = max([most, *(one.num_tokens for one in made)])
                return not service.running

            await until(all_left)
        assert len(service.aborted) == 5 and 0 < most < 700
        await until(lambda: not rpc.messages.budget.num_bytes)
        async with client_of(rpc) as honest:
            service.hold = False
            assert await honest.collect(text="hi")


async def test_a_reader_that_takes_nothing_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing more comes for it."""
    for module in (calls, server):
        monkeypatch.setattr(module, "STUCK_S", 0.2)
    service = FakeService(hold=True)
    async with serving(service) as rpc, frames_to(rpc, window=0) as hostile:
        await hostile.ask(f"/{SERVICE}/Generate", framed(HI.SerializeToString()), **HEADERS)
        await until(lambda: len(service.running) == 1)
        service.step()
        await until(lambda: len(service.aborted) == 1)


async def test_the_server_ends_whatever_its_clients_do() -> None:
    """Unfinished messages, readers without a window, idle connections and calls that run."""
    service = FakeService(hold=True)
    with anyio.fail_after(20):
        async with serving(service) as rpc, AsyncExitStack() as stack:
            hostile = await stack.enter_async_context(frames_to(rpc, window=0))
            for _ in range(4):
                await hostile.ask(f"/{SERVICE}/Generate", framed(HI.SerializeToString()), **HEADERS)
                await hostile.ask(f"/{SERVICE}/Generate", framed(b"x", MB), ends=False, **HEADERS)
            await stack.enter_async_context(frames_to(rpc))
            await until(lambda: len(service.running) == 4)
            service.step()
