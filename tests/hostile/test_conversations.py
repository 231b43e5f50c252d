"""Conversations of several tenants, on disks that fail, of hostile clients and of servers that are killed."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from runtime.http.openai.conversations.store import ConversationStore
from runtime.messages.tenants import Tenant
from tests.hostile.faulty_disk import KINDS, FaultyDisk
from tests.hostile.test_disks import refused
from tests.hostile.test_owners import ADMIN, ALICE, BOB, statuses
from tests.hostile.test_owners import storing as storing_for_tenants
from tests.http.openai.test_stored_objects import storing

pytestmark = pytest.mark.anyio

HELLO: Any = {"role": "user", "content": "Hello!"}
ASK: dict[str, Any] = {"model": "org/fake", "input": "?", "max_output_tokens": 3}


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_conversations_of_others_do_not_exist(is_on_disk: bool, tmp_path: Path) -> None:
    async with storing_for_tenants(tmp_path if is_on_disk else None) as http:
        made = (await http.post("/v1/conversations", json={"items": [HELLO]}, headers=ALICE)).json()
        assert "owner" not in made
        path = f"/v1/conversations/{made['id']}"
        item = (await http.get(f"{path}/items", headers=ALICE)).json()["data"][0]["id"]
        asked = [
            ("GET", path, None),
            ("POST", path, {"metadata": {}}),
            ("GET", f"{path}/items", None),
            ("GET", f"{path}/items/{item}", None),
            ("POST", f"{path}/items", {"items": [HELLO]}),
            ("POST", "/v1/responses", {"input": "?", "conversation": made["id"]}),
            ("POST", "/v1/responses/input_tokens", {"input": "?", "conversation": made["id"]}),
            ("DELETE", f"{path}/items/{item}", None),
            ("DELETE", path, None),
        ]
        assert await statuses(http, BOB, asked) == [404] * 9
        other, unknown = [
            await http.get(f"/v1/conversations/{name}", headers=BOB) for name in (made["id"], "x")
        ]
        assert other.text.replace(made["id"], "x") == unknown.text, "nothing tells them apart"
        assert await statuses(http, ADMIN, asked[:7]) == [200] * 7
        assert await statuses(http, ALICE, asked) == [200] * 9
        assert await statuses(http, ALICE, asked[:1]) == [404]


async def test_conversations_of_one_tenant_push_out_its_own() -> None:
    async with storing_for_tenants(None) as http:
        first = (await http.post("/v1/conversations", json={}, headers=BOB)).json()["id"]
        store = ConversationStore(None, tenant_quota=0.5)
        store.kept.max_count = 8
        alice, bob = (Tenant(name, sees_all=False, quota=0.5) for name in ("alice", "bob"))
        kept = await store.add([HELLO], {}, bob)
        made = [await store.add([HELLO], {}, alice) for _ in range(20)]
        store.change(await store.open(made[-4].id, alice), metadata={"used": "again"})
        made.append(await store.add([], {}, alice))
        found = [await store.find(one.id, alice) is not None for one in made]
        assert found == [False] * 16 + [True, False, True, True, True]
        assert await store.find(kept.id, bob) is not None
        assert (await http.get(f"/v1/conversations/{first}", headers=BOB)).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_disks_that_fail(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on and join their conversation in memory; what only stores is refused, and changes
    nothing. All is on the disk when it works again."""
    disk = FaultyDisk(monkeypatch, tmp_path / "stored")
    async with storing(disk.path) as (client, objects):
        store = objects.conversations.store
        made = await client.conversations.create(items=[HELLO])
        held = await store.open(made.id, Tenant())
        disk.fail(kind, objects)
        # it needs pages of its own in the database
        answer = await client.responses.create(**ASK | {"input": "?" * 20_000}, conversation=made.id)
        await refused(client.conversations.create(items=[HELLO | {"content": "x" * 20_000}]), kind)
        with anyio.fail_after(10):
            while store._fault is None:
                await anyio.sleep(0.01)
        await refused(client.conversations.items.create(made.id, items=[HELLO]), kind)
        await refused(client.conversations.update(made.id, metadata={"a": "b"}), kind)
        assert len(held.items) == 3 and held.metadata == {}
        disk.repair()
        with anyio.fail_after(10):
            while store._fault is not None:
                await anyio.sleep(0.01)
    async with storing(disk.path) as (client, _):
        items: Any = [one async for one in client.conversations.items.list(made.id, order="asc")]
        assert [one.content[0].text for one in items] == ["Hello!", "?" * 20_000, answer.output_text]


async def test_a_damaged_record_is_one_that_is_gone(tmp_path: Path) -> None:
    async with storing(tmp_path) as (client, _):
        bad, good = [await client.conversations.create(items=[HELLO]) for _ in range(2)]
    with sqlite3.connect(tmp_path / "conversations.sqlite") as db:
        db.execute("UPDATE conversations SET record = ? WHERE id = ?", (b'{"id": 5}', bad.id))
    async with storing(tmp_path) as (client, _):
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(bad.id)
        assert (await client.conversations.retrieve(good.id)).id == good.id


async def test_hostile_requests() -> None:
    async with storing_for_tenants(None) as http:
        made = (await http.post("/v1/conversations", json={"items": [HELLO]}, headers=ALICE)).json()["id"]
        path = f"/v1/conversations/{made}"
        deep = "[" * 50_000 + "]" * 50_000
        for method, where, body, status in (
            ("POST", "/v1/conversations", b"{", 400),
            ("POST", "/v1/conversations", b'{"items": 5}', 400),
            ("POST", "/v1/conversations", b'{"items": [' + deep.encode() + b"]}", 400),
            ("POST", "/v1/conversations", b'{"metadata": {"a": 5}}', 400),
            ("POST", "/v1/conversations", json.dumps({"metadata": {"k" * 65: ""}}).encode(), 400),
            ("POST", "/v1/conversations", json.dumps({"metadata": {"k": "v" * 513}}).encode(), 400),
            (
                "POST",
                "/v1/conversations",
                json.dumps({"metadata": dict.fromkeys("abcdefghijklmnopq", "")}).encode(),
                400,
            ),
            ("POST", path, b"{}", 400),
            ("POST", f"{path}/items", b'{"items": []}', 400),
            ("POST", f"{path}/items", b'{"items": [{"role": "user", "content": {"a": 1}}]}', 400),
            ("POST", f"{path}/items", b'{"items": [{"type": ["message"]}]}', 400),
            ("GET", f"{path}/items?limit=0", b"", 400),
            ("GET", f"{path}/items?limit=\xc2\xb2", b"", 400),
            ("GET", f"{path}/items?after=none", b"", 400),
            ("GET", f"{path}/items/..%2f..%2fetc%2fpasswd", b"", 404),
            ("GET", f"/v1/conversations/{'x' * 5000}", b"", 404),
            ("GET", "/v1/conversations/%00", b"", 404),
            ("DELETE", f"{path}/items/%ff", b"", 404),
            ("PUT", path, b"", 405),
        ):
            answer = await http.request(method, where, content=body, headers=ALICE)
            assert answer.status_code == status, (where, body[:80], answer.text)
            assert len(answer.text) < 2000
        page = (await http.get(f"{path}/items", headers=ALICE)).json()
        assert len(page["data"]) == 1, "nothing of what was refused is there"


async def test_many_clients_change_one_conversation(tmp_path: Path) -> None:
    """No change is lost, and none is there twice."""
    async with storing(tmp_path) as (client, _):
        made = await client.conversations.create()
        async with anyio.create_task_group() as tasks:

            async def work(number: int) -> None:
                for i in range(3):
                    content = f"{number}.{i}"
                    if number % 2:
                        await client.responses.create(**ASK | {"input": content}, conversation=made.id)
                    else:
                        await client.conversations.items.create(made.id, items=[HELLO | {"content": content}])

            for number in range(6):
                tasks.start_soon(work, number)
    async with storing(tmp_path) as (client, _):
        items: Any = [one async for one in client.conversations.items.list(made.id, order="asc")]
        asked = [one.content[0].text for one in items if one.role == "user"]
        assert sorted(asked) == sorted(f"{number}.{i}" for number in range(6) for i in range(3))
        assert len(items) == 18 + 9
