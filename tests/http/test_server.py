"""The shell on raw sockets: clients that leave, read slowly or not at all, pipeline, and servers that
stop."""

import json
import socket
from collections.abc import Callable

import anyio
import h2.config
import h2.connection
import h2.events
import pytest

from runtime.errors import StartError
from runtime.http.app import http_app
from runtime.http.hosts import authority
from runtime.http.server import MAX_HEAD_BYTES, listen
from runtime.http.streaming import stream as streams
from tests.http.fake import FakeService
from tests.http.serving import Raw, serving

pytestmark = pytest.mark.anyio

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
    "/v1/completions": {"prompt": "hi", "max_tokens": 50},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 50}},
}
EVERY_ROUTE = pytest.mark.parametrize("path", ROUTES)


def body(path: str, **more: object) -> bytes:
    return json.dumps(ROUTES[path] | more).encode()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.lowlevel.checkpoint()


def texts(stream: bytes) -> str:
    """The text of a raw stream of completions."""
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


@EVERY_ROUTE
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_is_aborted_once(path: str, num_tokens: int, is_stream: bool) -> None:
    service = FakeService(hold=True)
    async with serving(service) as address:
        async with Raw.connected(address) as client:
            await client.send(path, body(path, stream=is_stream))
            await until(lambda: bool(service.running))
            for _ in range(num_tokens):
                service.step()
            if num_tokens and is_stream:
                await client.until(b"data: ")
        await until(lambda: not service.running)
    assert service.aborted == [service.requests[0].id]


@EVERY_ROUTE
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_closes_its_side_only_is_answered(path: str, is_stream: bool) -> None:
    service = FakeService(hold=True)
    async with serving(service) as address, Raw.connected(address) as client:
        await client.send(path, body(path, stream=is_stream))
        client.sock.shutdown(socket.SHUT_WR)
        # the server wants to know whether anybody is there
        await client.until(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert service.running
        service.run()
        answer = await client.to_end()
    assert answer.startswith(b"HTTP/1.1 200") and service.aborted == []
    assert answer.endswith(b"0\r\n\r\n") if is_stream else answer.endswith(b"}")


async def test_a_client_that_asks_twice_and_closes_its_side_is_answered_twice() -> None:
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.send("/generate", body("/generate"))
        await client.send("/generate", body("/generate"))
        client.sock.shutdown(socket.SHUT_WR)
        assert (await client.to_end()).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://elsewhere.example/health", 200),
        ("HTTP://h:1/v1/models?x=1", 200),
        ("http://h", 200),
        ("http://h/v1/nothing", 404),
        ("ftp://h/health", 404),
        ("/health", 200),
    ],
)
async def test_targets_may_name_scheme_and_host(target: str, status: int) -> None:
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.write(f"GET {target} HTTP/1.1\r\nhost: test\r\n\r\n".encode())
        assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(("size", "is_target"), [(70_000, False), (70_000, True), (300_000, False)])
async def test_long_heads_are_refused(size: int, is_target: bool) -> None:
    service = FakeService()
    async with serving(service) as address, Raw.connected(address) as client:
        target, value = ("/health?x=" + "x" * size, "y") if is_target else ("/health", "y" * size)
        head = f"GET {target} HTTP/1.1\r\nhost: test\r\nlong: {value}\r\n\r\n".encode()
        try:
            await client.write(head)
            answer = await client.until(b"\r\n\r\n")
        except ConnectionError:
            assert size > 2 * MAX_HEAD_BYTES  # the end of the connection, while more came than is ever read
        else:
            assert answer.startswith(b"HTTP/1.1 431 ")
            # longer ones are refused before they are a request
            assert (b"x-request-id: " in answer) == (size < 2 * MAX_HEAD_BYTES)


async def test_a_client_that_leaves_with_a_request_in_the_pipeline_is_aborted() -> None:
    service = FakeService(hold=True)
    async with serving(service) as address:
        async with Raw.connected(address) as client:
            await client.send("/generate", body("/generate", stream=True))
            await client.send("/generate", body("/generate"))
            await until(lambda: bool(service.running))
            service.step()
            await client.until(b"data: ")
        await until(lambda: bool(service.aborted))
    assert service.aborted == [service.requests[0].id]
    assert len(service.requests) == 1


async def test_a_half_sent_body_reaches_no_handler() -> None:
    service = FakeService()
    async with serving(service) as address:
        async with Raw.connected(address) as client:
            await client.send("/generate", b'{"text":', declared=100)
        async with Raw.connected(address) as client:
            await client.send("/generate", body("/generate"))
            assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")
    assert len(service.requests) == 1 and service.aborted == []


async def test_a_batch_is_aborted_as_a_whole() -> None:
    service = FakeService(hold=True)
    async with serving(service) as address:
        async with Raw.connected(address) as client:
            await client.send("/generate", json.dumps({"text": ["a", "b", "c"]}).encode())
            await until(lambda: len(service.running) == 3)
        await until(lambda: not service.running)
    assert sorted(service.aborted) == sorted(request.id for request in service.requests)


async def test_keep_alive_and_pipelined_requests_survive_streams() -> None:
    service = FakeService()
    async with serving(service) as address, Raw.connected(address) as client:
        for _ in range(3):
            await client.send("/v1/completions", body("/v1/completions", stream=True))
        await client.send("/v1/completions", body("/v1/completions"))
        streams = [await client.until(b"0\r\n\r\n") for _ in range(3)]
        head = await client.until(b"\r\n\r\n")
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(client.rest) < length:
            client.rest += await client.receive()
        whole = json.loads(client.rest[:length])
    assert all(stream.count(b"[DONE]") == 1 for stream in streams)
    assert [texts(stream) for stream in streams] == [whole["choices"][0]["text"]] * 3


async def test_a_connection_ends_with_its_client() -> None:
    """It does not last until its keep-alive time ends: connections without a client would pile up."""
    async with serving(FakeService()) as address:
        await anyio.wait_all_tasks_blocked()
        before = len(anyio.get_running_tasks())
        async with Raw.connected(address) as client:
            await client.send("/v1/completions", body("/v1/completions", stream=True))
            await client.until(b"0\r\n\r\n")
        await until(lambda: len(anyio.get_running_tasks()) == before)


async def test_a_fast_reader_gets_every_token_in_its_own_chunk() -> None:
    service = FakeService(hold=True)
    async with serving(service) as address, Raw.connected(address) as client:
        await client.send("/v1/completions", body("/v1/completions", stream=True, max_tokens=5))
        await until(lambda: bool(service.running))
        service.step()
        seen = await client.until(b"\n\n")  # the head is out: from now on directly
        for _ in range(3):
            service.step()
            seen += await client.until(b"\n\n\r\n")
        service.step()
        seen += await client.until(b"0\r\n\r\n")
    assert seen.count(b"data: {") == 5


async def test_a_slow_reader_gets_what_waited_in_one_piece() -> None:
    service = FakeService(hold=True)
    words = 40_000
    async with serving(service) as address, Raw.connected(address, receive_buffer=4096) as client:
        await client.send("/v1/completions", body("/v1/completions", stream=True, max_tokens=words))
        await until(lambda: bool(service.running))
        service.step()
        await client.until(b"\r\n\r\n")
        while service.running:  # the client reads now and then only
            for _ in range(500):
                service.step()
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            client.rest += await client.receive()
        stream = await client.until(b"0\r\n\r\n")
        async with Raw.connected(address) as other:
            service.hold = False
            await other.send("/v1/completions", body("/v1/completions", max_tokens=words))
            whole = json.loads(b"{" + (await other.until(b"}}}")).partition(b"{")[2])
    assert texts(stream) == whole["choices"][0]["text"]
    assert stream.count(b"data: {") < words / 2
    assert service.aborted == []


async def test_a_reader_that_takes_nothing_is_bounded_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_WAITING_TOKENS", 100)
    service = FakeService(hold=True)
    async with serving(service) as address, Raw.connected(address, receive_buffer=4096) as client:
        await client.send(
            "/generate", body("/generate", stream=True, sampling_params={"max_new_tokens": 50_000})
        )
        await until(lambda: bool(service.running))
        while service.running:
            service.step()
            await anyio.lowlevel.checkpoint()
        stream = await client.to_end()
    assert service.aborted == [service.requests[0].id]
    assert b"[DONE]" not in stream


async def test_a_reader_that_takes_nothing_is_bounded_by_time() -> None:
    service = FakeService(hold=True)
    async with (
        serving(service, stuck_s=0.05) as address,
        Raw.connected(address, receive_buffer=4096) as client,
    ):
        await client.send("/v1/completions", body("/v1/completions", stream=True, max_tokens=15_000))
        await until(lambda: bool(service.running))
        service.step()
        await client.until(b"\r\n\r\n")
        for _ in range(14_000):
            service.step()
        await until(lambda: bool(service.aborted))
    assert service.aborted == [service.requests[0].id]


@pytest.mark.parametrize(("version", "more"), [("1.0", ""), ("1.1", "connection: close\r\n")])
async def test_old_and_closing_clients_get_whole_streams(version: str, more: str) -> None:
    async with serving(FakeService()) as address, Raw.connected(address) as client:
        await client.send("/v1/completions", body("/v1/completions", stream=True), version=version, more=more)
        stream = await client.to_end()
    assert stream.count(b"[DONE]") == 1
    assert (b"chunked" in stream.lower()) == (version == "1.1")


async def test_http_2_takes_the_ordinary_path() -> None:
    async with serving(FakeService(), has_h2c=True) as address, Raw.connected(address) as client:
        wire = h2.connection.H2Connection(h2.config.H2Configuration())
        wire.initiate_connection()
        wire.send_headers(
            1,
            [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "test")],
        )
        wire.send_data(1, body("/v1/completions", stream=True), end_stream=True)
        await client.write(wire.data_to_send())
        data, is_over = b"", False
        while not is_over:
            for event in wire.receive_data(await client.receive()):
                data += event.data if isinstance(event, h2.events.DataReceived) else b""
                is_over = is_over or isinstance(event, h2.events.StreamEnded)
            await client.write(wire.data_to_send())
    assert data.count(b"[DONE]") == 1 and texts(data)


async def test_a_stopping_server_lets_answers_end() -> None:
    service = FakeService(hold=True)
    seen: list[bytes] = []

    async def talk(client: Raw) -> None:
        seen.append(await client.to_end())

    async with anyio.create_task_group() as tasks:
        async with serving(service) as address:
            client = await tasks.start(_connected, address)
            await client.send("/v1/completions", body("/v1/completions", stream=True))
            await until(lambda: bool(service.running))
            tasks.start_soon(talk, client)
            tasks.start_soon(_run_when_closed, service, address)
        tasks.cancel_scope.cancel()
    assert seen and seen[0].count(b"[DONE]") == 1
    assert service.aborted == []


async def _connected(address: tuple[str, int], *, task_status: anyio.abc.TaskStatus[Raw]) -> None:
    async with Raw.connected(address) as client:
        task_status.started(client)
        await anyio.sleep_forever()


async def _run_when_closed(service: FakeService, address: tuple[str, int]) -> None:
    """Goes on with the answers when the server takes no more connections."""
    while True:
        try:
            async with Raw.connected(address):
                await anyio.lowlevel.checkpoint()
        except OSError:
            service.run()
            return


async def test_a_stopping_server_cuts_answers_after_the_grace() -> None:
    service = FakeService(hold=True)
    async with anyio.create_task_group() as tasks:
        async with serving(service, grace_s=0.0) as address:
            client = await tasks.start(_connected, address)
            await client.send("/v1/completions", body("/v1/completions", stream=True))
            await until(lambda: bool(service.running))
        tasks.cancel_scope.cancel()
    assert service.aborted == [service.requests[0].id]


async def test_a_wrapped_send_is_never_bypassed() -> None:
    """A middleware of the host application that changes bodies must see all of them."""

    async def shouting(scope: object, receive: object, send: Callable[..., object]) -> None:
        async def send_loud(message: dict[str, bytes]) -> None:
            await send(message | {"body": message["body"].upper()} if "body" in message else message)

        await inner(scope, receive, send_loud)

    inner = http_app(FakeService())
    async with serving(shouting) as address, Raw.connected(address) as client:
        await client.send("/v1/completions", body("/v1/completions", stream=True))
        stream = await client.until(b"0\r\n\r\n")
    assert b'"CHOICES"' in stream and b'"choices"' not in stream


async def test_a_taken_port_is_an_error_with_a_remedy() -> None:
    first = listen("127.0.0.1", 0)
    try:
        with pytest.raises(StartError, match="choose another --port"):
            listen("127.0.0.1", first[0].getsockname()[1])
    finally:
        for sock in first:
            sock.close()


async def test_addresses_in_urls() -> None:
    assert authority("::1", 30000) == "[::1]:30000" and authority("127.0.0.1", 1) == "127.0.0.1:1"
