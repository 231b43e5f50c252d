"""/v1/uploads with the openai client and a scripted service."""

import hashlib
import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from runtime.http.openai.uploads import store
from tests.hostile.faulty_disk import KINDS, FaultyDisk, FaultyOs
from tests.hostile.test_disks import refused
from tests.hostile.test_owners import ALICE, BOB, statuses
from tests.hostile.test_owners import storing as storing_for_tenants
from tests.http.openai.test_stored_objects import jsonl, line, storing, until_over

pytestmark = pytest.mark.anyio

NOTES: dict[str, Any] = {
    "filename": "notes.bin",
    "mime_type": "application/octet-stream",
    "purpose": "user_data",
}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "uploads").iterdir())


async def until_gone(folder: Path) -> None:
    with anyio.fail_after(10):
        while left(folder):
            await anyio.sleep(0.01)


async def test_parts_in_their_order_are_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "COPY_BYTES", 1000)  # several stretches of each part
    parts = [bytes([i]) * 3500 for i in range(3)]
    whole = b"".join(parts)
    async with storing(tmp_path) as (client, objects):
        upload = await client.uploads.create(bytes=len(whole), **NOTES)
        assert (upload.status, upload.object, upload.bytes) == ("pending", "upload", len(whole))
        assert upload.expires_at == upload.created_at + 3600
        sent = [await client.uploads.parts.create(upload.id, data=part) for part in parts[::-1]]
        assert {part.upload_id for part in sent} == {upload.id} and sent[0].object == "upload.part"
    async with storing(tmp_path) as (client, objects):  # a pending upload outlives the server
        assert objects.storage.files.quota.used == len(whole)
        names = [part.id for part in sent[::-1]]
        digest = hashlib.md5(whole).hexdigest()
        done = await client.uploads.complete(upload.id, part_ids=names, md5=digest)
        assert done.status == "completed" and done.file is not None and done.file.filename == "notes.bin"
        assert (await client.files.content(done.file.id)).content == whole
        assert [file.id async for file in client.files.list()] == [done.file.id]
        for again in (client.uploads.cancel(upload.id), client.uploads.complete(upload.id, part_ids=names)):
            with pytest.raises(openai.NotFoundError, match="pending"):
                await again
        assert objects.storage.files.quota.used == len(whole)
        await until_gone(tmp_path)


async def test_a_batch_reads_a_file_that_came_in_parts(tmp_path: Path) -> None:
    data = jsonl(*(line(f"l{i}") for i in range(5)))
    async with storing(tmp_path) as (client, _):
        done = await client.uploads.upload_file_chunked(
            file=data,
            filename="in.jsonl",
            bytes=len(data),
            mime_type="application/jsonl",
            purpose="batch",
            part_size=100,
        )
        assert done.file is not None
        batch = await client.batches.create(
            input_file_id=done.file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert (await until_over(client, batch.id)).request_counts.completed == 5


async def test_what_is_given_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SWEEP_S", 0.01)
    async with storing(tmp_path) as (client, objects):
        cancelled = await client.uploads.create(bytes=10, **NOTES)
        monkeypatch.setattr(store, "LIFE_S", 2)
        expired = await client.uploads.create(bytes=10, **NOTES)
        for upload in (cancelled, expired):
            await client.uploads.parts.create(upload.id, data=b"x" * 10)
        assert objects.storage.files.quota.used == 20
        assert (await client.uploads.cancel(cancelled.id)).status == "cancelled"
        await until_gone(tmp_path)
        with pytest.raises(openai.NotFoundError):
            await client.uploads.parts.create(expired.id, data=b"x")
        assert objects.storage.files.quota.used == 0
        assert [file async for file in client.files.list()] == []


async def test_uploads_that_are_refused_stay_pending(tmp_path: Path) -> None:
    async with (
        storing(tmp_path) as (client, objects),
        httpx.AsyncClient(base_url=str(client.base_url)) as http,
    ):
        upload = await client.uploads.create(bytes=6, **NOTES)
        first, second = [await client.uploads.parts.create(upload.id, data=part) for part in (b"abc", b"def")]
        for fields, param in (
            ({"part_ids": [first.id]}, "part_ids"),
            ({"part_ids": [first.id, first.id]}, "part_ids"),
            ({"part_ids": [first.id, "part_0"]}, "part_ids[1]"),
            ({"part_ids": [first.id, "../../lock"]}, "part_ids[1]"),
            ({"part_ids": [first.id, second.id], "md5": "0" * 32}, "md5"),
            ({"part_ids": "x"}, "part_ids"),
            ({}, "part_ids"),
        ):
            answer = await http.post(f"uploads/{upload.id}/complete", json=fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        for content_type, body in (
            ("application/json", b"{}"),
            ("multipart/form-data; boundary=b", b"--b--\r\n"),
            (
                "multipart/form-data; boundary=b",
                b'--b\r\ncontent-disposition: form-data; name="data"\r\n\r\nx\r\n--b--\r\n',
            ),
            ("multipart/form-data", b""),
        ):
            answer = await http.post(
                f"uploads/{upload.id}/parts", content=body, headers={"content-type": content_type}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "data"), answer.text
        for fields, status, param in (
            ({"bytes": -1}, 400, "bytes"),
            ({"bytes": 2**40}, 400, "bytes"),
            ({"purpose": "fun"}, 400, "purpose"),
            ({"filename": ""}, 400, "filename"),
            ({"mime_type": 5}, 400, "mime_type"),
        ):
            answer = await http.post("uploads", json={"bytes": 1, **NOTES} | fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
        with pytest.raises(openai.APIStatusError) as error:  # beyond --file-storage-bytes
            await client.uploads.parts.create(upload.id, data=b"x" * 2**20)
        assert error.value.status_code == 507
        done = await client.uploads.complete(upload.id, part_ids=[second.id, first.id])
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == b"defabc"
        empty = await client.uploads.create(bytes=0, **NOTES)
        nothing = await client.uploads.complete(empty.id, part_ids=[])
        assert nothing.file is not None and (await client.files.content(nothing.file.id)).content == b""
        await until_gone(tmp_path)
        assert objects.storage.files.quota.used == 6


async def test_parts_and_uploads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_PARTS", 2)
    monkeypatch.setattr(store, "MAX_PART_BYTES", 100)
    monkeypatch.setattr(store, "MAX_PENDING", 2)
    async with storing(tmp_path) as (client, objects):
        upload = await client.uploads.create(bytes=10, **NOTES)
        with pytest.raises(openai.APIStatusError, match="100 bytes") as error:
            await client.uploads.parts.create(upload.id, data=b"x" * 101)
        assert error.value.status_code == 413
        for _ in range(2):
            await client.uploads.parts.create(upload.id, data=b"x")
        with pytest.raises(openai.BadRequestError, match="2 parts"):
            await client.uploads.parts.create(upload.id, data=b"x")
        await client.uploads.create(bytes=10, **NOTES)
        with pytest.raises(openai.RateLimitError, match="pending"):
            await client.uploads.create(bytes=10, **NOTES)
        assert objects.storage.files.quota.used == 2
        with anyio.fail_after(10):
            while len(left(tmp_path)) != 4:  # two records and two parts
                await anyio.sleep(0.01)


async def test_uploads_of_others_do_not_exist(tmp_path: Path) -> None:
    async with storing_for_tenants(tmp_path) as http:
        made = (await http.post("/v1/uploads", json={"bytes": 1, **NOTES}, headers=ALICE)).json()["id"]
        form = {"data": ("p", b"x")}
        assert (await http.post(f"/v1/uploads/{made}/parts", files=form, headers=BOB)).status_code == 404
        part = (await http.post(f"/v1/uploads/{made}/parts", files=form, headers=ALICE)).json()["id"]
        asked: list[tuple[str, str, Any]] = [
            ("POST", f"/v1/uploads/{made}/complete", {"part_ids": [part]}),
            ("POST", f"/v1/uploads/{made}/cancel", None),
        ]
        assert await statuses(http, BOB, asked) == [404, 404]
        assert await statuses(http, ALICE, asked) == [200, 404]


async def test_a_folder_that_was_damaged(tmp_path: Path) -> None:
    """Uploads whose record or part is damaged are gone; the others go on."""
    async with storing(tmp_path) as (client, _):
        uploads = [await client.uploads.create(bytes=3, **NOTES) for _ in range(3)]
        parts = [await client.uploads.parts.create(one.id, data=b"abc") for one in uploads]
    folder = tmp_path / "uploads"
    (folder / f"{uploads[0].id}.json").write_text("{")
    (folder / parts[1].id).write_bytes(b"ab")
    (folder / "part_0").write_bytes(b"of no upload")
    async with storing(tmp_path) as (client, objects):
        assert list(objects.storage.uploads.known) == [uploads[2].id]
        done = await client.uploads.complete(uploads[2].id, part_ids=[parts[2].id])
        assert done.file is not None and (await client.files.content(done.file.id)).content == b"abc"
        assert objects.storage.files.quota.used == 3
    kept = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert kept == sorted(
        ["part_0", parts[0].id, parts[1].id, f"{uploads[0].id}.json", f"{uploads[1].id}.json"]
    )
    record = json.loads((tmp_path / "quarantine" / f"{uploads[1].id}.json").read_text())
    assert record["upload"]["id"] == uploads[1].id


async def test_many_parts_at_once_are_all_there(tmp_path: Path) -> None:
    async with storing(tmp_path) as (client, objects):
        upload = await client.uploads.create(bytes=200, **NOTES)
        names: dict[int, str] = {}

        async def send(i: int) -> None:
            names[i] = (await client.uploads.parts.create(upload.id, data=bytes([i]) * 10)).id

        async with anyio.create_task_group() as tasks:
            for i in range(20):
                tasks.start_soon(send, i)
        ordered = [names[i] for i in range(20)]
        answers: list[Any] = []

        async def complete() -> None:
            try:
                answers.append(await client.uploads.complete(upload.id, part_ids=ordered))
            except openai.NotFoundError:
                answers.append(None)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(complete)
        (done,) = [one for one in answers if one is not None]
        assert (await client.files.content(done.file.id)).content == b"".join(
            bytes([i]) * 10 for i in range(20)
        )
        assert [file.id async for file in client.files.list()] == [done.file.id], "once"
        assert objects.storage.files.quota.used == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_disks_that_fail(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what was refused, and what was there before is whole when the disk works again."""
    disk = FaultyDisk(monkeypatch, tmp_path / "stored")
    monkeypatch.setattr(store, "os", FaultyOs(disk))
    async with storing(disk.path) as (client, objects):
        upload = await client.uploads.create(bytes=3, **NOTES)
        part = await client.uploads.parts.create(upload.id, data=b"abc")
        disk.fail(kind, objects)
        await refused(client.uploads.create(bytes=3, **NOTES), kind)
        await refused(client.uploads.parts.create(upload.id, data=b"x" * 5000), kind)
        await refused(client.uploads.complete(upload.id, part_ids=[part.id]), kind)
        assert objects.storage.files.quota.used == 3 and not objects.storage.files.known
        disk.repair()
        done = await client.uploads.complete(upload.id, part_ids=[part.id])
        assert done.file is not None and (await client.files.content(done.file.id)).content == b"abc"
    async with storing(disk.path) as (client, objects):
        assert [file.id async for file in client.files.list()] == [done.file.id]
        assert not objects.storage.uploads.known and left(disk.path) == []
