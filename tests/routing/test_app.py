"""What the router makes of requests, answers and failures, before stand-in servers."""

import json
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest

from runtime.routing.app import prompt_text
from tests.routing.stand_in import EVENTS, OK, WAIT_S, Call, StandIn, answer_ok, routed

pytestmark = pytest.mark.anyio


async def test_requests_go_on_as_they_came() -> None:
    server = StandIn(answer_ok)
    async with routed(server) as router:
        headers = {"authorization": "Bearer k", "x-own": "1", "connection": "keep-alive, x-hop", "x-hop": "2"}
        answer = await router.post("/v1/completions?a=b%20c", content=b'{"prompt": 1}', headers=headers)
        assert (answer.status_code, answer.content) == (200, b"{}")
        assert (await router.client.get("/v1/anything/%2F")).status_code == 200
    first, second = server.seen
    assert (first.method, first.target, first.body) == ("POST", "/v1/completions?a=b%20c", b'{"prompt": 1}')
    assert first.headers["authorization"] == "bearer k" and first.headers["x-own"] == "1"
    assert "x-hop" not in first.headers and first.headers["host"] == server.url.removeprefix("http://")
    assert second.target == "/v1/anything/%2F"


async def test_answers_to_head_have_no_body() -> None:
    server = StandIn(lambda call: call.send(OK.removesuffix(b"{}")))
    async with routed(server) as router:
        for _ in range(2):
            answer = await router.client.head("/v1/anything")
            assert (answer.status_code, answer.headers["content-length"]) == (200, "2")


async def test_connections_are_used_again() -> None:
    server = StandIn(answer_ok)
    async with routed(server) as router:
        for _ in range(5):
            assert (await router.post()).status_code == 200
        assert server.num_connections == 2, "one of health checks, one of requests"


async def test_streams_pass_as_they_come() -> None:
    more = anyio.Event()

    async def stream(call: Call) -> None:
        await call.send(EVENTS)
        await call.send_chunk(b"data: one\n\n")
        await more.wait()
        await call.send_chunk(b"data: two\n\n")
        await call.send(b"0\r\n\r\n")

    async with (
        routed(StandIn(stream)) as router,
        router.client.stream("POST", "/v1/completions", json={}) as answer,
    ):
        parts = answer.aiter_bytes()
        with anyio.fail_after(WAIT_S):
            assert await anext(parts) == b"data: one\n\n"
            more.set()
            assert b"".join([part async for part in parts]) == b"data: two\n\n"


async def test_a_client_that_leaves_ends_its_request() -> None:
    gone = anyio.Event()

    async def stream(call: Call) -> None:
        await call.send(EVENTS)
        await call.send_chunk(b"data: one\n\n")
        await call.wait_gone()
        gone.set()

    async with routed(StandIn(stream)) as router:
        async with router.client.stream("POST", "/v1/completions", json={}) as answer:
            await anext(answer.aiter_bytes())
            assert router.workers.healthy[0].load == 1
        with anyio.fail_after(WAIT_S):
            await gone.wait()
            while router.workers.healthy[0].load:
                await anyio.sleep(0.005)


async def test_a_slow_client_slows_its_stream() -> None:
    sent = 0

    async def flood(call: Call) -> None:
        nonlocal sent
        await call.send(EVENTS)
        while True:
            await call.send_chunk(b"x" * 65536)
            sent += 65536

    async with (
        routed(StandIn(flood)) as router,
        router.client.stream("POST", "/v1/completions", json={}) as answer,
    ):
        await anext(answer.aiter_bytes())
        before = -1
        while before != sent:  # until nothing more is taken
            before = sent
            await anyio.sleep(0.3)
        assert sent < 64 * 2**20, "buffers of sockets alone"


async def test_what_fails_before_its_first_byte_is_sent_to_another_server() -> None:
    async def cut(call: Call) -> None:
        call.cut()

    broken, good = StandIn(cut), StandIn(answer_ok)
    async with routed(broken, good) as router:
        broken.health = OK.replace(b"200 OK", b"503 No")
        assert [(await router.post()).status_code for _ in range(2)] == [200] * 2
        assert len(broken.seen) == router.workers.num_retries == 2 and len(good.seen) == 2
        # what a server keeps for its client is not sent twice
        answers = [await router.post("/v1/files") for _ in range(2)]
        assert sorted(one.status_code for one in answers) == [200, 503]
        assert "failed before it answered" in next(one for one in answers if one.status_code == 503).text
        assert len(router.workers.healthy) == 1, "three failures in a row eject a server"
        assert [(await router.post()).status_code for _ in range(2)] == [200] * 2
        assert len(broken.seen) == 3


async def test_a_server_that_is_busy_is_left_for_another() -> None:
    busy = StandIn(lambda call: call.send(OK.replace(b"200 OK", b"503 Busy")))
    async with routed(busy, StandIn(answer_ok)) as router:
        assert [(await router.post()).status_code for _ in range(4)] == [200] * 4
    async with routed(StandIn(busy.handler)) as router:
        answer = await router.post()
        assert (answer.status_code, answer.content) == (503, b"{}"), "its own answer, where there is no other"


async def test_a_server_that_has_gone_is_ejected_and_comes_back() -> None:
    first, second = StandIn(answer_ok), StandIn(answer_ok)
    async with routed(first, second, health_check_interval_secs=0.05, health_failure_threshold=2) as router:
        first.health = OK.replace(b"200 OK", b"503 No")
        with anyio.fail_after(WAIT_S):
            while len(router.workers.healthy) == 2:
                await anyio.sleep(0.005)
        assert (await router.client.get("/health")).json() == {"healthy_workers": 1, "workers": 2}
        assert [(await router.post()).status_code for _ in range(4)] == [200] * 4
        assert (len(first.seen), len(second.seen)) == (0, 4)
        first.health = OK
        with anyio.fail_after(WAIT_S):
            while len(router.workers.healthy) == 1:
                await anyio.sleep(0.005)
        assert [(await router.post()).status_code for _ in range(2)] == [200] * 2
        assert len(first.seen) == 1


async def test_without_servers_there_is_an_error_of_the_apis_form() -> None:
    async with routed() as router:
        for path, read in (
            ("/v1/completions", lambda body: body["error"]["message"]),
            ("/v1/messages", lambda body: body["error"]["message"]),
            ("/api/chat", lambda body: body["error"]),
        ):
            answer = await router.post(path)
            assert answer.status_code == 503 and "none of 0 servers" in read(answer.json())
        assert (await router.client.get("/health")).status_code == 503


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(path: str) -> None:
    async def stream(call: Call) -> None:
        await call.send(EVENTS)
        await call.send_chunk(b"data: one\n\n")
        call.cut()

    async with routed(StandIn(stream), StandIn(stream)) as router:
        answer = await router.post(path)
        assert answer.text.startswith("data: one\n\n")
        event = json.loads(answer.text.rpartition("data: ")[2])
        assert "failed while it answered" in event["error"]["message"]
        assert ("event: error" in answer.text) == (path == "/v1/messages")


async def test_any_other_answer_that_breaks_off_is_cut() -> None:
    async def half(call: Call) -> None:
        await call.send(OK.replace(b"length: 2", b"length: 9"))
        call.cut()

    async with routed(StandIn(half)) as router:
        with pytest.raises(httpx.RemoteProtocolError):
            await router.post()


async def test_what_is_no_http_is_an_error() -> None:
    for bad in (b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000):
        async with routed(StandIn(lambda call, bad=bad: call.send(bad))) as router:
            assert (await router.post()).status_code == 503


async def test_a_silent_server_is_given_up() -> None:
    silent, good = StandIn(Call.wait_gone), StandIn(answer_ok)
    async with routed(silent, good, request_timeout_secs=0.2) as router:
        assert [(await router.post()).status_code for _ in range(2)] == [200, 200]
        assert len(silent.seen) >= 1


async def test_large_bodies_are_refused() -> None:
    async with routed(StandIn(answer_ok), max_payload_size=100) as router:
        assert (await router.post(content=b"x" * 101)).status_code == 413
        assert (await router.post(content=b"x" * 100)).status_code == 200

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(11):
                yield b"x" * 10

        assert (await router.post(content=parts())).status_code == 413


async def test_models_of_all_servers_are_listed_once() -> None:
    def models(*names: str) -> StandIn:
        body = json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
        return StandIn(lambda call: call.send(head + body))

    denied = StandIn(lambda call: call.send(OK.replace(b"200 OK", b"401 No")))
    async with routed(models("a", "b"), models("b", "c"), denied, StandIn(Call.wait_gone)) as router:
        router.workers.settings = type(router.workers.settings)(health_check_timeout_secs=0.2)
        listed = (await router.client.get("/v1/models", headers={"authorization": "Bearer k"})).json()
        assert [one["id"] for one in listed["data"]] == ["a", "b", "c"]
        assert denied.seen[0].headers["authorization"] == "bearer k"
    async with routed(StandIn(denied.handler)) as router:
        assert (await router.client.get("/v1/models")).status_code == 401


async def test_servers_come_and_go() -> None:
    other = StandIn(answer_ok)
    async with other.run(), routed(StandIn(answer_ok), health_check_interval_secs=0.05) as router:
        client = router.client
        added = await client.post("/workers", json={"url": other.url + "/"})
        assert added.status_code == 200 and added.json()["workers"][1]["url"] == other.url
        with anyio.fail_after(WAIT_S):
            while len(router.workers.healthy) < 2:
                await anyio.sleep(0.005)
        assert (await router.post()).status_code == (await router.post()).status_code == 200
        assert len(other.seen) == 1
        gone = await client.request("DELETE", "/workers", json={"url": other.url})
        assert [one["load"] for one in gone.json()["workers"]] == [0]
        assert (await client.request("DELETE", "/workers", json={"url": other.url})).status_code == 404
        for body in (b"{", b"{}", b'{"url": "x"}', b'{"url": "http://x", "more": 1}'):
            headers = {"content-type": "application/json"}
            assert (await client.post("/workers", content=body, headers=headers)).status_code == 400
        assert (await client.post("/workers", content=b"{}")).status_code == 400, "a form of a web page"


async def test_the_admin_key_guards_servers() -> None:
    async with routed(StandIn(answer_ok), admin_key="secret") as router:
        assert (await router.client.get("/workers")).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await router.client.get("/workers", headers=headers)).status_code == 200
        assert (await router.post()).status_code == 200, "other routes are the servers' to guard"
    async with routed(StandIn(answer_ok), is_local=False) as router:
        assert (await router.client.get("/workers")).status_code == 403


async def test_metrics_count() -> None:
    async with routed(StandIn(answer_ok)) as router:
        await router.post()
        lines = (await router.client.get("/metrics")).text.splitlines()
        (url,) = router.workers.by_url
        assert f'runtime_route_requests_total{{worker="{url}"}} 1' in lines
        assert f'runtime_route_worker_health{{worker="{url}"}} 1' in lines
        assert "runtime_route_retries_total 0" in lines


def test_the_prompt_of_a_body() -> None:
    body = b'{"model": "m", "messages": [1, 2], "temperature": 0, "system": "s"}'
    assert prompt_text(body) == b'"s"[1, 2]'
    assert prompt_text(b"[" * 100_000) == b"[" * 100_000
    assert prompt_text(b"no JSON") == b"no JSON"
    large = b'{"model": "' + b"m" * 2**20 + b'", "prompt": 1}'
    assert prompt_text(large) == large, "too large to be looked into while others wait"
