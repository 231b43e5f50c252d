"""Stored files that are damaged: a server starts with any of them, moves them to quarantine, and serves the
rest."""

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio
import openai
import pytest
from msgspec import Struct

from runtime.http.openai.stored_objects import StoredObjects
from runtime.messages.tenants import DEFAULT_TENANT
from tests.http.fake import FakeService
from tests.http.openai.test_stored_objects import jsonl, line, lines_of, start, storing, until_over

pytestmark = pytest.mark.anyio

NUM_LINES = 5


class Life(NamedTuple):
    """What a server left in its folder that was killed: a file, a batch that has ended, one that is not over
    (with two answers), and a response."""

    folder: Path
    file_id: str
    ended_id: str
    batch_id: str
    input_id: str
    output_id: str
    response_id: str

    @property
    def file(self) -> Path:
        return self.folder / self.file_id

    @property
    def record(self) -> Path:
        return self.folder / "batches" / f"{self.batch_id}.json"

    @property
    def output(self) -> Path:
        return self.folder / self.output_id

    @property
    def database(self) -> Path:
        return self.folder / "responses.sqlite"


class Damage(Struct, frozen=True):
    """One damage: how it is done, and what is not served because of it."""

    name: str
    do: Callable[[Life], object]
    lost: frozenset[str] = frozenset()  # of: file, ended, batch, response
    fails: bool = False  # the batch that is not over fails with a reason
    num_quarantined: int = 1


def folder_in_place(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "x").write_text("x")


def pipe_in_place(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def overwrite_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(path.stat().st_size - 100))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def unreadable_row(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("UPDATE responses SET record = ?", (b"\xff{",))
    db.commit()
    db.close()


def meta(path: Path) -> Path:
    return path.with_name(path.name + ".json")


FILE, ENDED, BATCH, RESPONSE = (frozenset([name]) for name in ("file", "ended", "batch", "response"))
DEEP = b"[" * 100_000

DAMAGES = (
    Damage("metadata: empty", lambda it: meta(it.file).write_bytes(b""), FILE, num_quarantined=2),
    Damage("metadata: not JSON", lambda it: meta(it.file).write_bytes(b"{"), FILE, num_quarantined=2),
    Damage("metadata: not UTF-8", lambda it: meta(it.file).write_bytes(b'{"id": "\xff"}'), FILE,
           num_quarantined=2),
    Damage("metadata: too deep", lambda it: meta(it.file).write_bytes(b'{"x": ' + DEEP), FILE,
           num_quarantined=2),
    Damage("metadata: huge", lambda it: meta(it.file).write_bytes(b" " * 2**21), FILE, num_quarantined=2),
    Damage("metadata: of another type", lambda it: meta(it.file).write_bytes(b"[]"), FILE, num_quarantined=2),
    Damage("metadata: another id", lambda it: replace(meta(it.file), it.file_id.encode(), b"file-0"), FILE,
           num_quarantined=2),
    Damage("metadata: a folder", lambda it: folder_in_place(meta(it.file)), FILE, num_quarantined=2),
    Damage("metadata: a pipe", lambda it: pipe_in_place(meta(it.file)), FILE, num_quarantined=2),
    Damage("bytes: missing", lambda it: it.file.unlink(), FILE),
    Damage("bytes: shorter", lambda it: it.file.write_bytes(b"x"), FILE, num_quarantined=2),
    Damage("bytes: a folder", lambda it: folder_in_place(it.file), FILE, num_quarantined=2),
    Damage("bytes: a pipe", lambda it: pipe_in_place(it.file), FILE, num_quarantined=2),
    Damage("bytes: a link to another file",
           lambda it: (it.file.unlink(), it.file.symlink_to("/etc/passwd")), FILE, num_quarantined=2),
    Damage("a folder named like a file", lambda it: folder_in_place(it.folder / "file-folder")),
    Damage("record: not JSON", lambda it: it.record.write_bytes(b"nonsense"), BATCH, num_quarantined=2),
    Damage("record: invalid", lambda it: replace(it.record, b"in_progress", b"in_doubt"), BATCH,
           num_quarantined=2),
    Damage("record: a path for an id", lambda it: replace(it.record, it.output_id.encode(), b"../../x"),
           BATCH,
           num_quarantined=2),
    Damage("record: a folder", lambda it: folder_in_place(it.record), BATCH, num_quarantined=2),
    Damage("record of an ended batch: not UTF-8",
           lambda it: (it.folder / "batches" / f"{it.ended_id}.json").write_bytes(b"\xff\xfe"), ENDED),
    Damage("batches: a file", lambda it: (
        (it.folder / "batches").rename(it.folder / "old"), (it.folder / "batches").write_text("x")
    ), BATCH | ENDED),
    Damage("input: missing", lambda it: ((it.folder / it.input_id).unlink(),
                                         meta(it.folder / it.input_id).unlink()), fails=True,
           num_quarantined=0),
    Damage("input: not JSON", lambda it: (it.folder / it.input_id).write_bytes(
        b"x" * (it.folder / it.input_id).stat().st_size), fails=True, num_quarantined=0),
    Damage("input: too deep", lambda it: (it.folder / it.input_id).write_bytes(
        b"[" * (it.folder / it.input_id).stat().st_size), fails=True, num_quarantined=0),
    Damage("input: a folder", lambda it: folder_in_place(it.folder / it.input_id), fails=True,
           num_quarantined=2),
    Damage("output: an incomplete line", lambda it: append(it.output, b'{"custom_id": "l4"'),
           num_quarantined=0),
    Damage("output: a line that is not JSON", lambda it: append(it.output, b"nonsense\n")),
    Damage("output: a line that is not UTF-8", lambda it: append(
        it.output, b'{"custom_id": "l4", "x": "\xff"}\n')),
    Damage("output: a line that is too deep", lambda it: append(it.output, DEEP + b"\n")),
    Damage("output: a line twice", lambda it: append(it.output, b'{"custom_id": "l0"}\n')),
    Damage("output: nothing but zeros", lambda it: it.output.write_bytes(bytes(4096) + b"\n")),
    Damage("output: a folder", lambda it: folder_in_place(it.output)),
    Damage("output: missing", lambda it: it.output.unlink(), num_quarantined=0),
    Damage("responses: no database", lambda it: it.database.write_bytes(b"nonsense" * 1000), RESPONSE),
    Damage("responses: damaged pages", lambda it: overwrite_pages(it.database), RESPONSE),
    Damage("responses: a folder", lambda it: folder_in_place(it.database), RESPONSE),
    Damage("responses: a row", lambda it: unreadable_row(it.database), RESPONSE),
    Damage("lock: a folder", lambda it: folder_in_place(it.folder / "lock")),
    Damage("quarantine: a file", lambda it: (
        (it.folder / "quarantine").write_text("x"), meta(it.file).write_bytes(b"{")
    ), FILE, num_quarantined=2),
)  # fmt: skip


async def live(folder: Path) -> Life:
    """A server that is killed while a batch runs."""
    service = FakeService(hold=True)
    async with storing(folder, service) as (client, stored_objects):
        file = await client.files.create(file=b"contents", purpose="user_data")
        service.hold = False
        ended = await until_over(client, (await start(client, jsonl(line("a")))).id)
        response = await client.responses.create(model="org/fake", input="hi", background=True)
        service.hold = True
        batch = await start(client, jsonl(*(line(f"l{i}") for i in range(NUM_LINES))))
        with anyio.fail_after(30):
            while len(service.running) < NUM_LINES:
                await anyio.sleep(0.01)
        record = stored_objects.storage.batches.find(batch.id, DEFAULT_TENANT)
    answers = [{"custom_id": f"l{i}", "response": {"status_code": 200, "body": "before"}} for i in range(2)]
    (folder / record.output_id).write_bytes(jsonl(*answers))
    return Life(folder, file.id, ended.id, batch.id, batch.input_file_id, record.output_id, response.id)


async def is_there(asking: object) -> bool:
    try:
        await asking  # type: ignore[misc]
    except openai.NotFoundError:
        return False
    return True


@pytest.mark.sampled(15)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
async def test_what_is_damaged_is_not_served_and_the_rest_is(damage: Damage, tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    it = await live(folder)
    damage.do(it)
    async with storing(folder) as (client, stored_objects):
        served = {
            "file": await is_there(client.files.content(it.file_id)),
            "ended": await is_there(client.batches.retrieve(it.ended_id)),
            "batch": await is_there(client.batches.retrieve(it.batch_id)),
            "response": await is_there(client.responses.retrieve(it.response_id)),
        }
        assert {name for name, there in served.items() if not there} == damage.lost
        if "batch" not in damage.lost:
            batch = await until_over(client, it.batch_id)
            answers = await lines_of(client, batch.output_file_id)  # each line once
            if damage.fails:
                assert batch.status == "failed" and "input" in batch.errors.data[0].message
                assert len(answers) == 2, "what was answered before is served"
            else:
                assert (batch.status, len(answers)) == ("completed", NUM_LINES)
        new = await until_over(client, (await start(client, jsonl(line("new")))).id)
        assert new.status == "completed"
        assert (await client.responses.create(model="org/fake", input="hi", background=True)).id
        count = stored_objects._disk._metrics.quarantined_files.value
        assert count == damage.num_quarantined or (count > 0 and damage.name == "responses: a row")
    async with storing(folder) as (client, stored_objects):  # and the next start finds nothing more
        assert (await until_over(client, new.id)).status == "completed"
        if damage.name not in ("quarantine: a file", "responses: a row"):  # these stay where they are
            assert stored_objects._disk._metrics.quarantined_files.value == 0


async def test_quarantine_keeps_what_was_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    it = await live(tmp_path)
    append(it.output, b"damaged \xff line\n")
    meta(it.file).write_bytes(b"{")
    async with storing(tmp_path) as (client, _):
        assert (await until_over(client, it.batch_id)).status == "completed"
    quarantine = tmp_path / "quarantine"
    assert (quarantine / f"{it.output_id}-damaged-lines").read_bytes() == b"damaged \xff line\n"
    assert (quarantine / it.file_id).read_bytes() == b"contents"
    meta(it.file).write_bytes(b"[")  # the same name again
    StoredObjects(FakeService(), tmp_path, 2**20).close()
    assert (quarantine / f"{it.file_id}.json").read_bytes() == b"{"
    assert (quarantine / f"{it.file_id}.json.1").read_bytes() == b"["


async def test_stored_files_are_readable_by_their_user_alone(tmp_path: Path) -> None:
    """Also where an earlier version, or a copy, has opened them to others."""
    old = os.umask(0)
    try:
        folder = tmp_path / "a" / "stored"
        it = await live(folder)
        for path in folder.rglob("*"):
            path.chmod(0o777 if path.is_dir() else 0o666)
        append(it.output, b"damaged\n")
        async with storing(folder) as (client, _):
            assert (await until_over(client, it.batch_id)).status == "completed"
            await client.files.create(file=b"new", purpose="user_data")
            await client.responses.create(model="org/fake", input="hi")
        for path in [folder, *folder.rglob("*")]:
            allowed = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) & ~allowed == 0, path
    finally:
        os.umask(old)
