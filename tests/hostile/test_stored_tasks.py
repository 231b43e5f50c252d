"""Whatever the task of a stored object raises ends that object alone: the server, its other objects and its
next start go on."""

from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from runtime.http.openai.batches import Batches
from runtime.http.openai.responses.serve import ResponseAnswerFormat
from tests.http.fake import FakeService
from tests.http.openai.test_stored_objects import jsonl, line, lines_of, start, storing, until_over

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": "org/fake", "input": "hi", "max_output_tokens": 3}
DEPTHS = (1_100, 100_000)


def nested(depth: int) -> bytes:
    """A line whose body is nested `depth` deep."""
    return (
        b'{"custom_id": "deep", "method": "POST", "url": "/v1/chat/completions", "body": {"x": '
        + b"[" * depth
        + b"]" * depth
        + b"}}\n"
    )


async def works(client: openai.AsyncOpenAI) -> bool:
    """Whether another batch and another background response come to their end."""
    response = await client.responses.create(**ASK, background=True)
    batch = await until_over(client, (await start(client, jsonl(line("a")))).id)
    with anyio.fail_after(30):
        while (await client.responses.retrieve(response.id)).status in ("queued", "in_progress"):
            await anyio.sleep(0.01)
    return bool(batch.status == "completed")


@pytest.mark.parametrize("depth", DEPTHS)
async def test_a_line_that_is_nested_too_deeply_fails_its_batch(depth: int, tmp_path: Path) -> None:
    async with storing(tmp_path) as (client, _):
        batch = await until_over(client, (await start(client, jsonl(line("a")) + nested(depth))).id)
        assert batch.status == "failed"
        assert [(error.code, error.line) for error in batch.errors.data] == [("invalid_json_line", 2)]
        assert await works(client)
    async with storing(tmp_path) as (client, _):  # a restart
        assert (await client.batches.retrieve(batch.id)).status == "failed" and await works(client)


@pytest.mark.parametrize("error", [RecursionError, MemoryError, KeyError, AssertionError])
async def test_a_batch_whose_task_raises_fails_alone(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Batches.check
    bad: list[str] = []

    def raises(batches: Batches, record: Any) -> Any:
        if record.batch.metadata == {"who": "me"} and not bad:
            bad.append(record.batch.id)
            raise error("a bug")
        return check(batches, record)

    monkeypatch.setattr(Batches, "check", raises)
    async with storing(tmp_path) as (client, stored_objects):
        batch = await until_over(client, (await start(client, jsonl(line("a")))).id)
        assert batch.status == "failed" and batch.errors.data[0].code == "server_error"
        assert await works(client)
        assert stored_objects._disk._metrics.stored_object_failures["batch"] == 1
    async with storing(tmp_path) as (client, _):
        assert (await client.batches.retrieve(batch.id)).status == "failed" and await works(client)


async def test_a_batch_that_can_not_even_fail_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover = Batches.recover
    bad: list[str] = []

    def raises(batches: Batches, record: Any, **more: Any) -> Any:
        bad.append(record.batch.id)
        if record.batch.id == bad[0]:
            raise RecursionError("a bug")
        return recover(batches, record, **more)

    async with storing(tmp_path) as (client, stored_objects):
        with monkeypatch.context() as patch:
            patch.setattr(Batches, "recover", raises)
            batch = await start(client, jsonl(line("a")))
            with anyio.fail_after(30):
                while stored_objects._disk._metrics.stored_object_failures["batch"] < 2:
                    await anyio.sleep(0.01)
            assert await works(client)
    async with storing(tmp_path) as (client, _):  # the record is as it was: another server tries again
        batch = await until_over(client, batch.id)
        assert batch.status == "completed" and len(await lines_of(client, batch.output_file_id)) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_background_response_whose_task_raises_fails_alone(
    is_stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> Any:
        raise RecursionError("a bug")

    service = FakeService(hold=True)
    async with storing(tmp_path, service) as (client, stored_objects):
        answer: Any = await client.responses.create(**ASK, background=True, stream=is_stream)
        if is_stream:
            answer = (await anext(aiter(answer))).response
        with monkeypatch.context() as patch:
            for name in ("body", "events", "tail", "failure"):
                patch.setattr(ResponseAnswerFormat, name, raises)
            with anyio.fail_after(30):
                while (found := await client.responses.retrieve(answer.id)).status != "failed":
                    service.run()
                    await anyio.sleep(0.01)
        assert found.error.code == "server_error"
        service.hold = False
        assert await works(client)
        assert stored_objects._disk._metrics.stored_object_failures["response"] >= 1
