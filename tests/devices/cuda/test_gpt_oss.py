"""gpt-oss with the experts of the cuda device: the tokens of transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cuda.kernels.launch import INTERPRETER
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.cuda.weights import PackedWeight
from runtime.devices.progress import without_progress
from runtime.messages.ranks import StartRank
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.cpu.test_mxfp4 import make_pair
from tests.devices.cuda.torch_device import HAS_GPU
from tests.devices.drive import Planner, sampling, start_rank
from tests.models.reference import Reference

PROMPTS = [[1, 2, 3, 4, 5], list(range(40, 52))]
NUM_TOKENS = 4


@pytest.mark.skipif(HAS_GPU, reason="ranks on the GPU are tested by tests/cuda")
@pytest.mark.parametrize("kind", ["mxfp4", "plain"])
def test_tokens(kind: str, tmp_path: Path) -> None:
    """In float32, where numbers in 4 bits are what they are in full. Experts are computed together."""
    quantized, full = make_pair(tmp_path, "float32")
    kinds: list[str] = []

    class Watched(CudaExperts):
        def _sum(self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: Any, added: Any) -> Tensor:
            kinds.extend(one.kind for one in packed if isinstance(one, PackedWeight))
            return super()._sum(x, expert_ids, weights, packed, added)

    def opened(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        device = open_device(start, rank, dtype)
        return replace(device, experts=Watched(INTERPRETER), programs=None)

    message = start_rank(quantized if kind == "mxfp4" else full, max_len=64, max_total_tokens=256)
    rank = TorchExecutor(start_torch_rank(0, message, without_progress, opened, FACTS))
    planner = Planner(rank, rank.ready, 4)
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(PROMPTS)]
    planner.run([], [(row, row.prompt_len) for row in rows])
    for _ in range(NUM_TOKENS - 1):
        planner.run(rows, [])
    reference = Reference(full)
    wanted = [reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [row.tokens[row.prompt_len :] for row in rows] == wanted
    assert set(kinds) == {kind}
