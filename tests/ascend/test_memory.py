"""What a step takes on an NPU, measured at start, and left free beside the pages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]

MIB = 1 << 20


def test_pages_leave_room_for_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages fill what a start finds free but for what it measured; and steps as large as may be stay within
    that."""
    import torch_npu

    assert torch_npu
    from runtime.devices.ascend.memory import AscendMemory

    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    free, peaks, own = 48 * MIB, [], AscendMemory.measure_peak

    def peak(memory: Any, run: Any) -> int:
        peaks.append(own(memory, run))
        return peaks[-1]

    with monkeypatch.context() as patch:
        patch.setattr(AscendMemory, "free_bytes", lambda memory: free)
        patch.setattr(AscendMemory, "measure_peak", peak)
        executor, ready = start(
            folder,
            device="npu",
            page_size=128,
            dtype="float32",
            max_slots=4,
            max_len=1 << 16,
            max_step_tokens=2048,
            memory_fraction=2.0,
        )
    assert MIB < peaks[0] < free
    assert ready.num_pages == (free - peaks[0]) // (ready.pages_bytes // ready.num_pages)
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_reserved()
    planner = Planner(executor, ready, 128)
    for slot in range(2):
        row = planner.row(slot, [5] * 2048, sampling(temperature=1.0, top_p=0.5, top_logprobs=20))
        planner.run([], [(row, 2048)])
    assert 0 < torch.npu.max_memory_reserved() - before <= peaks[0]


def test_what_others_keep_counts() -> None:
    """As HCCL's buffers, which the first step takes."""
    import torch_npu

    assert torch_npu
    from runtime.devices.ascend.memory import AscendMemory

    memory, kept = AscendMemory(1), []
    assert memory.measure_peak(lambda: None) == 0
    assert 64 * MIB <= memory.measure_peak(lambda: [torch.empty(16 * MIB, device="npu")].clear()) < 80 * MIB
    assert memory.measure_peak(lambda: kept.append(torch.empty(16 * MIB, device="npu"))) >= 128 * MIB, (
        "taken, and kept"
    )
