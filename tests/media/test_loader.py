"""From what a client named to arrays: over a network that lies, and with decoders that die."""

import hashlib
import os
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from runtime.errors import Forbidden, InvalidRequest, RequestError
from runtime.media import decoders, fetch, loader
from runtime.media.settings import DecodeLimits
from runtime.media.spool import spool
from runtime.memory_file import MemoryFile
from runtime.messages.media import EncodedText, MediaKind
from tests.media.files import image, pixels, sound, video
from tests.media.loading import PARAM, PNG, ended, error, is_picture, loading, named, png, web

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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


async def test_what_is_kept_leaves_room_for_the_largest_file() -> None:
    for max_host_bytes, spare in ((8 << 30, 1856 << 20), (1 << 30, 64 << 20), (1 << 20, 0)):
        async with loading(max_host_bytes=max_host_bytes) as one:
            assert one.spare_bytes == spare


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

    monkeypatch.setattr("runtime.memory_file.os.write", spy)
    text = b64encode(image("JPEG", pixels(2160, 3840))).decode()
    turns = 0
    async with loading() as one, ended() as tasks:

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


async def test_files_of_one_body_are_read_where_they_stand() -> None:
    """Several decoders share its descriptor, and none sees more than its own text."""
    files = [image("PNG", pixels(40, width)) for width in (8, 16, 24, 32)]
    memory, sources = MemoryFile(), []
    for file in files:
        memory.append(b'"data:image/png;base64,')
        begin = memory.num_bytes
        memory.append(b64encode(file))
        text = EncodedText(memory, begin, memory.num_bytes)
        sources.append(named("data:image/png;base64,", encoded=text))
        memory.append(b'",')
    memory.seal()
    cut_short = structs.replace(sources[0], encoded=EncodedText(memory, 23, 60))
    async with loading(max_decoders=4) as one:
        loaded = await one.load(sources)
        assert "image" in (await error(one, cut_short)).message
    assert [media.values.shape for media in loaded] == [(1, 40, width, 3) for width in (8, 16, 24, 32)]
    assert [media.digest for media in loaded] == [hashlib.sha256(file).digest() for file in files]
