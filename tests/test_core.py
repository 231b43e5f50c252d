"""The runtime without HTTP, on the null device: when it refuses requests, what it reports about itself."""

import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import anyio
import pytest

from runtime import log
from runtime.core import Core
from runtime.errors import OptionsError, Overloaded, Unavailable
from runtime.messages.requests import GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from tests.actors.sink import ListSink

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Core]:
    core = Core(plan_for(from_values({"device": "null", **options})))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(core.run)
        await core.wait_ready()
        yield core
        tasks.cancel_scope.cancel()


def ask(core: Core, name: str, **params: Any) -> ListSink:
    sink = ListSink()
    core.submit(
        GenerateRequest(
            id=name, prompt=Tokens([1, 2, 3]), params=SamplingParams(**params), arrival_s=monotonic()
        ),
        sink,
    )
    return sink


async def until(is_so: Any) -> None:
    with anyio.fail_after(30):
        while not is_so():
            await anyio.sleep(0)


async def test_a_full_queue_refuses_and_says_so() -> None:
    async with running(max_running_requests=1, max_queued_requests=1, null_step_s=0.01) as core:
        first = ask(core, "runs", max_new_tokens=50)
        await until(lambda: core.load().running == 1)
        second = ask(core, "waits", max_new_tokens=1)
        with pytest.raises(Overloaded, match="--max-queued-requests"):
            ask(core, "refused")
        await until(lambda: second.finishes)
        assert len(first.token_ids()) == 50
        assert b'runtime_refused_requests_total{status="429"} 1' in core.metrics()


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged."""
    stream = io.StringIO()
    log.setup("info", "json", stream)
    yield stream
    log.silence()


async def test_warm_ups_come_before_ready(lines: io.StringIO) -> None:
    """The null device refuses grammars: that one fails, and the server serves."""
    async with running(warmups="generate, prefill,grammar") as core:
        assert core.health().state == "ready" and core.load().steps >= 3 and not core.load().running
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["event"], line["name"]) for line in logged if "name" in line] == [
        ("warm", "generate"),
        ("warm", "prefill"),
        ("a warm-up failed", "grammar"),
    ]
    with pytest.raises(OptionsError, match="generate, prefill, grammar"):
        Core(plan_for(from_values({"device": "null", "warmups": "generate,all"})))


async def test_draining_lets_the_open_ones_end_and_no_request_in() -> None:
    async with running(null_step_s=0.001) as core:
        sink = ask(core, "open", max_new_tokens=30)
        await core.drain(30)
        assert len(sink.token_ids()) == 30 and sink.finishes
        assert core.health().state == "draining"
        with pytest.raises(Unavailable):
            ask(core, "late")


async def test_a_drain_that_takes_too_long_ends_the_rest() -> None:
    async with running(null_step_s=0.01) as core:
        sink = ask(core, "open", max_new_tokens=1000)
        await core.drain(0.05)
        assert [error.status for error in sink.errors] == [503]


async def test_counters_count_each_request_once() -> None:
    async with running() as core:
        sinks = [ask(core, f"r{i}", max_new_tokens=4, n=2) for i in range(10)]
        await until(lambda: all(len(sink.finishes) == 2 for sink in sinks))
        text = core.metrics().decode()
        for line in (
            "runtime_requests_total 10",
            "runtime_generated_tokens_total 80",
            'runtime_finished_sequences_total{reason="length"} 20',
            "runtime_running_sequences 0",
            "runtime_time_to_first_token_seconds_count 20",
        ):
            assert f"\n{line}\n" in text
        json.dumps(core.server_info())


async def test_the_server_says_what_became_of_the_tokens_that_were_asked_for(lines: io.StringIO) -> None:
    async with running(max_total_tokens=99_999_999_999, max_running_requests=2) as core:
        option = core.server_info()["options"]["max_total_tokens"]
        load = core.load()
        became = f"--max-total-tokens 99999999999 became {load.total_pages * load.page_size}: "
        assert option["value"] == 99_999_999_999 and option["reason"].startswith(became)
    assert became in lines.getvalue()
