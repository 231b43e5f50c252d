"""From what a client named to arrays: over a network that lies, and with decoders that die."""

import os
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.abc import ByteStream, SocketStream

from runtime.errors import Forbidden, InvalidRequest, RequestError, Unavailable
from runtime.media import decoders, fetch, loader
from runtime.media.fetch import Fetcher
from runtime.media.loader import MediaLoader
from runtime.media.settings import DecodeLimits, MediaSettings
from runtime.media.spool import spool
from runtime.messages.media import Media, MediaKind, MediaSource
from tests.media.files import image, pixels, sound, video

pytestmark = pytest.mark.anyio
HERE = frozenset({"127.0.0.1", "files.test"})
PNG = image("PNG")
PARAM = "messages[0].content[1].image_url"

Answer = Callable[[str, SocketStream], Awaitable[None]]  # of a request for a path


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def named(url: str = "", kind: MediaKind = MediaKind.IMAGE, param: str = PARAM, **more: Any) -> MediaSource:
    return MediaSource(kind=kind, param=param, url=url, **more)


@asynccontextmanager
async def loading(
    make: Callable[[frozenset[str]], Fetcher] = Fetcher, **settings: Any
) -> AsyncIterator[MediaLoader]:
    """A loader that may fetch from this machine. Only tests of the limit of time wait for it."""
    one = MediaLoader(
        MediaSettings(**{"domains": HERE, "timeout_s": 60.0} | settings), dict(os.environ), make
    )
    try:
        yield one
    finally:
        await one.aclose()


@asynccontextmanager
async def web(answer: Answer) -> AsyncIterator[str]:
    """The URL of a server whose answers are exactly those bytes."""

    async def serve(stream: SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += await stream.receive()
            try:
                await answer(data.split(b" ")[1].decode(), stream)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # the client has had enough

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, _tasks() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"


@asynccontextmanager
async def _tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()


def response(
    body: bytes = PNG, status: str = "200 OK", *, length: int | None = None, more: str = ""
) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\ncontent-length: {size}\r\n{more}\r\n".encode() + body


async def png(path: str, stream: SocketStream) -> None:
    await stream.send(response())


async def error(one: MediaLoader, *sources: MediaSource) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await one.load(sources)
    return caught.value


def is_picture(media: Media) -> bool:
    return media.param == PARAM and np.array_equal(media.values[0], pixels())


async def test_a_file_may_be_named_in_every_way(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    text = b64encode(PNG).decode()
    async with web(png) as url, loading(folder=str(tmp_path)) as one:
        media = await one.load(
            [
                named(f"data:image/png;base64,{text}"),
                named(base64=text),
                named(data=PNG),
                named(url + "/a"),
                named(f"file://{tmp_path}/a.png"),
            ]
        )
    assert len(media) == 5 and all(map(is_picture, media))
    assert len({each.digest for each in media}) == 1
    with pytest.raises(ValueError, match="read-only"):
        media[0].values[0, 0, 0, 0] = 1


async def test_kinds_come_in_their_order() -> None:
    async with loading() as one:
        media = await one.load(
            [
                named(kind=MediaKind.AUDIO, param="a", data=sound("WAV")),
                named(kind=MediaKind.VIDEO, param="v", data=video("mp4", "mpeg4")),
                named(param="i", data=PNG),
            ]
        )
    assert [(each.kind, each.param) for each in media] == [("audio", "a"), ("video", "v"), ("image", "i")]
    assert (media[0].rate, media[1].rate) == (16_000, 10) and len(media[1].frame_times_s) == 6


# --- addresses


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "localhost"]
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


async def test_a_request_that_had_no_turn_may_come_again() -> None:
    arrived = anyio.Event()

    async def answer(path: str, stream: SocketStream) -> None:
        arrived.set()
        await anyio.sleep_forever()

    async with web(answer) as url, loading(timeout_s=0.5, max_fetches=1) as one, _tasks() as tasks:
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


# --- files of the server


async def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(inside / "fifo")
    async with loading(folder=str(inside)) as one:
        for path in (tmp_path / "secret.png", inside / ".." / "secret.png", inside / "link.png", inside):
            assert "not in the folder" in (await error(one, named(f"file://{path}"))).message, path
        assert "FIFO" in (await error(one, named(f"file://{inside}/fifo"))).message
        assert "cannot be read" in (await error(one, named(f"file://{inside}/none.png"))).message
    async with loading() as one:
        assert isinstance(await error(one, named(f"file://{tmp_path}/secret.png")), Forbidden)


# --- limits and decoders


async def test_counts_are_limited_by_kind() -> None:
    async with loading(max_files={MediaKind.IMAGE: 1, MediaKind.VIDEO: 0}) as one:
        sources = [named(param="a", data=PNG), named(param="b", data=PNG)]
        refused = await error(one, *sources)
        assert refused.param == "b" and "--limit-mm-data-per-request" in refused.message
        assert (await error(one, named(param="v", kind=MediaKind.VIDEO))).param == "v"


async def test_decoded_bytes_of_a_request_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MAX_VALUE_BYTES", 5000)
    async with loading() as one:
        assert len(await one.load([named(data=PNG)])) == 1
        assert "over 5000 bytes" in (await error(one, named(data=PNG), named(data=PNG))).message


async def test_the_file_that_is_wrong_is_named() -> None:
    async with loading() as one:
        refused = await error(one, named(data=PNG, param="a"), named(data=PNG[:90], param="b"))
        assert isinstance(refused, InvalidRequest) and refused.param == "b"


async def test_a_decoder_has_bounds() -> None:
    """And the next file is decoded as ever."""
    large = image("PNG", pixels(6000, 6000))
    async with loading(decode=DecodeLimits(memory_bytes=64 << 20)) as one:
        refused = await error(one, named(data=large))
        assert isinstance(refused, InvalidRequest) and "memory" in refused.message
        assert is_picture((await one.load([named(data=PNG)]))[0])


async def test_a_decoder_ends_when_its_time_is_over() -> None:
    async with loading() as one:
        await one.load([named(data=PNG)])
        with spool(PARAM, 1 << 30) as out:
            out.write(image("PNG", pixels(6000, 6000)))
            with pytest.raises(InvalidRequest, match="could not be decoded within 0.01 s"):
                await one._decoders.decode(named(), out.fd, False, 0.01)
        assert is_picture((await one.load([named(data=PNG)]))[0])


async def test_a_decode_process_that_is_killed_is_started_again() -> None:
    async with loading() as one:
        await one.load([named(data=PNG)])
        first = one._decoders._process
        assert first is not None
        first.kill()
        await anyio.to_thread.run_sync(first.wait)
        assert is_picture((await one.load([named(data=PNG)]))[0])
        assert one._decoders._process is not first


async def test_nothing_that_a_decoder_says_is_believed() -> None:
    """A child that was taken over by its file may answer anything."""
    source = named(data=PNG)

    def memory(sealed: bool) -> int:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.write(fd, bytes(12))
        if sealed:
            decoders.fcntl.fcntl(fd, decoders.fcntl.F_ADD_SEALS, decoders.SEALS)
        return fd

    digest = bytes(32)
    for shape, fds, size in (
        ((1, 2, 2, 3), [memory(False)], 32),  # could be cut while it is read
        ((1, 2, 2, 3), [os.open("/dev/null", os.O_RDONLY)], 32),
        ((1, 2, 2, 3), [], 32),
        ((1, 200, 200, 3), [memory(True)], 32),
        ((-1, -2, 2, 3), [memory(True)], 32),
        ((12,), [memory(True)], 32),
        ((1, 2, 2, 3), [memory(True)], 3),
    ):
        result = decoders.DecodeResult(digest=digest[:size], shape=shape)
        with pytest.raises(RequestError, match="decoder failed"):
            decoders._media(source, result, fds)
    result = decoders.DecodeResult(digest=digest, shape=(1, 2, 2, 3))
    assert decoders._media(source, result, [memory(True)]).values.shape == (1, 2, 2, 3)


async def test_a_decoder_ends_with_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding goes on for seconds; the child is gone when the request is."""
    large = image("WEBP", pixels(3000, 3000), lossless=True, method=0)
    async with loading(timeout_s=60.0) as one:
        await one.load([named(data=PNG)])
        process = one._decoders._process
        assert process is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.load, [named(data=large)] * 2)
            while not children.read_text():
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(30):
            while children.read_text():
                await anyio.sleep(0.001)


async def test_the_loop_is_not_where_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a 4K image, the loop's thread writes no byte and decodes nothing: base64 is written in parts by a
    worker thread, and read in another process."""
    wrote: set[int] = set()
    write = os.write

    def spy(fd: int, data: Any) -> int:
        wrote.add(threading.get_ident())
        assert len(data) <= loader.write_base64.__globals__["PART_CHARS"]
        return write(fd, data)

    monkeypatch.setattr("runtime.media.spool.os.write", spy)
    text = b64encode(image("JPEG", pixels(2160, 3840))).decode()
    turns = 0
    async with loading() as one, _tasks() as tasks:

        async def turn() -> None:
            nonlocal turns
            while True:
                await anyio.sleep(0)
                turns += 1

        tasks.start_soon(turn)
        (media,) = await one.load([named(base64=text)])
    assert media.values.shape == (1, 2160, 3840, 3) and threading.get_ident() not in wrote and wrote
    assert turns > 100  # the loop went round meanwhile
    assert "PIL" not in fetch.__dict__ and "PIL" not in loader.__dict__
