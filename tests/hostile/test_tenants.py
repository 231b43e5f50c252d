"""Several keys on one server: who a request comes from, and what exists for whom."""

import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.asyncio.client import connect

from runtime.errors import StartError, Unauthorized
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.key_file import read_key_file, read_secret
from runtime.http.settings import HttpSettings
from runtime.server import _watch_key_file
from tests.http.fake import FakeService
from tests.http.serving import serving
from tests.test_core import running, until

pytestmark = pytest.mark.anyio

NAMES = {"k-alice": "alice", "k-alice-2": "alice", "k-bob": "bob"}
ALICE, BOB, ADMIN = ({"authorization": f"Bearer {key}"} for key in ("k-alice", "k-bob", "k-admin"))
# the same key, written in many ways
SPELLINGS: tuple[dict[str, str], ...] = (
    {"authorization": "Bearer k-alice"},
    {"authorization": "bearer k-alice"},
    {"authorization": "BEARER   k-alice"},
    {"authorization": "Bearer \tk-alice"},
    {"Authorization": "bEaReR k-alice"},
    {"x-api-key": "k-alice"},
    {"X-API-Key": "k-alice", "authorization": "Basic junk"},
    {"x-api-key": "k-alice", "authorization": "Bearer unknown"},
    {"authorization": "Bearer k-alice", "x-tenant-id": "bob"},
    {"x-api-key": "k-alice-2"},
)


def keys(**more: Any) -> Keys:
    return Keys(NAMES, "k-admin", **more)


@asynccontextmanager
async def talking(service: Any, keys: Keys) -> AsyncIterator[httpx.AsyncClient]:
    app = http_app(service, HttpSettings(keys=keys))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield http


# ── who it is ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/responses"])
async def test_one_key_is_one_tenant_however_its_header_is_written(path: str) -> None:
    body = {"text": "hi", "prompt": "hi", "input": "hi"}
    names = {"/generate": "text", "/v1/completions": "prompt", "/v1/responses": "input"}
    service = FakeService()
    async with talking(service, keys()) as http:
        for headers in SPELLINGS:
            answer = await http.post(path, json={names[path]: body[names[path]]}, headers=headers)
            assert answer.status_code == 200, answer.text
    assert {request.tenant.name for request in service.requests} == {"alice"}


async def test_the_same_holds_on_our_own_server_and_its_websocket() -> None:
    service = FakeService()
    app = http_app(service, HttpSettings(keys=keys()))
    async with serving(app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        for headers in SPELLINGS:
            assert (await http.post("/generate", json={"text": "hi"}, headers=headers)).status_code == 200
            async with connect(f"ws://{host}:{port}/v1/ws", additional_headers=headers) as socket:
                await socket.send('{"id": "a", "path": "/generate", "body": {"text": "hi"}}')
                with anyio.fail_after(20):
                    assert "answer" in str(await socket.recv())
    assert len(service.requests) == 2 * len(SPELLINGS)
    assert {request.tenant.name for request in service.requests} == {"alice"}


async def test_a_mounted_app_knows_the_tenant() -> None:
    service = FakeService()
    app = Starlette(routes=[Mount("/llm", http_app(service, HttpSettings(keys=keys())))])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test/llm") as http:
        for headers in SPELLINGS:
            assert (await http.post("/generate", json={"text": "hi"}, headers=headers)).status_code == 200
    assert {request.tenant.name for request in service.requests} == {"alice"}


def test_names_of_unnamed_keys_cannot_be_guessed_back(tmp_path: Path) -> None:
    """A reader of labels cannot try keys on them: two servers give one key different names."""
    seen = {Keys(("sk-1", "sk-2")).identify("user", [(b"x-api-key", b"sk-1")]).name for _ in range(3)}
    assert len(seen) == 3 and all(re.fullmatch("key-[0-9a-f]{16}", name) for name in seen)
    # with a folder of stored objects the names stay, and so do the owners
    assert read_secret(tmp_path) == read_secret(tmp_path) != read_secret(None)
    assert (tmp_path / "tenants.secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "tenants.secret").write_bytes(b"short")
    assert len(read_secret(tmp_path)) == 32 and (tmp_path / "tenants.damaged").exists()


async def test_a_header_names_tenants_below_the_key_that_sent_it() -> None:
    """--fair-share header is for one trusted proxy; another key still reaches nothing of the first one's."""
    service = FakeService()
    async with talking(service, keys(by_header=True)) as http:
        for headers in (ALICE, ALICE | {"x-tenant-id": "t"}, BOB | {"x-tenant-id": "t"}, ADMIN):
            assert (await http.post("/generate", json={"text": "hi"}, headers=headers)).status_code == 200
        for name in ("x" * 257, "admin"):
            answer = await http.post("/generate", json={"text": "hi"}, headers=ALICE | {"x-tenant-id": name})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-tenant-id"
    assert [request.tenant.name for request in service.requests] == ["alice", "alice/t", "bob/t", "admin"]


def test_one_key_or_none_is_everybody() -> None:
    """What a server with one key keeps outlives a change of this key."""
    for user, headers in (((), []), (("k",), [(b"x-api-key", b"k")])):
        tenant = Keys(user, "a").identify("user", headers)
        assert tenant.sees("") and tenant.sees("key-of-before") and tenant.most(8) == 8
    apart = Keys(named={"k": "alice"}, quota=0.25).identify("user", [(b"x-api-key", b"k")])
    assert apart.sees("alice") and not apart.sees("") and not apart.sees("bob") and apart.most(8) == 2


# ── the file of keys ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no keys"),
        ("# alice k\n", "has no keys"),
        ("alice\n", "give a key behind the name alice"),
        ("admin k\n", "line 1: a name"),
        ("key-0 k\n", "line 1: a name"),
        ("a/b k\n", "line 1: a name"),
        (f"{'a' * 65} k\n", "line 1: a name"),
        ("alice s3cret\nalice other\n", "line 2: alice has a line already"),
        ("alice s3cret\nbob s3cret\n", "line 2: bob has a key that stands here twice"),
        ("alice s3cret s3cret\n", "stands here twice"),
        ("alice s3crét\n", "headers can't carry"),
        (b"alice \xff\n", "not UTF-8"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_refused_without_its_keys(
    text: str | bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StartError, match=words) as error:
        read_key_file(path)
    assert "s3cr" not in str(error.value)


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(StartError, match="No such file"):
        read_key_file(path)
    path.write_text("# tenants\n\nalice  k-alice k-alice-2\n bob\tk-bob \n")
    assert read_key_file(path) == NAMES


def test_keys_are_replaced_at_once() -> None:
    one = Keys(("fixed",), "a", named={"old": "alice"})
    one.replace({"new": "alice"})
    assert one.identify("user", [(b"x-api-key", b"new")]).name == "alice"
    assert one.identify("user", [(b"x-api-key", b"a")]).name == "admin"
    assert one.identify("user", [(b"x-api-key", b"fixed")]).name.startswith("key-")
    with pytest.raises(Exception, match="not known here"):
        one.identify("user", [(b"x-api-key", b"old")])


async def test_a_signal_reads_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    known = Keys(named={"old": "alice"})

    def names(key: str) -> str | None:
        try:
            return known.identify("user", [(b"x-api-key", key.encode())]).name
        except Unauthorized:
            return None

    async with anyio.create_task_group() as tasks:
        await tasks.start(_watch_key_file, known, path)
        for text, old, new in (
            ("alice new\n", None, "alice"),
            ("alice\n", None, "alice"),
            ("bob old\n", "bob", None),
        ):
            path.write_text(text)
            os.kill(os.getpid(), signal.SIGHUP)
            if text != "alice\n":  # which cannot be used, and changes nothing
                await until(lambda old=old: names("old") == old)
            assert names("new") == new
        tasks.cancel_scope.cancel()


# ── what exists for whom ────────────────────────────────────────────────────────────────────────────────────


async def test_adapters_of_others_do_not_exist() -> None:
    service = FakeService()
    async with talking(service, Keys(NAMES)) as http:
        for headers, name in ((ALICE, "a"), (BOB, "b")):
            body = {"lora_name": name, "lora_path": f"/adapters/{name}"}
            answer = await http.post("/load_lora_adapter", json=body, headers=headers)
            assert answer.json()["loaded_adapters"] == {name: f"/adapters/{name}"}
        for headers, own, other in ((ALICE, "a", "b"), (BOB, "b", "a")):
            models = (await http.get("/v1/models", headers=headers)).json()["data"]
            assert [model["id"] for model in models] == ["org/fake", own]
            assert (await http.get(f"/v1/models/{own}", headers=headers)).status_code == 200
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/responses", {"input": "hi"}),
                ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "stream": False}),
            ):
                answer = await http.post(path, json=body | {"model": own}, headers=headers)
                assert answer.status_code == 200
                answer = await http.post(path, json=body | {"model": other}, headers=headers)
                assert answer.status_code == 404 and f" {own}" in answer.text
            assert (await http.get(f"/v1/models/{other}", headers=headers)).status_code == 404


async def test_the_administrator_loads_adapters_for_all_or_for_one() -> None:
    async with talking(FakeService(), keys()) as http:
        for name, more in (("all", {}), ("a", {"tenant": "alice"})):
            body = {"lora_name": name, "lora_path": f"/adapters/{name}"} | more
            assert (await http.post("/load_lora_adapter", json=body, headers=ADMIN)).status_code == 200
            assert (await http.post("/load_lora_adapter", json=body, headers=ALICE)).status_code == 401
        seen = {
            who["authorization"]: [
                model["id"] for model in (await http.get("/v1/models", headers=who)).json()["data"]
            ]
            for who in (ALICE, BOB, ADMIN)
        }
    assert list(seen.values()) == [["org/fake", "all", "a"], ["org/fake", "all"], ["org/fake", "all", "a"]]
    async with talking(FakeService(), Keys(NAMES)) as http:
        body = {"lora_name": "a", "lora_path": "/adapters/a", "tenant": "bob"}
        assert (await http.post("/load_lora_adapter", json=body, headers=ALICE)).status_code == 403


async def test_requests_of_others_cannot_be_aborted() -> None:
    async with running(max_running_requests=4, null_step_s=0.005) as core, talking(core, Keys(NAMES)) as http:
        async with anyio.create_task_group() as tasks:
            ends: dict[str, str] = {}

            async def ask(name: str, headers: dict[str, str]) -> None:
                body = {"input_ids": [1, 2], "rid": name, "sampling_params": {"max_new_tokens": 4000}}
                answer = await http.post("/generate", json=body, headers=headers)
                ends[name] = answer.json()["meta_info"]["finish_reason"]["type"]

            tasks.start_soon(ask, "r-alice", ALICE)
            tasks.start_soon(ask, "r-bob", BOB)
            await until(lambda: core.load().running == 2)
            aborted = [
                (await http.post("/abort_request", json=body, headers=BOB)).json()["aborted"]
                for body in ({"rid": "r-alice"}, {"rid": "r-"}, {"rid": "r-"}, {"abort_all": True})
            ]
            assert aborted[0] == 0 and aborted[1] == 1 and max(aborted) == 1
            await until(lambda: "r-bob" in ends)
            assert core.load().running == 1
            assert (await http.post("/abort_request", json={"rid": "r-a"}, headers=ALICE)).json() == {
                "aborted": 1
            }
        assert ends == {"r-alice": "abort", "r-bob": "abort"}


async def test_sessions_of_others_do_not_exist() -> None:
    async with running() as core, talking(core, keys()) as http:

        async def turn(headers: dict[str, str], **session: Any) -> int:
            body = {
                "input_ids": [1, 2],
                "sampling_params": {"max_new_tokens": 2},
                "session_params": {"id": "s"} | session,
            }
            return (await http.post("/generate", json=body, headers=headers)).status_code

        async def call(path: str, headers: dict[str, str], **body: Any) -> int:
            return (await http.post(path, json={"session_id": "s"} | body, headers=headers)).status_code

        assert await call("/open_session", ALICE, capacity_of_str_len=100) == 200
        assert await turn(ALICE) == 200
        assert [await turn(BOB), await call("/close_session", BOB)] == [404, 404]
        # nor does an id of another tenant stand in the way
        assert await call("/open_session", BOB, capacity_of_str_len=100) == 200
        assert await call("/open_session", BOB, capacity_of_str_len=100) == 400
        assert await call("/close_session", BOB) == 200
        assert [await turn(BOB), await turn(ALICE)] == [404, 200]
        assert [await turn(ADMIN), await call("/close_session", ADMIN)] == [200, 200]
        assert await turn(ALICE) == 404


async def test_one_tenant_takes_no_more_sessions_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.admin.sessions.MAX_SESSIONS", 8)
    async with running() as core, talking(core, keys(quota=0.25)) as http:
        statuses = {
            who["authorization"]: Counter(
                [
                    (
                        await http.post("/open_session", json={"capacity_of_str_len": 9}, headers=who)
                    ).status_code
                    for _ in range(5)
                ]
            )
            for who in (ALICE, BOB)
        }
    assert list(statuses.values()) == [{200: 2, 429: 3}] * 2


# ── shares ──────────────────────────────────────────────────────────────────────────────────────────────────


async def flood(
    http: httpx.AsyncClient, headers: Sequence[dict[str, str]], count: int, ends: list[str], **params: Any
) -> None:
    """`count` requests at once, their keys written in turns as in `headers`. Appends the end of each to
    `ends`."""

    async def ask(at: int) -> None:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 16} | params}
        who = headers[at % len(headers)]
        answer = await http.post("/generate", json=body, headers=who)
        ends.append(f"{who is BOB} {answer.status_code}")

    async with anyio.create_task_group() as tasks:
        for at in range(count):
            tasks.start_soon(ask, at)


async def test_one_key_in_many_forms_gets_one_share() -> None:
    """Two running places: had each spelling a share, the other tenant would wait for ten of eleven."""
    options = {"fair_share": "key", "max_running_requests": 2, "null_step_s": 0.002, "max_overtakes": 0}
    async with running(**options) as core, talking(core, keys()) as http:
        ends: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood, http, SPELLINGS, 60, ends)
            await until(lambda: core.load().running == 2 and core.load().waiting >= 50)
            tasks.start_soon(flood, http, [BOB], 10, ends)
        labels = re.findall(rb'runtime_tenant_tokens_total\{tenant="(.*?)"\}', core.metrics())
    assert Counter(ends) == {"False 200": 60, "True 200": 10}
    last = max(at for at, end in enumerate(ends) if end == "True 200")
    assert last < 30, "the tenant with few requests had half of the server while it wanted it"
    assert sorted(labels) == [b"alice", b"bob"]


async def test_one_tenant_fills_its_part_of_the_queue_only() -> None:
    options = {"max_running_requests": 1, "max_queued_requests": 8, "null_step_s": 0.002}
    async with running(**options) as core, talking(core, keys(quota=0.5)) as http:
        ends: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood, http, [ALICE], 20, ends)
            await until(lambda: core.load().running == 1 and len(ends) >= 14)
            tasks.start_soon(flood, http, [BOB], 2, ends)
        counts = Counter(ends)
        assert counts["True 200"] == 2 and counts["False 429"] >= 14
        assert b'runtime_refused_requests_total{status="429"}' in core.metrics()


async def test_isolated_tenants_find_their_own_prefixes_however_the_key_is_written() -> None:
    """Also without fair shares: tenants are the keys."""
    prompt = list(range(1, 200))
    async with running(isolate_tenants=True, api_key=("a", "b")) as core, talking(core, keys()) as http:
        cached = []
        for headers in (ALICE, {"x-api-key": "k-alice"}, BOB, BOB, ADMIN):
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
            answer = await http.post("/generate", json=body, headers=headers)
            cached.append(answer.json()["meta_info"]["cached_tokens"] > 0)
    assert cached == [False, True, False, True, False]
