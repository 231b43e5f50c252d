"""What a decode step computes can be captured: nothing in it waits for the device, which a capture
refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.layers.fused_ops import fused_ops_of
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


@pytest.mark.parametrize("overrides", [{}, {"head_dim": 128}], ids=str)
@pytest.mark.parametrize(("family", "window"), [("qwen3", None), ("mistral", 150)])
def test_forward_and_choice(
    family: str, window: int | None, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(
        family, tmp_path, **overrides, **({} if window is None else {"sliding_window": window})
    )
    executor, ready = start(
        folder, device="npu", page_size=128, dtype="float32", max_len=512, max_total_tokens=2048
    )
    planner = Planner(executor, ready, 128)
    rows = [
        planner.row(0, [5, 9, 100], sampling(temperature=0.7, top_p=0.9, top_k=20)),
        planner.row(1, [7] * 200, sampling()),
    ]
    planner.run([], [(row, len(row.tokens)) for row in rows])
    concrete: Any = executor
    runner = concrete.runner
    plan = planner.plan(rows, [])
    with torch.inference_mode():
        runner.slots.update(plan)
        batch = runner.inputs.batch(plan, runner.slots.lengths.starts(plan.slots), None)
        places = torch.tensor([0, 1], device="npu")
        lengths = torch.tensor([5, 202], device="npu")
        fused = fused_ops_of(runner.device)
        inputs = fused.sampling_inputs(places, lengths, runner.slots.params, (20, True))

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            logits = runner.model.logits(runner.model.forward(batch))
            return logits, runner.device.ops.sample(logits, inputs)

        expected = [tensor.cpu() for tensor in step()]
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            found = step()
        graph.replay()
        for tensor, same in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor.cpu(), same, atol=1e-5, rtol=1e-5)
