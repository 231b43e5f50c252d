"""Ranks whose processes start before the server: they load early, serve, and end where a start is refused."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime.actors.early_ranks import open_early
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.ranks import Ranks
from runtime.core import Core
from runtime.errors import ModelError
from runtime.messages.ranks import ProcessSetup
from runtime.options.parse import from_values
from runtime.options.plan import Plan
from runtime.options.resolve import plan_for
from tests.actors.test_ranks import PATIENCE_S, is_gone, nothing_left
from tests.devices.plans import start_null
from tests.models.make import make_checkpoint

pytestmark = pytest.mark.anyio
__all__ = ["nothing_left"]


def plan(**options: Any) -> Plan:
    return plan_for(from_values({"device": "null", **options}))


async def test_the_first_ranks_of_a_core_are_those_that_were_opened() -> None:
    processes = open_early(plan())
    assert processes is not None
    core = Core(plan(), processes=processes)
    assert processes.has_start  # before `run`
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(core.run)
            await core.wait_ready()
            supervisor = core.replicas[0].supervisor
            assert supervisor.ranks.pids == [rank.process.pid for rank in processes.ranks]
            assert supervisor.generation == 1
            tasks.cancel_scope.cancel()
    assert all(is_gone(rank.process.pid) for rank in processes.ranks)
    processes.kill()  # does nothing any more


@pytest.mark.usefixtures("nothing_left")
async def test_they_end_with_a_start_that_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    refused = plan(model_path=str(folder))
    processes = open_early(refused)
    assert processes is not None
    with pytest.raises(ModelError, match="tokenizer"):
        Core(refused, processes=processes)
    assert processes.has_start  # the tokenizer is read last
    processes.kill()
    assert all(is_gone(rank.process.pid) for rank in processes.ranks)


@pytest.mark.usefixtures("nothing_left")
async def test_ranks_that_wait_get_their_setup_when_they_start() -> None:
    """With adapters, checksums or downloads ranks load when these are there; two ranks meet."""
    processes = RankProcesses(ProcessSetup(device="null", num_ranks=2, num_threads=None), 1, imports=True)
    ranks = Ranks(start_null(tp_size=2), processes=processes)
    with anyio.fail_after(PATIENCE_S):
        assert [ready.rank for ready in await ranks.start(lambda progress: None)] == [0, 1]
    await ranks.stop()


def test_host_memory_is_inherited_so_its_ranks_start_later() -> None:
    assert open_early(plan(enable_hierarchical_cache=True)) is None
