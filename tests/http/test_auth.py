"""Keys, ids, origins of pages, prefixes of proxies: what every route does before it does anything."""

import json
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from runtime.http.app import _routes, http_app
from runtime.http.auth import ADMIN, OPEN, Keys, level_of, with_key_checks
from runtime.http.openai.stored_objects import no_storage
from runtime.http.settings import DEFAULT, HttpSettings
from runtime.options.groups.http import is_loopback
from tests.http.fake import FakeService
from tests.http.serving import Raw, serving

pytestmark = pytest.mark.anyio

BODY = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"text": "hi"},
    "/tokenize": {"prompt": "hi"},
}
NONE: dict[str, str] = {}


def client(settings: HttpSettings, service: FakeService | None = None, **more: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(http_app(service or FakeService(), settings), **more)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def plain_routes() -> list[tuple[str, str]]:
    """(method, declared path) of every route that there is."""
    found = []
    for route in [*_routes(FakeService(), DEFAULT), *no_storage()]:
        if isinstance(route, WebSocketRoute):
            continue
        assert isinstance(route, Route) and route.methods
        found += [(method, route.path) for method in sorted(route.methods - {"HEAD"})]
    return found


@pytest.mark.parametrize(("method", "path"), plain_routes())
async def test_every_route_asks_for_its_key(method: str, path: str) -> None:
    """Also those that are added later: a new one is a user's route unless it is listed."""
    level, path = level_of(path), re.sub("{.*?}", "x", path)
    async with client(HttpSettings(keys=Keys(("one", "two"), "admin"))) as http:
        answers = {
            name: (await http.request(method, path, headers=headers)).status_code
            for name, headers in {
                "none": NONE,
                "user": bearer("two"),
                "admin": bearer("admin"),
                "wrong": bearer("x"),
            }.items()
        }
    if level == "open":
        assert 401 not in answers.values()
    else:
        assert answers["none"] == answers["wrong"] == 401
        assert (answers["user"] == 401) == (level == "admin") and answers["admin"] != 401


def test_the_lists_name_what_is_there() -> None:
    paths = {path for _, path in plain_routes()}
    assert paths >= OPEN
    assert {"/flush_cache", "/pause_generation", "/abort_request", "/open_requests"} <= ADMIN & paths


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        (bearer("one"), True),
        ({"authorization": "bearer one"}, True),
        ({"x-api-key": "one"}, True),
        ({"x-api-key": "two"}, True),
        ({"authorization": "Bearer  two "}, True),
        ({"authorization": "Basic x", "x-api-key": "one"}, True),
        (NONE, False),
        (bearer("on"), False),
        (bearer("onee"), False),
        (bearer(""), False),
        ({"authorization": "one"}, False),
        ({"authorization": "Basic one"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "Bearer one"}, False),
        ({"api-key": "one"}, False),
        ({"authorization": b"Bearer \xff\xfe"}, False),
        ({"cookie": "one"}, False),
    ],
)
async def test_how_a_key_comes(headers: dict[str, Any], is_let_in: bool) -> None:
    service = FakeService()
    async with client(HttpSettings(keys=Keys(("one", "two"))), service) as http:
        for path, body in BODY.items():
            answer = await http.post(path, headers=headers, json=body)
            assert answer.status_code == (200 if is_let_in else 401)
            if not is_let_in:
                error = answer.json()["error"]
                assert (error["type"], error["code"], error["param"]) == (
                    "authentication_error",
                    "invalid_api_key",
                    None,
                )
                assert answer.headers["www-authenticate"] == "Bearer"
    assert bool(service.requests) == is_let_in


# keys, is_local, what each level answers without a key and with the user's: let in, 401 or 403
@pytest.mark.parametrize(
    ("keys", "user", "admin"),
    [
        (Keys(), (200, 200), (200, 200)),
        (Keys(is_local=False), (200, 200), (403, 403)),
        (Keys(("k",)), (401, 200), (401, 200)),
        (Keys(("k",), is_local=False), (401, 200), (403, 403)),
        (Keys((), "a"), (200, 200), (401, 401)),
        (Keys((), "a", is_local=False), (200, 200), (401, 401)),
        (Keys(("k",), "a"), (401, 200), (401, 401)),
    ],
)
async def test_who_may_do_what(keys: Keys, user: tuple[int, int], admin: tuple[int, int]) -> None:
    async with client(HttpSettings(keys=keys)) as http:
        for headers, for_user, for_admin in zip((NONE, bearer("k")), user, admin, strict=True):
            assert (await http.get("/health", headers=headers)).status_code == 200
            assert (await http.get("/v1/models", headers=headers)).status_code == for_user
            answer = await http.post("/flush_cache", headers=headers)
            assert answer.status_code == for_admin
            if for_admin == 403:
                assert (
                    answer.json()["error"]["code"] == "forbidden"
                    and "--admin-api-key" in answer.json()["error"]["message"]
                )


async def test_pages_of_other_sites_give_no_orders() -> None:
    """A browser sends forms anywhere without asking, and this machine is somewhere."""
    for keys, headers, status in (
        (Keys(), {"sec-fetch-site": "cross-site"}, 403),
        (Keys(), {"sec-fetch-site": "same-origin"}, 200),
        (Keys((), "a"), {"sec-fetch-site": "cross-site"} | bearer("a"), 200),
    ):
        async with client(HttpSettings(keys=keys)) as http:
            assert (await http.post("/flush_cache", headers=headers)).status_code == status
            assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_paths_spelt_otherwise_open_nothing() -> None:
    async with client(HttpSettings(keys=Keys(("k",), "a"))) as http:
        for path in (
            "//flush_cache",
            "/flush_cache/",
            "/x/../flush_cache",
            "/%66lush_cache",
            "/FLUSH_CACHE",
            "/health/../flush_cache",
            "/health%2f..%2fflush_cache",
            "/./flush_cache",
            "/flush_cache;x",
            "/health/x",
        ):
            assert (await http.post(path)).status_code in (401, 404, 405, 307), path
    mounted = Starlette(routes=[Mount("/health", http_app(FakeService(), HttpSettings(keys=Keys(("k",)))))])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(mounted), base_url="http://test") as http:
        assert (await http.get("/health/v1/models")).status_code == 401 and (
            await http.get("/health/health")
        ).status_code == 200


async def test_a_refused_body_is_read_and_thrown_away() -> None:
    """Else the client's write fails, and it never reads why."""
    async with (
        serving(http_app(FakeService(), HttpSettings(keys=Keys(("k",))))) as address,
        Raw.connected(address) as raw,
    ):
        await raw.send("/generate", b"x" * 1_000_000)
        assert b" 401 " in await raw.until(b"\r\n")
        assert b"invalid_api_key" in await raw.until(b"}}")


async def test_websockets_are_authenticated_too() -> None:
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()

    (route,) = with_key_checks([WebSocketRoute("/v1/realtime", talk)], Keys(("k",)))
    for key, kinds in ((b"wrong", ["websocket.close"]), (b"k", ["websocket.accept"])):
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "headers": [(b"x-api-key", key)],
            "subprotocols": [],
        }
        await route.app(scope, receive, send)  # type: ignore[attr-defined]
        assert [message["type"] for message in sent] == kinds


@pytest.mark.parametrize(
    ("host", "is_so"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("*", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("fe80::1%eth0", False),
    ],
)
def test_what_is_this_machine_alone(host: str, is_so: bool) -> None:
    assert is_loopback(host) == is_so


def test_keys_are_not_printed() -> None:
    assert "s3cret" not in repr(HttpSettings(keys=Keys(("s3cret",), "s3cret")))


async def test_every_answer_has_an_id() -> None:
    async with client(DEFAULT, raise_app_exceptions=False) as http:
        for path in ("/health", "/nothing", "/v1/models"):
            assert (await http.get(path, headers={"x-request-id": "mine-1"})).headers[
                "x-request-id"
            ] == "mine-1"
        ours = {
            (await http.get("/health", headers=headers)).headers["x-request-id"]
            for headers in (
                NONE,
                NONE,
                {"x-request-id": ""},
                {"x-request-id": "x" * 500},
                {"x-request-id": "a b"},
            )
        }
        assert len(ours) == 5 and all(len(id) == 32 for id in ours)
        for stream in (False, True):
            answer = await http.post(
                "/v1/completions", json={"prompt": "hi", "stream": stream}, headers={"x-request-id": "s"}
            )
            assert answer.headers.get_list("x-request-id") == ["s"]


async def test_streams_of_our_own_server_have_an_id() -> None:
    async with serving(FakeService()) as (host, port), httpx.AsyncClient() as http:
        answer = await http.post(
            f"http://{host}:{port}/v1/completions",
            json={"prompt": "hi", "stream": True},
            headers={"x-request-id": "s"},
        )
        assert answer.headers.get_list("x-request-id") == ["s"] and answer.text.endswith("data: [DONE]\n\n")


async def test_pages_of_other_origins_are_refused_unless_named() -> None:
    page = {"origin": "https://page.example"}
    ask = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with client(HttpSettings(keys=Keys(("k",)))) as http:
        assert (
            "access-control-allow-origin"
            not in (await http.get("/v1/models", headers=page | bearer("k"))).headers
        )
        assert (await http.options("/v1/chat/completions", headers=ask)).status_code == 405
    async with client(HttpSettings(keys=Keys(("k",)), cors_origins=("https://page.example",))) as http:
        before = await http.options("/v1/chat/completions", headers=ask)  # browsers send no key with this
        assert (
            before.status_code == 200
            and before.headers["access-control-allow-origin"] == "https://page.example"
        )
        assert before.headers["access-control-allow-headers"]
        answer = await http.get("/v1/models", headers=page | bearer("k"))
        assert (
            answer.headers["access-control-allow-origin"] == "https://page.example"
            and "x-request-id" in answer.headers
        )
        refused = await http.get("/v1/models", headers=page)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"], (
            "the page may read why"
        )
        other = await http.get("/v1/models", headers={"origin": "https://other.example"} | bearer("k"))
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("strips", [False, True])
async def test_a_proxy_serves_us_under_a_prefix(strips: bool) -> None:
    async with serving(FakeService(), root_path="/llm") as (host, port), httpx.AsyncClient() as http:
        prefix = "" if strips else "/llm"
        answer = await http.post(f"http://{host}:{port}{prefix}/generate", json={"text": "hi"})
        assert answer.status_code == 200 and json.loads(answer.text)["text"]
        assert (await http.get(f"http://{host}:{port}{prefix}/health")).status_code == 200


async def test_a_body_that_stops_is_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.http.body.MAX_PAUSE_S", 0.01)
    async with serving(FakeService()) as address, Raw.connected(address) as raw:
        await raw.send("/generate", b'{"text": ', declared=100)
        assert b" 408 " in await raw.until(b"\r\n")
        assert b"request_timeout" in await raw.until(b"}}")
