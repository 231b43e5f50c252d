"""Files and batches, with the openai client and a scripted service."""

import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from runtime.errors import Overloaded, StartError
from runtime.http.app import http_app
from runtime.http.openai import batch_runner
from runtime.http.openai.batches import Batch, Record
from runtime.http.openai.stored.folder import write_atomically
from runtime.http.openai.stored_objects import StoredObjects
from runtime.messages.tenants import DEFAULT_TENANT
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
Pair = tuple[openai.AsyncOpenAI, Any]


@asynccontextmanager
async def storing(
    folder: Path, service: FakeService | None = None, max_bytes: int = 2**20
) -> AsyncIterator[Pair]:
    """A client of a server that keeps files in `folder`."""
    service = service or FakeService()
    stored_objects = StoredObjects(service, folder, max_bytes)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stored_objects.run)
        async with (
            serving(http_app(service, stored_objects=stored_objects)) as (host, port),
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0) as client,
        ):
            yield client, stored_objects
        tasks.cancel_scope.cancel()


def line(name: str, content: str = "hi", url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": url,
        "body": {"model": "org/fake", "messages": [{"role": "user", "content": content}], **body},
    }


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def start(client: openai.AsyncOpenAI, data: bytes, endpoint: Any = CHAT) -> Any:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"who": "me"}
    )


async def until_over(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    with anyio.fail_after(30):
        while (batch := await client.batches.retrieve(batch_id)).status not in (
            "completed",
            "failed",
            "cancelled",
            "expired",
        ):
            await anyio.sleep(0.01)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines), "each line is answered once"
    return {each["custom_id"]: each for each in lines}


async def test_files_come_back_as_they_went(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    async with storing(tmp_path) as (client, _):
        file = await client.files.create(file=("näme.bin", data), purpose="user_data")
        other = await client.files.create(file=("b", b"{}"), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.status) == (
            len(data),
            "näme.bin",
            "user_data",
            "processed",
        )
        assert (await client.files.content(file.id)).content == data
        assert [f.id async for f in client.files.list()] == [other.id, file.id]
        assert [f.id async for f in client.files.list(order="asc", limit=1)] == [file.id, other.id]
        with pytest.raises(openai.BadRequestError, match="order must be asc or desc"):
            await client.files.list(order="up")  # type: ignore[arg-type]
        assert [f.id async for f in client.files.list(purpose="batch")] == [other.id]
    async with storing(tmp_path) as (client, _):
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content("../../etc/passwd")
    assert not (tmp_path / file.id).exists()


@pytest.mark.parametrize(
    ("data", "files", "status", "param"),
    [
        ({"purpose": "batch"}, {}, 400, "file"),
        ({}, {"file": b"x"}, 400, "purpose"),
        ({"purpose": "fun"}, {"file": b"x"}, 400, "purpose"),
        ({"purpose": "batch"}, {"file": b"x" * 2000}, 507, None),
        ({"purpose": "batch", "file": "no file"}, {}, 400, "file"),
    ],
)
async def test_uploads_that_are_refused(
    data: Any, files: Any, status: int, param: str | None, tmp_path: Path
) -> None:
    async with (
        storing(tmp_path, max_bytes=1000) as (client, stored_objects),
        httpx.AsyncClient(base_url=str(client.base_url)) as http,
    ):
        answer = await http.post("files", data=data, files=files)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not stored_objects.storage.files.known
        assert (
            await http.post("files", content=b"x", headers={"content-type": "multipart/form-data"})
        ).status_code == 400
        assert (await http.get("files", params={"limit": "0"})).json()["error"]["param"] == "limit"
        assert (await http.get("files", params={"after": "file-1"})).json()["error"]["param"] == "after"


async def test_a_batch_is_answered_line_by_line(tmp_path: Path) -> None:
    service = FakeService()
    async with storing(tmp_path, service) as (client, stored_objects):
        data = jsonl(
            *(line(f"l{i}", content=f"say {i}", max_tokens=3 + i % 5) for i in range(150)),
            line("bad", temperature=-1),
            line("lost", model="other"),
            line("stream", stream=True),
        )
        batch = await until_over(client, (await start(client, data)).id)
        assert (
            batch.status,
            batch.request_counts.total,
            batch.request_counts.completed,
            batch.request_counts.failed,
        ) == ("completed", 153, 150, 3)
        assert (
            batch.metadata == {"who": "me"} and batch.completed_at >= batch.in_progress_at >= batch.created_at
        )
        answers, errors = (
            await lines_of(client, batch.output_file_id),
            await lines_of(client, batch.error_file_id),
        )
        direct = await client.chat.completions.create(
            model="org/fake", messages=[{"role": "user", "content": "say 7"}], max_tokens=5
        )
        response = answers["l7"]["response"]
        assert (
            response["status_code"] == 200
            and response["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
        )
        assert {
            name: (e["response"]["status_code"], e["response"]["body"]["error"]["param"])
            for name, e in errors.items()
        } == {"bad": (400, "temperature"), "lost": (404, "model"), "stream": (400, "stream")}
        assert all(request.is_idle for request in service.requests[:-1]) and not service.requests[-1].is_idle
        assert [b.id async for b in client.batches.list()] == [batch.id]
        assert not stored_objects.storage.batches.unfinished_files()


@pytest.mark.parametrize(
    ("data", "codes"),
    [
        (b"", ["empty_file"]),
        (b"\n \n", ["empty_file"]),
        (b"{}\nnot json\n", ["invalid_json_line", "invalid_json_line"]),
        (
            jsonl(line("a"), line("a"), line("b", url="/v1/completions")),
            ["duplicate_custom_id", "mismatched_endpoint"],
        ),
        (jsonl(line("")), ["invalid_json_line"]),
        (b"\xff\xfe", ["invalid_json_line"]),
    ],
)
async def test_an_input_that_is_wrong_fails_whole(data: bytes, codes: list[str], tmp_path: Path) -> None:
    async with storing(tmp_path) as (client, _):
        batch = await until_over(client, (await start(client, data)).id)
        assert batch.status == "failed" and [error.code for error in batch.errors.data] == codes
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(batch.id)


async def test_what_can_be_no_batch(tmp_path: Path) -> None:
    async with storing(tmp_path) as (client, _):
        other = await client.files.create(file=("x", b"{}"), purpose="user_data")
        for ask, param in (
            ({"input_file_id": other.id, "endpoint": CHAT}, "input_file_id"),
            ({"input_file_id": "file-0", "endpoint": CHAT}, "input_file_id"),
            ({"input_file_id": other.id, "endpoint": "/v1/nothing"}, "endpoint"),
        ):
            with pytest.raises(openai.APIStatusError) as refused:
                await client.batches.create(completion_window="24h", **ask)  # type: ignore[arg-type]
            assert refused.value.body["param"] == param  # type: ignore[index]


async def test_cancelling_keeps_what_is_answered(tmp_path: Path) -> None:
    service = FakeService(hold=True)
    async with storing(tmp_path, service) as (client, stored_objects):
        batch = await start(client, jsonl(*(line(f"l{i}", max_tokens=2) for i in range(100))))
        with anyio.fail_after(30):
            while not service.running:
                await anyio.sleep(0.01)
        service.step()
        service.step()
        with anyio.fail_after(30):
            while not stored_objects.storage.batches.find(
                batch.id, DEFAULT_TENANT
            ).batch.request_counts.completed:
                await anyio.sleep(0.01)
        with pytest.raises(openai.BadRequestError):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await until_over(client, batch.id)
        assert batch.status == "cancelled" and not service.running
        answers, errors = (
            await lines_of(client, batch.output_file_id),
            await lines_of(client, batch.error_file_id),
        )
        assert answers and len(answers) + len(errors) == 100 and not answers.keys() & errors.keys()
        assert {e["error"]["code"] for e in errors.values()} == {"batch_cancelled"}


async def test_a_full_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "PAUSE_S", 0.01)
    service = FakeService(refuse=Overloaded("full"))
    async with storing(tmp_path, service) as (client, _):
        batch = await start(client, jsonl(line("a"), line("b")))
        with anyio.fail_after(30):
            while (await client.batches.retrieve(batch.id)).status != "in_progress":
                await anyio.sleep(0.01)
        service.refuse = None
        assert (await until_over(client, batch.id)).request_counts.completed == 2


async def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    """The folder as a kill -9 leaves it: some lines are answered, one is torn, others are in no file."""
    async with storing(tmp_path, FakeService(hold=True)) as (client, stored_objects):
        batch = await start(client, jsonl(*(line(f"l{i}") for i in range(20))))
        with anyio.fail_after(30):
            while (await client.batches.retrieve(batch.id)).status != "in_progress":
                await anyio.sleep(0.01)
        record = stored_objects.storage.batches.find(batch.id, DEFAULT_TENANT)
    answered = [
        {"custom_id": f"l{i}", "response": {"status_code": 200, "body": "from before"}, "error": None}
        for i in range(5)
    ]
    stored_objects.storage.files.path(record.output_id).write_bytes(
        jsonl(*answered) + b'{"custom_id": "l5", "resp'
    )
    (tmp_path / "file-stray").write_bytes(b"half an upload")
    async with storing(tmp_path) as (client, _):
        batch = await until_over(client, batch.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
            "completed",
            20,
            0,
        )
        answers = await lines_of(client, batch.output_file_id)
        assert (
            len(answers) == 20 and sum(a["response"]["body"] == "from before" for a in answers.values()) == 5
        )
    assert not (tmp_path / "file-stray").exists()


async def test_a_batch_expires(tmp_path: Path) -> None:
    async with storing(tmp_path, FakeService(hold=True)) as (client, stored_objects):
        batch = await start(client, jsonl(line("a"), line("b")))
        with anyio.fail_after(30):
            while (await client.batches.retrieve(batch.id)).status != "in_progress":
                await anyio.sleep(0.01)
        record = stored_objects.storage.batches.find(batch.id, DEFAULT_TENANT)
    late = Record(
        batch=Batch(**{f: getattr(record.batch, f) for f in Batch.__struct_fields__} | {"expires_at": 1}),
        output_id=record.output_id,
        error_id=record.error_id,
    )
    stored_objects.storage.batches.save(late)
    async with storing(tmp_path) as (client, _):
        batch = await until_over(client, batch.id)
        errors = await lines_of(client, batch.error_file_id)
        assert (
            batch.status == "expired"
            and {e["error"]["code"] for e in errors.values()} == {"batch_expired"}
            and len(errors) == 2
        )


async def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    async with storing(tmp_path):
        with pytest.raises(StartError, match="in use by another server"):
            StoredObjects(FakeService(), tmp_path, 1000)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StartError, match="can't be used"):
        StoredObjects(FakeService(), tmp_path / "file", 1000)


async def test_a_record_that_is_damaged_is_no_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file-1.json", b"{")
    async with storing(tmp_path) as (client, _):
        assert [f.id async for f in client.files.list()] == []


async def test_without_a_folder_the_answer_names_the_option() -> None:
    async with (
        serving(FakeService()) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}") as http,
    ):
        for path in ("/v1/files", "/v1/files/x/content", "/v1/batches", "/v1/batches/x/cancel"):
            answer = await http.post(path)
            assert answer.status_code == 404 and "--file-storage-path" in answer.json()["error"]["message"]


async def test_a_full_disk_keeps_no_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with storing(tmp_path) as (client, _):
        before = set(tmp_path.rglob("*"))
        monkeypatch.setattr("runtime.http.openai.stored.folder.os.fsync", full)
        with pytest.raises(openai.APIStatusError, match="the disk of --file-storage-path is full") as refused:
            await client.files.create(file=b"x" * 100, purpose="batch")
        assert refused.value.status_code == 507
        with anyio.fail_after(30):
            while set(tmp_path.rglob("*")) != before:
                await anyio.sleep(0.01)
