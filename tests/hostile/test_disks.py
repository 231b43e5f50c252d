"""Disks that are full, read-only, broken, hung or gone: what needs them is refused with the remedy, all else
goes on, and everything works again when they do."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from runtime.messages.tenants import DEFAULT_TENANT
from tests.hostile.faulty_disk import KINDS, STATUS, FaultyDisk
from tests.http.fake import FakeService
from tests.http.openai.test_stored_objects import jsonl, line, lines_of, start, storing, until_over
from tests.http.serving import stepping

pytestmark = pytest.mark.anyio

SQLITE = ("responses", "conversations")
LONG = "x" * 20_000  # needs pages of its own in the database
ASK: dict[str, Any] = {"model": "org/fake", "input": LONG, "max_output_tokens": 3}
CHAT: dict[str, Any] = {"model": "org/fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    return FaultyDisk(monkeypatch, tmp_path / "stored")


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(30):
        while not await holds():
            await anyio.sleep(0.01)


async def refused(asking: Awaitable[Any], kind: str) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        await asking
    assert error.value.status_code == STATUS.get(kind, 503)
    body: Any = error.value.body
    assert body["code"] in ("storage_full", "storage_unavailable")
    assert any(remedy in body["message"] for remedy in ("make room", "try", "put it back")), body["message"]


async def status_of(client: openai.AsyncOpenAI, batch_id: str) -> str:
    return str((await client.batches.retrieve(batch_id)).status)


@pytest.mark.parametrize("kind", KINDS)
async def test_plain_answers_go_on_and_stored_ones_are_refused(kind: str, disk: FaultyDisk) -> None:
    async with storing(disk.path) as (client, stored_objects):
        good = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
        disk.fail(kind, stored_objects)
        for _ in range(2):
            assert (await client.chat.completions.create(**CHAT)).choices[0].message.content
            answer = await client.responses.create(**ASK)
            assert (await client.responses.retrieve(answer.id)).output_text == answer.output_text
            assert (await client.responses.create(**ASK, store=False)).output_text
            events = [event.type async for event in await client.responses.create(**ASK, stream=True)]
            assert events[-1] == "response.incomplete"
            await refused(client.responses.create(**ASK, background=True), kind)
            await refused(client.responses.create(**ASK, store=True), kind)
            await refused(client.files.create(file=b"x" * 100, purpose="batch"), kind)
            await refused(
                client.batches.create(
                    input_file_id=good.id, endpoint="/v1/chat/completions", completion_window="24h"
                ),
                kind,
            )
            if kind != "full" and kind != "read-only":
                await refused(client.files.content(good.id), kind)
        assert [batch async for batch in client.batches.list()] == [], "nothing phantom"
        assert [file.id async for file in client.files.list()] == [good.id]
        assert stored_objects.storage.files.quota.used == good.bytes, "what was reserved went back"
        disk.repair()
        assert (await client.files.content(good.id)).content == jsonl(line("a"))

        async def works() -> bool:
            try:
                return bool((await client.responses.create(**ASK, background=True)).id)
            except openai.APIStatusError:
                return False

        await until(works)
        batch = await until_over(client, (await start(client, jsonl(line("b")))).id)
        assert batch.status == "completed"
    disk.repair()
    async with storing(disk.path) as (client, stored_objects):
        assert (await client.responses.retrieve(answer.id)).output_text == answer.output_text, (
            "is on disk now"
        )
        assert [one.id async for one in client.batches.list()] == [batch.id]
        assert {path.name for path in disk.path.iterdir()} == {
            "lock", "batches", "uploads",
            *(f"{name}.sqlite{end}" for name in SQLITE for end in ("", "-wal", "-shm")),
            *(name for file in stored_objects.storage.files.known for name in (file, file + ".json")),
        }, "and nothing else is left"  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_a_running_batch_waits_for_the_disk_and_goes_on(kind: str, disk: FaultyDisk) -> None:
    service = FakeService(hold=True)
    async with storing(disk.path, service) as (client, stored_objects), stepping(service):
        data = jsonl(*(line(f"l{i}", max_tokens=2 + i % 7) for i in range(150)))
        batch = await start(client, data)
        counts = stored_objects.storage.batches.find(batch.id, DEFAULT_TENANT)
        await until(lambda: _is(counts.batch.request_counts.completed > 10))
        disk.fail(kind, stored_objects)
        for _ in range(5):
            assert (await client.chat.completions.create(**CHAT)).choices[0].message.content
        await until(
            lambda: _is(not service.running)
        )  # 64 lines wait to be written, and no others are computed
        seen = counts.batch.request_counts.completed
        assert await status_of(client, batch.id) == "in_progress" and seen < 150
        disk.repair()
        batch = await until_over(client, batch.id)
        answers = await lines_of(client, batch.output_file_id)  # each line once
        assert (batch.status, batch.request_counts.completed, len(answers)) == ("completed", 150, 150)


async def _is(value: bool) -> bool:
    return value


@pytest.mark.parametrize("kind", ["full", "read-only", "vanished"])
async def test_a_batch_is_cancelled_while_the_disk_is_full(kind: str, disk: FaultyDisk) -> None:
    service = FakeService(hold=True)
    async with storing(disk.path, service) as (client, stored_objects):
        batch = await start(client, jsonl(*(line(f"l{i}", max_tokens=2) for i in range(10))))
        await until(lambda: _is(len(service.running) == 10))
        disk.fail(kind, stored_objects)
        service.run()
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        assert await status_of(client, batch.id) == "cancelling"
        disk.repair()
        batch = await until_over(client, batch.id)
        answers = await lines_of(client, batch.output_file_id) | await lines_of(client, batch.error_file_id)
        assert (batch.status, len(answers)) == ("cancelled", 10)


async def test_the_output_of_a_batch_waits_for_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.http.openai.batch_runner.RETRY_S", 0.02)
    data = jsonl(*(line(f"l{i}", max_tokens=2) for i in range(20)))
    async with storing(tmp_path, max_bytes=len(data) + 6000) as (client, stored_objects):
        other = await client.files.create(file=b"x" * 4000, purpose="user_data")
        batch = await start(client, data)
        quota = stored_objects.storage.files.quota
        await until(
            lambda: _is(
                0
                < stored_objects.storage.batches.find(batch.id, DEFAULT_TENANT).batch.request_counts.completed
            )
        )
        assert await status_of(client, batch.id) == "in_progress" and quota.used <= quota.limit
        stored_objects.storage.files.quota.limit += 20_000
        batch = await until_over(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 20)
        await client.files.delete(other.id)
        await client.files.delete(batch.output_file_id)
        await client.files.delete(batch.input_file_id)
        assert quota.used == 0, "all that was taken came back"


@pytest.mark.parametrize("kind", ["full", "read-only"])
async def test_a_server_starts_on_a_disk_that_takes_nothing(kind: str, disk: FaultyDisk) -> None:
    service = FakeService(hold=True)
    async with storing(disk.path, service) as (client, stored_objects):
        file = await client.files.create(file=b"contents", purpose="user_data")
        answer = await client.responses.create(**ASK, background=True)  # is interrupted
        batch = await start(client, jsonl(line("a"), line("b")))
        await until(lambda: _is(len(service.running) == 3))
    disk.kind = kind
    async with storing(disk.path) as (client, stored_objects):
        assert (await client.chat.completions.create(**CHAT)).choices[0].message.content
        assert (await client.responses.create(**ASK)).output_text
        assert (await client.files.content(file.id)).content == b"contents"
        await refused(client.responses.create(**ASK, background=True), kind)
        assert await status_of(client, batch.id) == "in_progress"
        disk.repair()
        assert (await until_over(client, batch.id)).status == "completed"

        async def has_ended() -> bool:
            return (await client.responses.retrieve(answer.id)).status == "failed"

        await until(has_ended)


async def test_a_response_that_is_lost_with_the_disk_ends_in_memory(disk: FaultyDisk) -> None:
    """A background response whose end can't be written: it ends for its client all the same."""
    service = FakeService(hold=True)
    async with storing(disk.path, service) as (client, stored_objects):
        answer = await client.responses.create(**ASK, background=True)
        await until(lambda: _is(bool(service.running)))
        disk.fail("full", stored_objects)
        service.run()

        async def is_over() -> bool:
            return (await client.responses.retrieve(answer.id)).status == "incomplete"

        await until(is_over)
        disk.repair()
        await until(lambda: _is(not stored_objects.responses.store.kept.num_bytes))
    async with storing(disk.path) as (client, _):
        assert (await client.responses.retrieve(answer.id)).status == "incomplete"


async def test_metrics_count_what_the_disk_refuses(disk: FaultyDisk) -> None:
    async with storing(disk.path) as (client, stored_objects):
        disk.fail("full", stored_objects)
        await refused(client.files.create(file=b"x", purpose="batch"), "full")
        metrics = stored_objects._disk._metrics
        assert metrics.stored_object_disk_errors["full"] >= 1
        disk.repair()


async def test_a_deleted_response_is_gone_and_one_that_can_not_be_deleted_is_there(disk: FaultyDisk) -> None:
    async with storing(disk.path) as (client, stored_objects):
        answer = await client.responses.create(**ASK, background=True)
        disk.fail("read-only", stored_objects)
        await refused(client.responses.delete(answer.id), "read-only")
        disk.repair()
        assert (await client.responses.retrieve(answer.id)).id == answer.id
        await client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)


async def test_a_real_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of 12 MB, where this user may mount one."""
    monkeypatch.setattr("runtime.http.openai.stored.records.RETRY_S", 0.05)
    mounted = await anyio.run_process(
        ["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "tmpfs", str(tmp_path)], check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        await fill_and_free(tmp_path)
    finally:
        await anyio.run_process(["umount", "-l", str(tmp_path)])


async def fill_and_free(path: Path) -> None:
    async with storing(path, max_bytes=2**30) as (client, stored_objects):
        batch = await start(client, jsonl(line("a")))
        await until_over(client, batch.id)
        ballast = path / "ballast"
        with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        await refused(client.files.create(file=b"x" * 100_000, purpose="batch"), "full")
        for _ in range(40):  # what is free in the database is used up
            answer = await client.responses.create(**ASK)
        await refused(client.responses.create(**ASK, background=True), "full")
        ballast.unlink()
        await until(lambda: _is(stored_objects.responses.store._fault is None))
        assert (await client.files.create(file=b"x" * 100_000, purpose="batch")).bytes == 100_000
        assert (await client.responses.retrieve(answer.id)).id == answer.id
    assert json.loads((path / "batches" / f"{batch.id}.json").read_text())["batch"]["status"] == "completed"
