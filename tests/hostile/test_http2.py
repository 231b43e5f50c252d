"""HTTP/2 clients that take nothing, reset everything, or speak it where it is not spoken. What waits for them
is counted in bytes."""

import json
from collections.abc import Callable
from typing import Any

import anyio
import h2.events
import pytest

from runtime.http import http2
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.http2 import Http2
from runtime.http.http2_stream import UNSENT_BYTES
from runtime.http.settings import HttpSettings
from runtime.http.streaming import stream as streams
from tests.hostile.http2_client import Client, talking
from tests.http.fake import FakeService
from tests.http.serving import Raw, serving, stepping

pytestmark = pytest.mark.anyio

HEAD = [(":method", "GET"), (":path", "/v1/models"), (":scheme", "http"), (":authority", "t")]
STREAM = {"prompt": "hi", "stream": True, "max_tokens": 3000}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Http2]:
    """The HTTP/2 connections of the server."""
    made: list[Http2] = []
    init = Http2.__init__

    def remember(self: Http2, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(Http2, "__init__", remember)
    return made


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


async def test_streams_without_a_window_hold_little_and_are_reset(connections: list[Http2]) -> None:
    service = FakeService(hold=True)
    most = 0
    async with serving(service, has_h2c=True, stuck_s=0.5) as address, talking(address, 0) as client:
        numbers = [await client.ask("/v1/completions", STREAM) for _ in range(90)]
        await until(lambda: len(service.running) == 90)
        async with stepping(service):

            def all_ended() -> bool:
                nonlocal most
                most = max(most, sum(len(stream.unsent) for stream in connections[0].streams.by_id.values()))
                return not service.running

            await until(all_ended)
        assert len(service.aborted) == 90
        assert 0 < most <= 90 * (UNSENT_BYTES + 4096)
        await client.read_until(lambda: len(client.resets) == 90)
        assert set(client.resets) == set(numbers) and not any(client.bodies.values())
        number = await client.ask("/health", None, method="GET")  # the connection lives on
        await client.read_until(lambda: number in client.heads)
        assert client.heads[number][b":status"] == b"200"


@pytest.mark.parametrize("logprobs", [None, 5])
async def test_tokens_that_wait_for_a_window_are_bounded(
    logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over HTTP/1.1, and long before the client counts as stuck. Alternatives count as tokens do."""
    monkeypatch.setattr(streams, "MAX_WAITING_TOKENS", 600)
    service = FakeService(hold=True)
    async with serving(service, has_h2c=True, stuck_s=60.0) as address, talking(address, 0) as client:
        number = await client.ask("/v1/completions", STREAM | {"max_tokens": 50_000, "logprobs": logprobs})
        await until(lambda: bool(service.running))
        num_steps = 0
        while service.running:
            service.step()
            await anyio.lowlevel.checkpoint()
            num_steps += 1
        assert (
            num_steps < (600 if logprobs is None else 600 / 6) + 300
        )  # about what the stream's buffer holds
        await client.read_until(lambda: number in client.resets)
    assert len(service.aborted) == 1


async def test_whole_answers_that_nobody_takes_are_reset_too(connections: list[Http2]) -> None:
    async with serving(FakeService(), has_h2c=True, stuck_s=0.2) as address, talking(address, 10) as client:
        number = await client.ask("/v1/completions", STREAM | {"stream": False})
        await client.read_until(lambda: number in client.resets)
        assert len(client.bodies[number]) == 10 and not connections[0].streams.by_id


async def test_a_slow_reader_gets_all_of_its_stream(connections: list[Http2]) -> None:
    """It may take its time, as long as it takes something; others are not slowed."""
    service = FakeService()
    async with serving(service, has_h2c=True, stuck_s=2.0) as address, talking(address, 1000) as client:
        slow = await client.ask("/v1/completions", STREAM | {"max_tokens": 300})
        await client.read_until(lambda: len(client.bodies.get(slow, b"")) == 1000)
        for _ in range(5):
            other = await client.ask("/health", None, method="GET")
            await client.read_until(lambda other=other: other in client.ended)  # type: ignore[misc]
        while slow not in client.ended:
            assert slow in connections[0].streams.by_id
            client.wire.increment_flow_control_window(7000, slow)
            client.wire.increment_flow_control_window(7000)
            await client.flush()
            await client.read()
    assert client.bodies[slow].count(b"[DONE]") == 1 and service.aborted == []


async def test_a_client_that_reads_nothing_at_all_is_cut(connections: list[Http2]) -> None:
    """Its windows are open, but its socket is full; pings are answered no longer."""
    service = FakeService(hold=True)
    async with (
        serving(service, has_h2c=True, stuck_s=0.3) as address,
        Raw.connected(address, receive_buffer=4096) as raw,
    ):
        client = Client(raw)
        await client.open(2**30)
        client.wire.increment_flow_control_window(2**30)
        for _ in range(20):
            await client.ask("/v1/completions", STREAM)
        await until(lambda: len(service.running) == 20)
        async with stepping(service):
            await until(lambda: bool(connections) and connections[0].is_closed)
            await until(lambda: not service.running)
    assert len(service.aborted) == 20


async def test_replies_to_pings_do_not_pile_up(connections: list[Http2]) -> None:
    most = 0
    async with (
        serving(FakeService(), has_h2c=True, stuck_s=0.3) as address,
        Raw.connected(address, receive_buffer=4096) as raw,
    ):
        client = Client(raw)
        await client.open()
        pings = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)
        with anyio.move_on_after(20):
            try:
                while True:
                    await raw.write(pings * 1000)
                    if connections:
                        transport = connections[0].connection.transport
                        most = max(most, transport.get_write_buffer_size())
            except ConnectionError:
                pass
        assert connections[0].is_closed and 0 < most < 2**20


async def test_a_client_that_resets_what_it_asks_for_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, connections: list[Http2]
) -> None:
    monkeypatch.setattr(http2, "MAX_RESETS", 50)
    service = FakeService(hold=True)
    most = 0
    async with serving(service, has_h2c=True) as address, talking(address) as client:
        for _ in range(50):
            for _ in range(10):
                number = client.wire.get_next_available_stream_id()
                client.wire.send_headers(number, HEAD, end_stream=True)
                client.wire.reset_stream(number)
            await client.flush()
            with anyio.move_on_after(0.05):
                await client.read()
            most = max(most, *(one.streams.num_running for one in connections))
            if client.terminated is not None:
                break
    assert client.terminated == 0xB and most <= 2 * http2.MAX_STREAMS  # enhance your calm


async def test_unread_bodies_stay_with_their_clients(connections: list[Http2]) -> None:
    """Without a key: refused before the body, of which no more than a window arrives."""
    app = http_app(FakeService(), HttpSettings(keys=Keys(("k",))))
    async with serving(app, has_h2c=True) as address, talking(address) as client:
        number = await client.ask("/generate", b" " * 16_000, ends=False)
        await client.read_until(lambda: number in client.heads)
        assert client.heads[number][b":status"] == b"401"
        # the rest is thrown away: the answer ends, and the stream with it
        await client.read_until(lambda: number in client.ended)
        other = await client.ask("/health", None, method="GET")
        await client.read_until(lambda: other in client.ended)


async def test_uploads_go_through_their_windows() -> None:
    service = FakeService()
    async with serving(service, has_h2c=True) as address, talking(address) as client:
        await client.read_until(lambda: client.wire.outbound_flow_control_window > 65_535)
        numbers = []
        for _ in range(3):
            number = client.wire.get_next_available_stream_id()
            numbers.append(number)
            client.wire.send_headers(
                number,
                [(":method", "POST"), (":path", "/generate"), (":scheme", "http"), (":authority", "t")],
            )
            rest = json.dumps({"text": "hi " * 30_000, "sampling_params": {"max_new_tokens": 1}}).encode()
            while rest:
                room = min(client.wire.local_flow_control_window(number), 16_384)
                if room == 0:
                    await client.read()
                    continue
                client.wire.send_data(number, rest[:room], end_stream=len(rest) <= room)
                rest = rest[room:]
                await client.flush()
        await client.read_until(lambda: set(numbers) <= client.ended)
    assert [client.heads[number][b":status"] for number in numbers] == [b"200"] * 3


@pytest.mark.parametrize("has_h2c", [False, True])
async def test_http2_without_tls_is_an_option(has_h2c: bool) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    async with serving(FakeService(), has_h2c=has_h2c) as address, Raw.connected(address) as client:
        await client.write(preface)
        answer = await client.receive()
        assert answer.startswith(b"HTTP/1.1 ") != has_h2c
        if not has_h2c:
            assert answer.split(b" ")[1] in (b"400", b"505")
            assert await client.to_end() == b""


@pytest.mark.parametrize("has_h2c", [False, True])
async def test_an_upgrade_to_http2_is_an_option(has_h2c: bool) -> None:
    async with serving(FakeService(), has_h2c=has_h2c) as address, Raw.connected(address) as raw:
        await raw.write(
            b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
            b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n"
        )
        head = await raw.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 " if has_h2c else b"HTTP/1.1 200 ")
        if has_h2c:
            client = Client(raw)
            client.wire.initiate_upgrade_connection()
            await client.flush()
            for event in client.wire.receive_data(raw.rest):
                assert not isinstance(event, h2.events.StreamReset)
                if isinstance(event, h2.events.StreamEnded):
                    client.ended.add(event.stream_id)
            await client.read_until(lambda: 1 in client.ended)
            number = await client.ask("/health", None, method="GET")
            await client.read_until(lambda: number in client.ended)
            assert client.heads[number][b":status"] == b"200"


@pytest.mark.parametrize("settings", [b"", b"!!!", b"AAMAAAB", b"AAUAAAAB"])
async def test_an_upgrade_with_broken_settings_breaks_nothing(settings: bytes) -> None:
    async with serving(FakeService(), has_h2c=True) as address:
        async with Raw.connected(address) as raw:
            await raw.write(
                b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
                b"http2-settings: %b\r\n\r\n" % settings
            )
            status = (await raw.until(b"\r\n")).split(b" ")[1]
            assert status == (b"101" if settings == b"" else b"400")
        async with Raw.connected(address) as raw:
            await raw.write(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n")
            assert (await raw.until(b"\r\n")).startswith(b"HTTP/1.1 200 ")


HEADS: list[list[tuple[bytes, bytes]]] = [
    [(b":method", b"GET"), (b":path", b"/\xff"), (b":scheme", b"http"), (b":authority", b"t")],
    [(b":method", b"CONNECT"), (b":authority", b"t")],
    [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"t")],
    [(b":method", b"GET"), (b":path", b""), (b":scheme", b"http"), (b":authority", b"t")],
    [(b":method", b"GET"), (b":path", b"health"), (b":scheme", b"http"), (b":authority", b"t")],
    [(b":method", b"G\xffT"), (b":path", b"/"), (b":scheme", b"http"), (b":authority", b"t")],
    [(b":method", b"GET"), (b":path", b"/"), (b":scheme", b"http"), (b":authority", b"t"), (b"a\n", b"b")],
    [(b":method", b"GET"), (b":path", b"/"), (b":scheme", b"http"), (b"connection", b"close")],
    [(b":path", b"/"), (b":scheme", b"http"), (b":authority", b"t")],
]


@pytest.mark.parametrize("head", HEADS)
async def test_broken_heads_break_their_connection_at_most(head: list[tuple[bytes, bytes]]) -> None:
    async with serving(FakeService(), has_h2c=True) as address:
        async with Raw.connected(address) as raw:
            client = Client(raw)
            client.wire.config.validate_outbound_headers = False
            client.wire.config.normalize_outbound_headers = False
            await client.open()
            number = client.wire.get_next_available_stream_id()
            client.wire.send_headers(number, head, end_stream=True)
            await client.flush()
            with anyio.fail_after(20):
                try:
                    while number not in client.ended and number not in client.resets:
                        await client.read()
                except (EOFError, ConnectionError):
                    pass
            if number in client.heads:
                assert client.heads[number][b":status"] in (b"400", b"404", b"405", b"500", b"200")
        async with talking(address) as client:
            number = await client.ask("/health", None, method="GET")
            await client.read_until(lambda: number in client.ended)


async def test_a_stopping_server_lets_streams_end() -> None:
    service = FakeService(hold=True)
    seen: list[bytes] = []
    async with anyio.create_task_group() as tasks:
        async with serving(service, has_h2c=True) as address:
            client = await tasks.start(_asking, address, seen)
            await until(lambda: bool(service.running))
            tasks.start_soon(_run_when_closed, service, address)
        assert client.terminated in (0, None)
        tasks.cancel_scope.cancel()
    assert seen and seen[0].count(b"[DONE]") == 1 and service.aborted == []


async def _asking(
    address: tuple[str, int], seen: list[bytes], *, task_status: anyio.abc.TaskStatus[Client]
) -> None:
    async with talking(address) as client:
        number = await client.ask("/v1/completions", STREAM | {"max_tokens": 20})
        task_status.started(client)
        await client.read_until(lambda: number in client.ended)
        seen.append(client.bodies[number])
        with pytest.raises(EOFError):
            await client.read_until(lambda: False)


async def _run_when_closed(service: FakeService, address: tuple[str, int]) -> None:
    while True:
        try:
            async with Raw.connected(address):
                await anyio.lowlevel.checkpoint()
        except OSError:
            service.run()
            return
