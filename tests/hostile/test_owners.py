"""Files, batches and responses of several tenants: what is another's does not exist, and none fills the
server."""

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from runtime.errors import NotFound, StorageFull
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.openai import batches, files
from runtime.http.openai.batch_runner import Slots
from runtime.http.openai.responses import routes
from runtime.http.openai.responses.resumable_streams import ResumableStreams
from runtime.http.openai.responses.store import ResponseStore, StoredResponse
from runtime.http.openai.stored.quota import Quota
from runtime.http.openai.stored_objects import StoredObjects
from runtime.http.settings import HttpSettings
from runtime.messages.tenants import ADMINISTRATOR, DEFAULT_TENANT, Tenant
from tests.http.fake import FakeService
from tests.test_core import until

pytestmark = pytest.mark.anyio

KEYS = {"k-alice": "alice", "k-bob": "bob"}
ALICE, BOB, ADMIN = ({"authorization": f"Bearer {key}"} for key in ("k-alice", "k-bob", "k-admin"))
CHAT = "/v1/chat/completions"
LINE = {
    "method": "POST",
    "url": CHAT,
    "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}


@asynccontextmanager
async def storing(
    folder: Path | None,
    service: FakeService | None = None,
    *,
    max_bytes: int = 2**20,
    quota: float = 0.5,
    keys: dict[str, str] = KEYS,
    max_responses: int = 1000,
) -> AsyncIterator[httpx.AsyncClient]:
    service = service or FakeService()
    stored = StoredObjects(service, folder, max_bytes, tenant_quota=quota)
    store = stored.responses.store
    store.kept.max_count = max_responses
    if store.table is not None:
        store.table.kept.max_count = max_responses
    app = http_app(service, HttpSettings(keys=Keys(keys, "k-admin", quota=quota)), stored)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stored.run)
        await until(lambda: stored._tasks.is_running)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=30
        ) as http:
            yield http
        tasks.cancel_scope.cancel()


async def upload(http: httpx.AsyncClient, headers: dict[str, str], data: bytes) -> httpx.Response:
    form = {"file": ("lines.jsonl", data)}
    return await http.post("/v1/files", files=form, data={"purpose": "batch"}, headers=headers)


def lines(count: int) -> bytes:
    return b"".join(json.dumps(LINE | {"custom_id": f"l{i}"}).encode() + b"\n" for i in range(count))


async def statuses(
    http: httpx.AsyncClient, headers: dict[str, str], asked: list[tuple[str, str, Any]]
) -> list[int]:
    return [
        (await http.request(method, path, json=body, headers=headers)).status_code
        for method, path, body in asked
    ]


def names(answer: httpx.Response) -> list[str]:
    return [one["id"] for one in answer.json()["data"]]


async def test_files_of_others_do_not_exist(tmp_path: Path) -> None:
    async with storing(tmp_path) as http:
        shown = (await upload(http, ALICE, b"mine")).json()
        assert "owner" not in shown
        name = shown["id"]
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
            other = await http.get(path, headers=BOB)
            unknown = await http.get(path.replace(name, "file-0"), headers=BOB)
            assert other.status_code == unknown.status_code == 404
            assert other.text.replace(name, "file-0") == unknown.text, "nothing tells them apart"
        assert (await http.delete(f"/v1/files/{name}", headers=BOB)).status_code == 404
    async with storing(tmp_path) as http:  # owners outlive the server
        assert [names(await http.get("/v1/files", headers=who)) for who in (ALICE, BOB, ADMIN)] == [
            [name],
            [],
            [name],
        ]
        assert (await http.get(f"/v1/files/{name}/content", headers=ALICE)).content == b"mine"
        assert (await http.get(f"/v1/files/{name}/content", headers=ADMIN)).content == b"mine"
        assert (await http.delete(f"/v1/files/{name}", headers=ALICE)).status_code == 200


async def test_what_was_stored_before_there_were_owners(tmp_path: Path) -> None:
    """It is the administrator's, where there are several tenants, and everybody's where there is one."""
    record = {"bytes": 2, "created_at": 1, "filename": "f", "purpose": "batch", "id": "file-old"}
    (tmp_path / "file-old").write_bytes(b"hi")
    (tmp_path / "file-old.json").write_text(json.dumps(record))
    db = sqlite3.connect(tmp_path / "responses.sqlite")
    db.execute(
        "CREATE TABLE responses (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, is_over INTEGER, "
        "size INTEGER, record BLOB)"
    )
    async with storing(None, keys={}) as http:
        response = (await http.post("/v1/responses", json={"input": "hi"})).json()
    old = json.dumps({"response": response | {"id": "resp_old"}, "context": [], "input": []}).encode()
    db.execute(
        "INSERT INTO responses (id, is_over, size, record) VALUES ('resp_old', 1, ?, ?)", (len(old), old)
    )
    db.commit()
    db.close()
    asked = [("GET", path, None) for path in ("/v1/files/file-old", "/v1/responses/resp_old")]
    for keys, alice in ((KEYS, 404), ({"k-alice": "alice"}, 200)):
        async with storing(tmp_path, keys=keys) as http:
            assert await statuses(http, ALICE, asked) == [alice, alice]
            assert await statuses(http, ADMIN, asked) == [200, 200]


async def test_batches_of_others_do_not_exist_and_lines_run_as_their_owner(tmp_path: Path) -> None:
    service = FakeService(hold=True)
    async with storing(tmp_path, service) as http:
        file_id = (await upload(http, ALICE, lines(3))).json()["id"]
        create = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=create, headers=BOB)).status_code == 404
        batch = (await http.post("/v1/batches", json=create, headers=ALICE)).json()["id"]
        asked = [("GET", f"/v1/batches/{batch}", None), ("POST", f"/v1/batches/{batch}/cancel", None)]
        assert await statuses(http, BOB, asked) == [404, 404]
        assert names(await http.get("/v1/batches", headers=BOB)) == []
        await until(lambda: len(service.running) == 3)
    # the next server goes on with it, as its owner
    again = FakeService()
    async with storing(tmp_path, again) as http:
        with anyio.fail_after(30):
            while (found := (await http.get(f"/v1/batches/{batch}", headers=ALICE)).json())["status"] != (
                "completed"
            ):
                await anyio.sleep(0.01)
        output = found["output_file_id"]
        assert await statuses(http, BOB, [("GET", f"/v1/files/{output}", None)]) == [404]
        answers = (await http.get(f"/v1/files/{output}/content", headers=ALICE)).text.splitlines()
        assert len(answers) == 3
        assert names(await http.get("/v1/batches", headers=ADMIN)) == [batch]
    assert {request.tenant.name for request in [*service.requests, *again.requests]} == {"alice"}
    assert not any(request.tenant.sees_all for request in again.requests)


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_responses_of_others_do_not_exist(is_on_disk: bool, tmp_path: Path) -> None:
    async with storing(tmp_path if is_on_disk else None) as http:
        mine = (await http.post("/v1/responses", json={"input": "hi"}, headers=ALICE)).json()["id"]
        path = f"/v1/responses/{mine}"
        asked = [
            ("GET", path, None),
            ("GET", f"{path}/input_items", None),
            ("POST", f"{path}/cancel", None),
            ("DELETE", path, None),
            ("POST", "/v1/responses", {"input": "go on", "previous_response_id": mine}),
            ("POST", "/v1/responses/input_tokens", {"input": "go on", "previous_response_id": mine}),
        ]
        assert await statuses(http, BOB, asked) == [404] * 4 + [400] * 2
        assert await statuses(http, ALICE, asked[:2] + asked[4:]) == [200] * 4
        assert await statuses(http, ADMIN, asked[:2] + asked[4:] + asked[3:4]) == [200] * 5
        assert await statuses(http, ALICE, asked[:1]) == [404]


async def test_background_responses_of_others_cannot_be_read_cancelled_or_ended() -> None:
    service = FakeService(hold=True)
    async with storing(None, service) as http:
        body = {"input": "hi", "background": True}
        mine = (await http.post("/v1/responses", json=body, headers=ALICE)).json()["id"]
        await until(lambda: service.running)
        path = f"/v1/responses/{mine}"
        asked = [
            ("GET", path + "?stream=true", None),
            ("POST", f"{path}/cancel", None),
            ("DELETE", path, None),
        ]
        assert await statuses(http, BOB, asked) == [404] * 3
        service.run()
        with anyio.fail_after(30):
            while (await http.get(path, headers=ALICE)).json()["status"] != "incomplete":  # max. length
                await anyio.sleep(0.01)


# ── how much one tenant may keep ────────────────────────────────────────────────────────────────────────────


async def test_one_tenant_does_not_fill_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with storing(tmp_path, max_bytes=400_000, quota=0.5) as http:
        sizes = [(await upload(http, ALICE, b"x" * 90_000)).status_code for _ in range(4)]
        assert sizes == [200, 200, 507, 507]
        answer = await upload(http, ALICE, b"x" * 90_000)
        assert "--tenant-quota" in answer.json()["error"]["message"]
        assert [(await upload(http, BOB, b"x" * 90_000)).status_code for _ in range(2)] == [200, 200]
        (one, _) = names(await http.get("/v1/files", headers=ALICE))
        assert (await http.delete(f"/v1/files/{one}", headers=ALICE)).status_code == 200
        assert (await upload(http, ALICE, b"x" * 90_000)).status_code == 200
    monkeypatch.setattr(files, "MAX_FILES", 8)
    async with storing(tmp_path, max_bytes=2**20) as http:  # empty files count as well
        assert [(await upload(http, ALICE, b"")).status_code for _ in range(4)] == [200, 200, 507, 507]
        assert (await upload(http, BOB, b"")).status_code == 200


async def test_one_tenant_has_its_part_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_UNFINISHED", 4)
    service = FakeService(hold=True)
    async with storing(tmp_path, service) as http:
        found = {}
        for who in (ALICE, BOB):
            file_id = (await upload(http, who, lines(1))).json()["id"]
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            found[who["authorization"]] = await statuses(http, who, [("POST", "/v1/batches", body)] * 3)
    assert list(found.values()) == [[200, 200, 429]] * 2


async def test_records_of_ended_batches_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_KEPT", 4)
    async with storing(tmp_path) as http:
        file_id = (await upload(http, ALICE, lines(1))).json()["id"]
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        made = []
        for _ in range(4):
            made.append((await http.post("/v1/batches", json=body, headers=ALICE)).json()["id"])
            with anyio.fail_after(30):
                while (await http.get(f"/v1/batches/{made[-1]}", headers=ALICE)).json()["status"] != (
                    "completed"
                ):
                    await anyio.sleep(0.01)
        assert names(await http.get("/v1/batches", headers=ALICE)) == made[:1:-1]
    assert len(list((tmp_path / "batches").glob("*.json"))) == 2


async def test_one_tenant_has_its_part_of_running_lines() -> None:
    slots = Slots(4, 0.5)
    held = [await slots.acquire("alice") for _ in range(2)]
    got: list[str] = []

    async def want(owner: str) -> None:
        await slots.acquire(owner)
        got.append(owner)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(want, "alice")
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):
            tasks.start_soon(want, "bob")
        await anyio.wait_all_tasks_blocked()
        assert got == ["bob", "bob"]
        slots.release("alice", held[0])
        await anyio.wait_all_tasks_blocked()
        assert got == ["bob", "bob", "alice"]


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_many_responses_of_one_tenant_push_out_its_own(is_on_disk: bool, tmp_path: Path) -> None:
    async with storing(tmp_path if is_on_disk else None, max_responses=8) as http:

        async def ask(who: dict[str, str]) -> str:
            answer = await http.post("/v1/responses", json={"input": "hi"}, headers=who)
            return str(answer.json()["id"])

        first = await ask(BOB)
        made = [await ask(ALICE) for _ in range(20)]
        await until_written(http, made[-1])
        found = [(await http.get(f"/v1/responses/{name}", headers=ALICE)).status_code == 200 for name in made]
        assert found == [False] * 16 + [True] * 4
        assert (await http.get(f"/v1/responses/{first}", headers=BOB)).status_code == 200


async def until_written(http: httpx.AsyncClient, name: str) -> None:
    """Returns when the store has had time to write what is in memory."""
    for _ in range(5):
        assert (await http.get(f"/v1/responses/{name}", headers=ALICE)).status_code == 200
        await anyio.sleep(0.02)


async def test_one_tenant_has_its_part_of_background_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_BACKGROUND", 4)
    service = FakeService(hold=True)
    body = {"input": "hi", "background": True}
    async with storing(None, service) as http:
        for who in (ALICE, BOB):
            assert await statuses(http, who, [("POST", "/v1/responses", body)] * 3) == [200, 200, 429]


def test_one_tenants_events_push_out_its_own() -> None:
    event = b"data: x\n\n"
    streams = ResumableStreams(20 * 107, tenant_quota=0.5)
    other, long = streams.open("other", "bob"), streams.open("long", "alice")
    streams.append(other, event * 3)
    other.finish()
    streams.append(long, event * 100)
    assert streams.find("other") is other and len(other.events) == 3
    assert 0 < len(long.events) <= 10 and long.first + len(long.events) == 100
    ended = streams.open("ended", "alice")
    streams.append(ended, event * 2)
    ended.finish()
    streams.append(long, event * 10)
    assert streams.find("ended") is None and streams.find("other") is other
    for name in ("long", "other"):
        streams.drop(name)
    assert streams.size == 0


def test_quota() -> None:
    quota = Quota(100, 0.5)
    quota.take(50, "alice")
    for size, owner in ((1, "alice"), (51, "bob"), (60, "admin")):
        with pytest.raises(StorageFull):
            quota.take(size, owner)
    quota.take(50, "admin")  # is bounded by the whole alone
    quota.give(50, "alice")
    quota.take(50, "bob")
    assert quota.used == 100 and quota.used_by == {"admin": 50, "bob": 50}


async def test_the_store_compares_owners(tmp_path: Path) -> None:
    store = ResponseStore(None)
    store.put(StoredResponse({"id": "r", "status": "completed", "output": []}, [], [], "alice"))
    for tenant in (Tenant("alice", sees_all=False), ADMINISTRATOR, DEFAULT_TENANT):
        assert (await store.find("r", tenant)).owner == "alice"
    with pytest.raises(NotFound):
        await store.delete("r", Tenant("bob", sees_all=False))
    await store.delete("r", ADMINISTRATOR)
