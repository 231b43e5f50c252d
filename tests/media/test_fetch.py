"""Fetching, over a network that lies."""

import anyio
import pytest
from anyio.abc import ByteStream, SocketStream

from runtime.errors import InvalidRequest, Unavailable
from runtime.media import loader
from runtime.media.fetch import Fetcher
from runtime.media.settings import MediaSettings
from runtime.messages.media import MediaKind
from tests.media.loading import PARAM, PNG, Answer, ended, error, is_picture, loading, named, response, web

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# --- addresses


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "localhost", "localhost."),
        *(
            "2130706433",
            "0x7f.1",
            "0x7f000001",
            "0177.0.0.1",
            "017700000001",
            "127.1",
            "127.0.1",
            "0",
            "[::]",
        ),
    ],
)
async def test_this_machine_is_not_connected_to(host: str) -> None:
    asked: list[str] = []

    async def answer(path: str, stream: SocketStream) -> None:
        asked.append(path)

    async with web(answer) as url, loading(domains=frozenset()) as one:
        refused = await error(one, named(url.replace("127.0.0.1", host)))
    assert isinstance(refused, InvalidRequest) and refused.param == PARAM
    assert "--allowed-media-domains" in refused.message and not asked


async def test_hosts_that_are_not_named_are_refused_where_some_are() -> None:
    async with loading(domains=frozenset({"a.test"})) as one:
        refused = await error(one, named("http://93.184.216.34/x.png"))
    assert "--allowed-media-domains" in refused.message


async def test_redirects_are_checked_like_the_first_url() -> None:
    seen: list[str] = []

    async def answer(path: str, stream: SocketStream) -> None:
        seen.append(path)
        place = {
            "/near": "/picture",
            "/metadata": "http://169.254.169.254/latest/meta-data/",
            "/other": "http://10.0.0.1/",
            "/file": "file:///etc/passwd",
            "/loop": "/loop",
        }.get(path)
        if place is None:
            return await stream.send(response())
        await stream.send(response(b"", "302 Found", more=f"location: {place}\r\n"))

    async with web(answer) as url, loading() as one:
        assert is_picture((await one.load([named(url + "/near")]))[0])
        for path, words in (
            ("/metadata", "not fetched"),
            ("/other", "not fetched"),
            ("/file", "http"),
            ("/loop", "more than 5 times"),
        ):
            assert words in (await error(one, named(url + path))).message, path
    assert seen.count("/loop") == 6


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """A name server that says a public address first and a private one then is asked once."""
    answers, connected = iter([["93.184.216.34"], ["127.0.0.1"]]), []

    async def resolve(host: str, port: int) -> list[str]:
        return next(answers)

    async def connect(address: str, port: int) -> ByteStream:
        connected.append((address, port))
        raise OSError(111, "Connection refused")

    async with loading(lambda domains: Fetcher(domains, resolve, connect), domains=frozenset()) as one:
        refused = await error(one, named("http://rebinding.test/a.png"))
        assert "cannot be reached: Connection refused" in refused.message
        assert connected == [("93.184.216.34", 80)]
        assert "no public address" in (await error(one, named("http://rebinding.test/a.png"))).message
    assert len(connected) == 1


async def test_a_redirect_to_a_name_that_is_private_is_refused() -> None:
    """Each name on the way is resolved, checked and pinned by itself."""
    addresses = {"first.test": ["93.184.216.34"], "inside.test": ["192.168.1.1"]}
    connected: list[tuple[str, int]] = []
    async with web(redirecting("http://inside.test:8080/a.png")) as url, ended():

        async def resolve(host: str, port: int) -> list[str]:
            return addresses[host]

        async def connect(address: str, port: int) -> ByteStream:
            connected.append((address, port))
            return await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))

        async with loading(lambda domains: Fetcher(domains, resolve, connect), domains=frozenset()) as one:
            refused = await error(one, named("http://first.test:81/a.png"))
    assert isinstance(refused, InvalidRequest) and "inside.test has no public address" in refused.message
    assert connected == [("93.184.216.34", 81)]


def redirecting(target: str) -> Answer:
    async def answer(path: str, stream: SocketStream) -> None:
        await stream.send(response(b"", "302 Found", more=f"location: {target}\r\n"))

    return answer


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1@example.com/", "user"),
        ("http://example.com:pw@127.0.0.1/", "user"),
        ("http://a:b@example.com/", "user"),
        ("http://example.com\\@127.0.0.1/", "plain characters"),
        ("http://example.com#@127.0.0.1/", "resolved: example.com"),
        ("http://example.com:0x50/", "port"),
        ("http://example.com:65536/", "port"),
        ("http://ex%61mple.com/", "resolved: ex%61mple.com"),
    ],
)
async def test_the_host_is_the_one_that_all_readers_see(url: str, words: str) -> None:
    """Users, fragments and escapes hide no host behind another one."""

    async def resolve(host: str, port: int) -> list[str]:
        raise OSError(1, f"resolved: {host}")

    async with loading(lambda domains: Fetcher(domains, resolve), domains=frozenset()) as one:
        assert words in (await error(one, named(url))).message


async def test_one_private_address_of_a_name_is_enough_to_refuse_it() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "::ffff:10.0.0.1"]

    async with loading(lambda domains: Fetcher(domains, resolve), domains=frozenset()) as one:
        assert "no public address" in (await error(one, named("https://mixed.test/"))).message


async def test_names_without_an_address() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async with loading(lambda domains: Fetcher(domains, resolve)) as one:
        assert "Name or service not known" in (await error(one, named("https://files.test/"))).message


# --- bodies


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (response(PNG, length=len(PNG) + 5), "incomplete"),
        (response(PNG, length=1 << 40), "more than 33554432 bytes"),
        (response(PNG, length=10), "damaged image|none of"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", "none of HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello", "none of HTTP"),
        (b"SSH-2.0-OpenSSH_9.7\r\n", "none of HTTP"),
        (b"", "incomplete"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "none of HTTP"),
        (response(b"", "404 Not Found"), "answered 404"),
        (response(b"", "206 Partial Content"), "answered 206"),
        (response(b"", "302 Found"), "leads nowhere"),
        (response(PNG, more="content-encoding: gzip\r\n"), "compresses"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, "none of HTTP"),
    ],
)
async def test_bad_responses_are_refused(sent: bytes, words: str) -> None:
    async def answer(path: str, stream: SocketStream) -> None:
        await stream.send(sent)

    async with web(answer) as url, loading() as one:
        refused = await error(one, named(url))
    assert isinstance(refused, InvalidRequest) and refused.param == PARAM
    assert any(word in refused.message for word in words.split("|")), refused.message


async def test_a_body_without_end_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader.MAX_FILE_BYTES, MediaKind.IMAGE, 1 << 20)
    sent = 0

    async def answer(path: str, stream: SocketStream) -> None:
        nonlocal sent
        await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await stream.send(bytes(1 << 16))
            sent += 1 << 16

    async with web(answer) as url, loading() as one:
        assert "more than 1048576 bytes" in (await error(one, named(url))).message
    assert sent < 64 << 20  # what lies in sockets, too


async def test_a_slow_body_ends_at_the_limit_of_time() -> None:
    async def answer(path: str, stream: SocketStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
        await anyio.sleep_forever()

    async with web(answer) as url, loading(timeout_s=0.2) as one:
        refused = await error(one, named(url))
        assert isinstance(refused, InvalidRequest) and "--mm-per-request-timeout" in refused.message


async def test_a_body_that_drips_ends_at_the_limit_of_time_too() -> None:
    """The limit is for the whole file, not for the next byte."""
    sent = 0

    async def answer(path: str, stream: SocketStream) -> None:
        nonlocal sent
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            await stream.send(b"x")
            sent += 1
            await anyio.sleep(0.01)

    async with web(answer) as url, loading(timeout_s=0.3) as one:
        refused = await error(one, named(url))
    assert isinstance(refused, InvalidRequest) and "--mm-per-request-timeout" in refused.message
    assert 1 < sent < 1000


async def test_a_request_that_had_no_turn_may_come_again() -> None:
    arrived = anyio.Event()

    async def answer(path: str, stream: SocketStream) -> None:
        arrived.set()
        await anyio.sleep_forever()

    async with web(answer) as url, loading(timeout_s=0.5, max_fetches=1) as one, ended() as tasks:
        tasks.start_soon(error, one, named(url))
        await arrived.wait()
        one._settings = MediaSettings(timeout_s=0.05)
        assert isinstance(await error(one, named(data=PNG)), Unavailable)


async def test_large_base64_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader.MAX_FILE_BYTES, MediaKind.IMAGE, 1000)
    async with loading() as one:
        assert "more than 1000 bytes" in (await error(one, named(base64="A" * 2000))).message
        assert "more than 1000 bytes" in (await error(one, named(data=bytes(2000)))).message
        assert "not base64" in (await error(one, named(base64="é" * 20))).message
        assert one._decoders._process is None  # nothing was worth a process
