"""/v1/messages/batches with the anthropic client and a scripted service."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import anyio
import httpx
import pytest

from runtime.errors import Overloaded
from runtime.http.openai import batch_runner
from tests.hostile.test_owners import ADMIN, ALICE, BOB, lines, statuses, upload
from tests.hostile.test_owners import storing as storing_for_tenants
from tests.http.fake import FakeService
from tests.http.openai.test_stored_objects import storing
from tests.test_core import until

pytestmark = pytest.mark.anyio

Pair = tuple[anthropic.AsyncAnthropic, Any]
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]


def asked(name: str, **fields: Any) -> Any:
    params = {"model": "org/fake", "max_tokens": 3, "messages": HELLO} | fields
    return {"custom_id": name, "params": params}


@asynccontextmanager
async def client_of(folder: Path, service: FakeService | None = None) -> AsyncIterator[Pair]:
    async with storing(folder, service) as (openai_client, objects):
        url = str(openai_client.base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
            yield client, objects


async def until_ended(client: anthropic.AsyncAnthropic, batch_id: str) -> Any:
    with anyio.fail_after(10):
        while (batch := await client.messages.batches.retrieve(batch_id)).processing_status != "ended":
            await anyio.sleep(0.01)
    return batch


async def results_of(client: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    results = [one async for one in await client.messages.batches.results(batch_id)]
    found = {one.custom_id: one.result for one in results}
    assert len(found) == len(results), "each request is answered once"
    return found


async def test_results_are_what_messages_answer(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, objects):
        single = await client.messages.create(**asked("")["params"])
        made = await client.messages.batches.create(
            requests=[
                asked("good"),
                asked("wrong", max_tokens=0),
                asked("streamed", stream=True),
                asked("misspelt", mesages=[]),
            ]
        )
        assert (made.type, made.processing_status, made.results_url) == ("message_batch", "in_progress", None)
        assert made.request_counts.processing == 4 and made.ended_at is None
        assert (made.expires_at - made.created_at).total_seconds() == 24 * 3600
        batch = await until_ended(client, made.id)
        counts = batch.request_counts
        assert (counts.processing, counts.succeeded, counts.errored, counts.canceled) == (0, 1, 3, 0)
        assert batch.ended_at is not None and batch.results_url
        results = await results_of(client, made.id)
        assert results["good"].type == "succeeded"
        assert results["good"].message.content == single.content
        assert results["good"].message.usage == single.usage
        for name, field in (("wrong", "max_tokens"), ("streamed", "stream"), ("misspelt", "mesages")):
            error = results[name].error
            assert (results[name].type, error.type, error.error.type) == (
                "errored",
                "error",
                "invalid_request_error",
            )
            assert field in error.error.message
    async with client_of(tmp_path) as (client, objects):  # of an earlier server
        assert await results_of(client, made.id) == results
        gone = await client.messages.batches.delete(made.id)
        assert (gone.id, gone.type) == (made.id, "message_batch_deleted")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(made.id)
        assert not objects.storage.files.known and not objects.storage.files.quota.used
    assert not [*tmp_path.glob("file-*"), *tmp_path.glob("batches/*")]


async def test_pages_of_batches(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, objects):
        names = [(await client.messages.batches.create(requests=[asked("a")])).id for _ in range(5)][::-1]
        assert [one.id async for one in client.messages.batches.list(limit=2)] == names
        before = await client.messages.batches.list(before_id=names[3], limit=2)
        assert [one.id for one in before.data] == names[1:3] and before.has_more
        assert (before.first_id, before.last_id) == (names[1], names[2])
        for field in ("after_id", "before_id"):
            with pytest.raises(anthropic.BadRequestError, match=field):
                await client.messages.batches.list(**{field: "msgbatch_0"})  # type: ignore[arg-type]
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            await client.messages.batches.list(limit=1001)
        async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
            assert (await http.get("/v1/batches")).json()["data"] == [], "they are not OpenAI's"
            assert (await http.get(f"/v1/batches/{names[0]}")).status_code == 404
            assert (await http.post(f"/v1/batches/{names[0]}/cancel")).status_code == 404
        for name in names:
            await until_ended(client, name)


async def test_what_is_cancelled_has_results(tmp_path: Path) -> None:
    service = FakeService(hold=True)
    async with client_of(tmp_path, service) as (client, objects):
        made = await client.messages.batches.create(
            requests=[asked(f"r{i}", max_tokens=1 + 2 * (i > 0)) for i in range(4)]
        )
        await until(lambda: len(service.running) == 4)
        async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
            early = await http.get(f"/v1/messages/batches/{made.id}/results")
        assert early.status_code == 404 and "no results yet" in early.json()["error"]["message"]
        with pytest.raises(anthropic.BadRequestError, match="has not ended"):
            await client.messages.batches.delete(made.id)
        service.step()  # which answers the first one
        await until(lambda: objects.storage.batches.known[made.id].batch.request_counts.completed == 1)
        cancelled = await client.messages.batches.cancel(made.id)
        assert cancelled.processing_status == "canceling" and cancelled.cancel_initiated_at is not None
        batch = await until_ended(client, made.id)
        counts = batch.request_counts
        assert (counts.succeeded, counts.canceled, counts.errored) == (1, 3, 0)
        found = [one.type for one in (await results_of(client, made.id)).values()]
        assert found.count("canceled") == counts.canceled and found.count("succeeded") == counts.succeeded
        assert (await client.messages.batches.cancel(made.id)).processing_status == "ended"


async def test_a_batch_that_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.http.anthropic.message_batches.WINDOW_S", 1)
    async with client_of(tmp_path, FakeService(hold=True)) as (client, _):
        made = await client.messages.batches.create(requests=[asked("a"), asked("b")])
        batch = await until_ended(client, made.id)
        assert batch.request_counts.expired == 2
        assert {one.type for one in (await results_of(client, made.id)).values()} == {"expired"}


async def test_a_server_that_is_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "PAUSE_S", 0.01)
    async with client_of(tmp_path, FakeService(hold=True)) as (client, _):
        made = await client.messages.batches.create(requests=[asked(f"r{i}") for i in range(5)])
    service = FakeService(refuse=Overloaded("busy"))
    async with client_of(tmp_path, service) as (client, _):
        await anyio.sleep(0.1)
        service.refuse = None
        batch = await until_ended(client, made.id)
        assert batch.request_counts.succeeded == 5
        assert len(await results_of(client, made.id)) == 5


async def test_requests_that_are_refused(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, objects):
        async with httpx.AsyncClient(base_url=str(client.base_url)) as http:
            for body, field in (
                (b"{}", "requests"),
                (b'{"requests": []}', "requests"),
                (b'{"requests": [5]}', "requests[0]"),
                (json.dumps({"requests": [asked("a"), asked("a")]}).encode(), "requests[1]"),
                (json.dumps({"requests": [asked("a b")]}).encode(), "requests[0].custom_id"),
                (json.dumps({"requests": [asked("x" * 65)]}).encode(), "requests[0].custom_id"),
                (json.dumps({"requests": [{"custom_id": "a"}]}).encode(), "params"),
                (b'{"requests": [{"custom_id": "a", "params": ' + b"[" * 9000 + b"]" * 9000 + b"}]}", ""),
                (b"\xff", "not JSON"),
            ):
                answer = await http.post("/v1/messages/batches", content=body)
                error = answer.json()
                assert (answer.status_code, error["type"], error["error"]["type"]) == (
                    400,
                    "error",
                    "invalid_request_error",
                )
                assert field in error["error"]["message"], error
            for name in ("..%2f..%2flock", "%00", "x" * 5000, "batch_0"):
                assert (await http.get(f"/v1/messages/batches/{name}")).status_code == 404
        assert not objects.storage.files.known and not objects.storage.batches.known


async def test_batches_of_others_do_not_exist(tmp_path: Path) -> None:
    async with storing_for_tenants(tmp_path) as http:
        made = (
            await http.post("/v1/messages/batches", json={"requests": [asked("a")]}, headers=ALICE)
        ).json()
        path = f"/v1/messages/batches/{made['id']}"
        with anyio.fail_after(10):
            while (await http.get(path, headers=ALICE)).json()["processing_status"] != "ended":
                await anyio.sleep(0.01)
        calls: list[tuple[str, str, Any]] = [
            ("GET", path, None),
            ("GET", f"{path}/results", None),
            ("POST", f"{path}/cancel", None),
            ("DELETE", path, None),
        ]
        assert await statuses(http, BOB, calls) == [404] * 4
        listed = [
            len((await http.get("/v1/messages/batches", headers=who)).json()["data"])
            for who in (ALICE, BOB, ADMIN)
        ]
        assert listed == [1, 0, 1]
        assert await statuses(http, ALICE, calls) == [200] * 4
        file_id = (await upload(http, ALICE, lines(1))).json()["id"]
        batch = {"input_file_id": file_id, "endpoint": "/v1/messages", "completion_window": "24h"}
        assert await statuses(http, ALICE, [("POST", "/v1/batches", batch)]) == [400]


async def test_without_a_folder_the_option_is_named() -> None:
    async with storing_for_tenants(None) as http:
        answer = await http.get("/v1/messages/batches", headers=ALICE)
        assert answer.status_code == 404 and "--file-storage-path" in answer.json()["error"]["message"]
        assert answer.json()["type"] == "error"
