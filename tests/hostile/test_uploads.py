"""Uploads: bytes count against the quota before they are taken, and uploads that stop, come slowly or are no
forms leave nothing behind."""

import tempfile
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from runtime.http import body
from runtime.http.openai.stored import upload
from tests.http.openai.test_stored_objects import storing
from tests.http.serving import Raw

pytestmark = pytest.mark.anyio

NUM = 8
SIZE = 40 * 2**20
QUOTA = 2**20
HEAD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
)
END = b"\r\n--b--\r\n"


def head(length: int | None) -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return (
        f"POST /v1/files HTTP/1.1\r\nhost: test\r\n{framing}\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n"
    ).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def num_bytes(*folders: Path) -> int:
    return sum(
        path.stat().st_size for folder in folders for path in folder.glob("**/file-*") if path.is_file()
    )


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def until_nothing_is_left(stored_objects: Any, folder: Path) -> None:
    with anyio.fail_after(30):
        while num_bytes(folder) or stored_objects.storage.files.quota.used:
            await anyio.sleep(0.01)


@pytest.mark.parametrize("is_declared", [True, False])
async def test_unfinished_uploads_stay_within_the_quota(
    is_declared: bool, tmp_path: Path, temporary: Path
) -> None:
    folder = tmp_path / "stored"
    async with storing(folder, max_bytes=QUOTA) as (client, stored_objects):
        url = httpx.URL(str(client.base_url))
        most = 0

        async def send() -> None:
            nonlocal most
            async with Raw.connected((url.host, url.port or 0)) as raw:
                await raw.write(head(SIZE if is_declared else None))
                piece = HEAD + b"x" * (2**16 - len(HEAD))
                try:
                    for _ in range(SIZE // 2**16 - 1):  # all but the end
                        await raw.write(piece if is_declared else chunk(piece))
                        most = max(most, num_bytes(folder, temporary))
                        piece = b"x" * 2**16
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the server has refused the rest
                assert b" 507 " in await raw.to_end()

        async with anyio.create_task_group() as tasks:
            for _ in range(NUM):
                tasks.start_soon(send)
        assert most <= QUOTA, "never more bytes than the quota"
        assert not any(temporary.iterdir())
        await until_nothing_is_left(stored_objects, folder)
        assert (await client.files.create(file=b"x" * (QUOTA - 100), purpose="batch")).bytes == QUOTA - 100


async def test_files_fill_the_quota_to_the_last_byte(tmp_path: Path) -> None:
    async with storing(tmp_path, max_bytes=QUOTA) as (client, stored_objects):
        sizes = [300_000, 500_000, QUOTA - 800_000]
        files = [await client.files.create(file=b"x" * size, purpose="batch") for size in sizes]
        quota = stored_objects.storage.files.quota
        assert [file.bytes for file in files] == sizes and quota.used == QUOTA == num_bytes_of(
            tmp_path, files
        )
        with pytest.raises(Exception, match="file-storage-bytes"):
            await client.files.create(file=b"x", purpose="batch")
        await client.files.delete(files[0].id)
        assert quota.used == QUOTA - 300_000


def num_bytes_of(folder: Path, files: list[Any]) -> int:
    return sum((folder / file.id).stat().st_size for file in files)


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"x" * 300_000])
async def test_an_upload_that_falls_silent_ends(
    sent: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "MAX_PAUSE_S", 0.3)
    async with storing(tmp_path, max_bytes=QUOTA) as (client, stored_objects):
        url = httpx.URL(str(client.base_url))
        async with Raw.connected((url.host, url.port or 0)) as raw:
            await raw.write(head(QUOTA) + sent)
            assert b" 408 " in await raw.to_end()
        await until_nothing_is_left(stored_objects, tmp_path)


async def test_an_upload_that_drips_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is short, but the whole would take months."""
    monkeypatch.setattr(body, "MAX_PAUSE_S", 0.3)
    monkeypatch.setattr(upload, "MIN_RATE", 1e6)
    async with storing(tmp_path, max_bytes=QUOTA) as (client, stored_objects):
        url = httpx.URL(str(client.base_url))
        async with Raw.connected((url.host, url.port or 0)) as raw, anyio.create_task_group() as tasks:

            async def drip() -> None:
                while True:
                    await raw.write(b"x")
                    await anyio.sleep(0.02)

            await raw.write(head(QUOTA) + HEAD)
            tasks.start_soon(drip)
            try:
                assert b" 408 " in await raw.until(b" 408 ")
            finally:
                tasks.cancel_scope.cancel()
        await until_nothing_is_left(stored_objects, tmp_path)


async def test_a_client_that_leaves_takes_its_bytes_with_it(tmp_path: Path) -> None:
    async with storing(tmp_path, max_bytes=8 * QUOTA) as (client, stored_objects):
        url = httpx.URL(str(client.base_url))
        async with Raw.connected((url.host, url.port or 0)) as raw:
            await raw.write(head(4 * QUOTA) + HEAD + b"x" * (2 * QUOTA))
            with anyio.fail_after(30):
                while not num_bytes(tmp_path):
                    await anyio.sleep(0.01)
        await until_nothing_is_left(stored_objects, tmp_path)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD, 400),  # no end
        (b"nonsense", 400),
        (b"--b\r\n" + b"a: b\r\n" * 2**14 + b"\r\nx" + END, 400),
        (b"--b\r\na: " + b"x" * 2**17 + b"\r\n\r\nx" + END, 400),
        (b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 2**18 + END, 413),
        (b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\nx\r\n' * 2**13 + END[2:], 413),
        (HEAD + b"x\r\n" + HEAD[HEAD.index(b"--b", 2) :] + b"y" + END, 400),  # two files
        (HEAD.replace(b"\r\n\r\nbatch", b"\r\n\r\nb\xffd") + b"x" + END, 400),
        (HEAD.replace(b'"x"', b'"/etc/\xff\x00passwd"') + b"x" + END, 200),
    ],
)
async def test_forms_that_are_none(data: bytes, status: int, tmp_path: Path) -> None:
    async with storing(tmp_path) as (client, stored_objects):
        url = httpx.URL(str(client.base_url))
        async with Raw.connected((url.host, url.port or 0)) as raw:
            try:
                await raw.write(head(len(data)) + data)
            except (BrokenPipeError, ConnectionResetError):
                pass
            assert b" %d " % status in await raw.until(b"\r\n")
        if status != 200:
            await until_nothing_is_left(stored_objects, tmp_path)
        assert (await client.files.create(file=b"x", purpose="batch")).bytes == 1
