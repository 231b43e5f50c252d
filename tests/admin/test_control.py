"""Control of a running runtime on the null device."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from runtime.actors.channels import Channel
from runtime.admin.scheduler_commands import SchedulerCommands
from runtime.errors import Busy, InvalidRequest, Unavailable
from runtime.messages.ranks import Profile
from runtime.messages.requests import FinishReason
from runtime.messages.scheduler import Flush, ToScheduler
from tests.test_core import ask, running, until

pytestmark = pytest.mark.anyio


async def test_pause_and_go_on() -> None:
    async with running(null_step_s=0.002) as core:
        first = ask(core, "first", max_new_tokens=40)
        await until(lambda: len(first.token_ids()) > 3)
        await core.control.pause("in_place")
        assert core.health().state == "paused" and core.load().running == 1
        had = len(first.token_ids())
        late = ask(core, "late", max_new_tokens=5)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(Busy, match="retract"):
            await core.control.flush()
        await core.control.pause("retract")
        assert core.load().waiting_tokens >= 3 + had + 3  # with what `first` got since
        assert core.load().running == 0 and await core.control.flush() >= 0
        # the last step was on its way to the sink
        assert not first.finishes and len(first.token_ids()) - had <= 2 and not late.deltas
        await core.control.resume()
        await until(lambda: first.finishes and late.finishes)
        assert core.health().state == "ready"
        undisturbed = ask(core, "again", max_new_tokens=40, seed=1)
        twin = ask(core, "twin", max_new_tokens=40, seed=1)
        await until(lambda: undisturbed.finishes and twin.finishes)
        assert len(first.token_ids()) == 40 and undisturbed.token_ids() == twin.token_ids()


async def test_clients_receive_an_abort_by_another_client() -> None:
    async with running(null_step_s=0.002, max_running_requests=2) as core:
        sinks = [ask(core, name, max_new_tokens=1000) for name in ("a-1", "a-2", "b-1", "a-3")]
        await until(lambda: len(sinks[1].token_ids()) > 2)
        total, rows = core.control.open_requests(3)
        assert total == 4 and [row.rid for row in rows] == ["a-1", "a-2", "b-1"]
        assert [row.state for row in rows] == ["running", "running", "waiting"]
        assert rows[1].completion_tokens > 2 and rows[1].max_completion_tokens == 1000
        assert rows[2].completion_tokens == 0 and all(row.prompt_tokens for row in rows)
        assert all(row.age_s is not None and row.age_s >= 0 for row in rows)
        assert core.control.abort("a-") == 3
        await until(lambda: all(sinks[i].finishes for i in (0, 1, 3)))
        assert [sinks[i].finishes[0].reason for i in (0, 1, 3)] == [FinishReason.ABORT] * 3
        assert len(sinks[0].token_ids()) > 2 and not sinks[3].token_ids() and not sinks[2].finishes
        assert b"runtime_aborted_requests_total 3" in core.metrics()
        assert core.control.abort("") == 1 and core.control.abort("nobody") == 0
        await until(lambda: sinks[2].finishes)


async def test_a_request_that_is_not_scheduled_yet_is_aborted_too() -> None:
    async with running() as core:
        sink = ask(core, "fresh", max_new_tokens=10)
        assert core.control.abort("fresh") == 1
        assert [error.status for error in sink.errors] == [400]  # 503 would invite clients to try again
        after = ask(core, "fresh", max_new_tokens=3)
        await until(lambda: after.finishes)
        await until(lambda: core.load().running == 0)


async def test_ranks_that_die_in_a_pause_come_again() -> None:
    async with running(null_step_s=0.002) as core:
        sink = ask(core, "lives", max_new_tokens=30)
        await until(lambda: len(sink.token_ids()) > 3)
        await core.control.pause("in_place")
        os.kill(core.replicas[0].supervisor.ranks.pids[0], signal.SIGKILL)
        await until(lambda: core.replicas[0].supervisor.generation == 2 and core.health().state == "paused")
        assert not sink.finishes
        await core.control.resume()
        await until(lambda: sink.finishes)
        assert len(sink.token_ids()) == 30 and not sink.errors


async def test_commands_that_wait_for_an_answer_get_the_error_at_the_end() -> None:
    replica: Any = SimpleNamespace(inbox=Channel[ToScheduler](1), scheduler=None)
    commands = SchedulerCommands([replica])
    with pytest.raises(Unavailable, match="loading"):
        await commands.ask(Flush)
    replica.scheduler = object()
    failures = []

    async def flush() -> None:
        with pytest.raises(Unavailable) as caught:
            await commands.ask(Flush)
        failures.append(caught.value.message)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flush)
        await anyio.wait_all_tasks_blocked()
        commands.close(Unavailable("over"))
    assert failures == ["over"] and replica.inbox.statistics.sent == 1
    with pytest.raises(Unavailable, match="over"):
        await commands.ask(Flush)
    replica.inbox.discard()


async def test_the_id_of_an_aborted_request_can_be_used_at_once() -> None:
    """Its first ask may still wait to be tokenised then."""
    async with running() as core:
        gone = ask(core, "same", max_new_tokens=9)
        core.abort("same")
        sink = ask(core, "same", max_new_tokens=3)
        await until(lambda: sink.finishes)
        assert len(sink.token_ids()) == 3 and not gone.deltas


@pytest.mark.parametrize("num_steps", [None, 3])
async def test_ranks_write_profiles(tmp_path: Path, num_steps: int | None) -> None:
    async with running(null_step_s=0.001) as core:
        folder = tmp_path / "new"
        assert core.control.start_profile(Profile(folder=str(folder), num_steps=num_steps)) == str(folder)
        sink = ask(core, "work", max_new_tokens=10)
        await until(lambda: sink.finishes)
        if num_steps is None:
            with pytest.raises(InvalidRequest, match="already"):
                core.control.start_profile(Profile())
            assert core.control.stop_profile() == str(folder)
        await until(
            lambda: (folder / "rank-0.txt").is_file() and "(launch)" in (folder / "rank-0.txt").read_text()
        )
        with pytest.raises(InvalidRequest, match="no profile"):
            core.control.stop_profile()


async def test_a_profile_that_cannot_be_written_harms_no_request() -> None:
    async with running() as core:
        core.control.start_profile(Profile(folder="/proc/nowhere"))
        core.control.stop_profile()
        sink = ask(core, "work", max_new_tokens=10)
        await until(lambda: sink.finishes)
        assert core.replicas[0].supervisor.generation == 1
