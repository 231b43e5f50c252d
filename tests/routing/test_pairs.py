"""Which halves the router sends where, and what it does when one side lacks."""

import anyio
import pytest

from runtime.routing.pairs import PairSettings
from runtime.transfer.key import HEADER, check_proof, parse_header
from tests.routing.stand_in import Call, Router, Seen, StandIn, answer_ok, routed

pytestmark = pytest.mark.anyio

KEY = b"0123456789abcdef"
PAIRS = PairSettings(key=KEY)
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


async def seen(server: StandIn, count: int) -> list[Seen]:
    with anyio.fail_after(10):
        while len(server.seen) < count:
            await anyio.sleep(0.001)
    return server.seen


def answering(prompts: StandIn) -> StandIn:
    """A server that answers when the other one has as many requests."""

    async def answer(call: Call) -> None:
        await seen(prompts, len(server.seen))
        await answer_ok(call)

    server = StandIn(answer)
    return server


async def test_both_halves_have_the_same_room() -> None:
    prompts = StandIn(answer_ok)
    answers = answering(prompts)
    async with routed(answers, prefill=(prompts,), pairs=PAIRS) as router:
        for _ in range(2):
            answer = await router.post(headers={HEADER: "what a client says", "x-own": "1"})
            assert (answer.status_code, answer.content) == (200, b"{}")
        halves = zip(await seen(prompts, 2), await seen(answers, 2), strict=True)
    rooms = set()
    for first, second in halves:
        assert first.body == second.body == b'{"prompt":"x"}' and first.headers["x-own"] == "1"
        here, there = (parse_header(half.headers[HEADER]) for half in (first, second))
        check_proof(KEY, here)
        check_proof(KEY, there)
        assert here.room == there.room and here.source == "" and there.source == "127.0.0.1:9000"
        rooms.add(here.room)
    assert len(rooms) == 2


async def test_what_generates_nothing_is_whole() -> None:
    prompts, answers = StandIn(answer_ok), StandIn(answer_ok)
    async with routed(answers, prefill=(prompts,), pairs=PAIRS) as router:
        assert (await router.post("/v1/embeddings")).status_code == 200
        assert (await router.client.get("/v1/anything")).status_code == 200
        assert HEADER not in answers.seen[0].headers and not prompts.seen


async def test_short_prompts_are_whole() -> None:
    prompts = StandIn(answer_ok)
    answers = answering(prompts)
    settings = PairSettings(key=KEY, local_prompt_bytes=10)
    async with routed(answers, prefill=(prompts,), pairs=settings) as router:
        await router.post(json={"prompt": "a long one"})
        answers.handler = answer_ok
        await router.post(json={"prompt": "short"})
        assert [HEADER in one.headers for one in answers.seen] == [True, False]
        assert len(prompts.seen) == 1


async def answers_alone(router: Router, server: StandIn) -> None:
    answer = await router.post()
    assert (answer.status_code, answer.content) == (200, b"{}")
    assert HEADER not in server.seen[-1].headers


async def test_servers_of_one_kind_do_all() -> None:
    prompts, answers, ill = StandIn(answer_ok), StandIn(answer_ok), StandIn(answer_ok)
    ill.health = BUSY
    async with routed(answers, prefill=(ill,), pairs=PAIRS) as router:
        await answers_alone(router, answers)
    async with routed(ill, prefill=(prompts,), pairs=PAIRS) as router:
        await answers_alone(router, prompts)


async def test_a_prompt_that_fails_is_no_error() -> None:
    async def fail(call: Call) -> None:
        call.cut()

    for broken in (fail, lambda call: call.send(BUSY)):
        prompts, answers = StandIn(broken), StandIn(answer_ok)
        async with routed(answers, prefill=(prompts,), pairs=PAIRS) as router:
            assert (await router.post()).status_code == 200


async def test_an_answer_goes_to_another_server_with_its_room() -> None:
    prompts, busy, answers = StandIn(answer_ok), StandIn(lambda call: call.send(BUSY)), StandIn(answer_ok)
    async with routed(busy, answers, prefill=(prompts,), pairs=PAIRS) as router:
        assert (await router.post()).status_code == 200
        assert busy.seen[0].headers[HEADER] == answers.seen[0].headers[HEADER]


async def test_a_prompt_ends_with_its_client() -> None:
    gone = anyio.Event()

    async def hang(call: Call) -> None:
        await call.wait_gone()
        gone.set()

    prompts, answers = StandIn(hang), StandIn(hang)
    async with routed(answers, prefill=(prompts,), pairs=PAIRS) as router:
        with anyio.move_on_after(0.3):
            await router.post()
        with anyio.fail_after(10):
            await gone.wait()


async def test_servers_come_and_go() -> None:
    prompts, answers = StandIn(answer_ok), StandIn(answer_ok)
    async with routed(answers, prefill=(prompts,), pairs=PAIRS) as router:
        listed = (await router.client.get("/workers")).json()["workers"]
        kinds = {one["url"]: (one["worker_type"], one.get("bootstrap_port")) for one in listed}
        assert kinds == {prompts.url: ("prefill", 9000), answers.url: ("decode", None)}
        for body in ({}, {"worker_type": "prefill"}, {"worker_type": "other", "bootstrap_port": 1}):
            refused = await router.client.post("/workers", json={"url": "http://127.0.0.1:1", **body})
            assert refused.status_code == 400 and "worker_type" in refused.text
        added = {"url": "http://127.0.0.1:1", "worker_type": "prefill", "bootstrap_port": 9}
        assert len((await router.client.post("/workers", json=added)).json()["workers"]) == 3
        removed = await router.client.request("DELETE", "/workers", json={"url": prompts.url})
        assert len(removed.json()["workers"]) == 2
        await answers_alone(router, answers)
