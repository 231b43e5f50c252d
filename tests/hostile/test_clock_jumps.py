"""The wall clock jumps by hours while requests run, wait and time out: none of them notices."""

import datetime
import http.client
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.errors import Unavailable
from tests.actors.test_supervisor import NULL, answer, kill, settled
from tests.hostile.jumping_clock import JumpingClock
from tests.hostile.target import Target, target

pytestmark = pytest.mark.anyio
HOURS = 3600.0


@pytest.mark.parametrize("jump_s", [30 * HOURS, -30 * HOURS], ids=["forward", "back"])
async def test_requests_and_ranks_do_not_notice(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, jumped = time.time, 0.0

    class Jumping(datetime.datetime):
        """A datetime whose now() follows the patched clock."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(now() + jumped, tz)

    monkeypatch.setattr(time, "time", lambda: now() + jumped)
    monkeypatch.setattr(datetime, "datetime", Jumping)
    options: dict[str, Any] = {"request_timeout": 60, "queue_timeout": 60, "watchdog_timeout": 60}
    async with Engine(**NULL, null_step_s=0.002, max_running_requests=2, **options) as engine:
        answers: dict[int, list[int]] = {}

        async def one(seed: int) -> None:
            done = await engine.generate([seed], seed=seed, max_new_tokens=60, ignore_eos=True)
            answers[seed] = done.token_ids

        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                for seed in range(6):  # two run, four wait
                    tasks.start_soon(one, seed)
                while len(answers) < 2:
                    await anyio.sleep(0.002)
                jumped = jump_s
                kill(engine)
                await settled(engine, "recovering")
                await settled(engine)
                jumped = 0.0
        assert answers == {seed: answer([seed], seed, 60) for seed in range(6)}
        assert engine._core.replicas[0].supervisor.generation == 2


def date(server: Target) -> float:
    """The server's date, in seconds since 1970."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", "/health")
        return parsedate_to_datetime(connection.getresponse().headers["date"]).timestamp()
    finally:
        connection.close()


def test_a_server_can_have_a_clock_of_its_own(tmp_path: Path) -> None:
    """As bench.soak uses it: hours ahead, hours behind, right again."""
    clock = JumpingClock(tmp_path / "clock")
    with target(tmp_path, "--device", "null", clock=clock) as server:
        for ahead_s in (5 * HOURS, -5 * HOURS, 0.0):
            clock.set_ahead(ahead_s)
            assert abs(date(server) - time.time() - ahead_s) < HOURS


async def test_a_time_limit_is_kept_when_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    async with Engine(**NULL, null_step_s=0.002, max_running_requests=1, queue_timeout=0.3) as engine:
        stream = engine.stream([1], max_new_tokens=5000, ignore_eos=True)
        await anext(stream)
        monkeypatch.setattr(time, "time", lambda: now() - 30 * HOURS)
        with anyio.fail_after(30), pytest.raises(Unavailable):
            await engine.generate([2], max_new_tokens=2)
        await stream.aclose()
