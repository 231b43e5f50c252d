"""How evenly tokens spread over experts: metrics, and the record of a running engine."""

from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
from safetensors.numpy import load_file

from runtime.admin import expert_load
from runtime.admin.expert_load import ExpertLoad
from runtime.errors import InvalidRequest, OptionsError, Unavailable
from runtime.messages.ranks import ExpertCounts, ExpertCountsAction
from runtime.metrics import Metrics
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from tests.models.make import make_checkpoint
from tests.test_core import ask, running, until

pytestmark = pytest.mark.anyio


class Ranks:
    """Two layers, four experts; the counts grow with each call."""

    def __init__(self) -> None:
        self.calls: list[ExpertCountsAction] = []
        self.counts = np.zeros(8, np.int64)
        self.fails = False

    async def count_experts(self, action: ExpertCountsAction, folder: str) -> ExpertCounts:
        self.calls.append(action)
        if self.fails:
            raise Unavailable("not now")
        return ExpertCounts(
            len(self.calls), (0, 2), self.counts.copy(), 0, error="full" if folder == "/full" else ""
        )


async def test_metrics_report_the_last_steps() -> None:
    ranks, metrics = Ranks(), Metrics()
    load = ExpertLoad([ranks.count_experts], metrics, num_groups=2, is_recorded=True)
    for counts, experts, groups in (
        ([4, 0, 2, 2, 1, 1, 1, 1], [2, 1], [1, 1]),
        ([4, 6, 2, 4, 1, 1, 1, 1], [3, 1], [1.5, 1]),
        # the last ones are of new ranks
        ([1, 1, 0, 0, 0, 0, 0, 4], [2, 4], [2, 2]),
    ):
        ranks.counts[:] = counts
        load.update_metrics(await load.count("read"))
        assert [metrics.expert_imbalance[layer] for layer in ("0", "2")] == experts
        assert [metrics.expert_rank_imbalance[layer] for layer in ("0", "2")] == groups
        assert metrics.expert_choices["0"] == sum(counts[:4])
    assert ranks.calls == ["read"] * 3
    with pytest.raises(InvalidRequest, match="full"):
        await load.count("dump", "/full")
    with pytest.raises(InvalidRequest, match="--expert-distribution-recorder-mode"):
        await ExpertLoad([ranks.count_experts], metrics, num_groups=1, is_recorded=False).count("start")


async def test_it_looks_when_steps_were_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "READ_EVERY_S", 0)
    ranks, metrics = Ranks(), Metrics()
    steps = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            partial(
                ExpertLoad([ranks.count_experts], metrics, num_groups=1, is_recorded=False).run, lambda: steps
            )
        )
        await anyio.lowlevel.checkpoint()
        assert not ranks.calls
        steps, ranks.fails = 3, True
        await until(lambda: len(ranks.calls) > 1)  # again and again
        ranks.fails = False
        await until(lambda: "0" in metrics.expert_choices.values)
        num_calls = len(ranks.calls)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert len(ranks.calls) == num_calls
        tasks.cancel_scope.cancel()


async def test_a_running_engine_records(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "model")
    options = {
        "device": "cpu",
        "model_path": str(folder),
        "max_total_tokens": 512,
        "expert_distribution_recorder_mode": "stat",
        "num_threads": 1,
    }
    async with running(**options) as core:
        experts = core.control.experts
        await experts.count("start")
        sink = ask(core, "one", max_new_tokens=5)
        await until(lambda: sink.finishes)
        found = await experts.count("dump", str(tmp_path / "out"))
        record = load_file(found.file)["logical_count"]
        assert found.num_steps >= 5 and record.shape[0] == found.num_steps
        assert record[:, found.layers].sum(0).ravel().tolist() == found.counts.tolist()
        with pytest.raises(InvalidRequest, match="nothing was recorded"):
            await experts.count("dump", str(tmp_path / "out"))


def test_only_models_with_experts_have_them() -> None:
    for options in (
        {"expert_distribution_recorder_mode": "stat"},
        {"enable_expert_distribution_metrics": True},
    ):
        with pytest.raises(OptionsError, match="this model has none"):
            plan_for(from_values({"device": "cpu", **options}))
