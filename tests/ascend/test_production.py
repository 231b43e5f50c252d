"""The settings that ranks get where no option says otherwise, and which other tests do without: launches
from a queue (TASK_QUEUE_ENABLE=1), and an allocator whose segments grow. Two ranks, graphs, experts:
transformers' tokens."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.options.compat.environment import RANK_VARIABLES
from tests.ascend.simulate import PRODUCTION
from tests.ascend.test_serve import LATENT, OPTIONS, PROMPTS
from tests.e2e.test_exact import COUNT, run_all
from tests.metrics.read import sample
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel_size": 2}


def test_they_are_the_defaults() -> None:
    defaults = {variable: value for variable, value, _ in RANK_VARIABLES.values()}
    assert all(defaults[name] == value for name, value in PRODUCTION.items())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "overrides", "options"),
    [
        ("qwen3", {}, {"cuda_graph_bs": (2, 4, 5)}),
        ("qwen3_moe", {}, TWO | {"cuda_graph_bs": (2, 5)}),
        ("deepseek_v3", LATENT, TWO | {"disable_cuda_graph": True, "chunked_prefill_size": 50}),
    ],
)
async def test_tokens_are_those_of_transformers(
    family: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in PRODUCTION:
        monkeypatch.delenv(name)  # what the simulation sets
    monkeypatch.setenv("SIM_CANN_TRACE", str(tmp_path / "trace"))
    folder = make_checkpoint(family, tmp_path, **overrides)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:
        with anyio.fail_after(120):
            sizes = len(options.get("cuda_graph_bs", ()))
            while sample(engine.metrics(), "runtime_captured_sizes") < sizes:
                await anyio.sleep(0.05)
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == expected
    assert "aclrtReserveMemAddress" in (tmp_path / "trace").read_text(), "segments that grow"
