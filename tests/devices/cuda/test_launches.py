"""A launch waits for nothing that the device does: no value is read, and nothing is asked whose size depends
on values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.kernels.launch import INTERPRETER
from runtime.devices.cuda.mla_prolog import CudaPrologs
from runtime.devices.cuda.ops import CudaOps
from runtime.devices.progress import without_progress
from runtime.messages.ranks import StartRank
from runtime.messages.requests import TokenBans
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from runtime.ranks.transfers import Here
from runtime.text.token_bans import packed
from tests.devices import taped
from tests.devices.cuda.torch_device import HAS_GPU
from tests.devices.drive import Planner, sampling, start_rank
from tests.models.make import make_checkpoint

SAMPLING_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.9, "top_p": 0.8, "top_k": 7, "seed": 4},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "seed": 1},
    "bias": {"bias_ids": [3, 4], "bias_values": [2.5, -100.0]},
    "banned": {"stop_ids": [1, 2], "min_len": 40},
    "token bans": {"token_bans": TokenBans(packed((3, 4, 5)), ((3,),))},
    "log probabilities": {"top_logprobs": 2, "prompt_logprobs": 1},
}


class NoWaits(TorchDispatchMode):
    """Refuses operators for which the host would wait."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        is_masked = name in ("index", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if is_masked or (
            name in taped.WAITS and not (name == "repeat_interleave" and isinstance(args[1], int))
        ):
            raise taped.Refused(f"the operator {function} in a launch")
        return function(*args, **(kwargs or {}))


class Aside:
    """Transfers that read when they are asked for what has come."""

    def fetch(self, tensors: Any) -> Any:
        kept = list(tensors)

        class Later(Here):
            def arrays(self) -> Any:
                return [tensor.cpu().numpy() for tensor in kept]

        return Later([])


class Watched(TorchExecutor):
    """The cpu with the GPU's kernels, whose launches are watched."""

    def launch(self, plan: Any) -> Any:
        run = interpreter.InterpretedFunction.run

        def unwatched(kernel: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                run(kernel, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, taped.NoReads(), NoWaits():
            patch.setattr(interpreter.InterpretedFunction, "run", unwatched)
            return super().launch(plan)


def watched(folder: Path) -> Planner:
    def opened(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        device = open_device(start, rank, dtype)
        ops = CudaOps(dtype, INTERPRETER)
        return replace(device, ops=ops, fused=CudaFusedOps(ops), mla_prologs=CudaPrologs(), programs=None)

    message = start_rank(folder, max_len=64, max_total_tokens=256)
    rank = Watched(start_torch_rank(0, message, without_progress, opened, FACTS))
    rank.runner.transfers = Aside()
    return Planner(rank, rank.ready, 4)


@pytest.mark.skipif(HAS_GPU, reason="watches the cpu")
@pytest.mark.parametrize("params", SAMPLING_PARAMS)
def test_steps_of_all_kinds(params: str, tmp_path: Path) -> None:
    """A prompt in chunks, decodes in the same step, decodes alone."""
    planner = watched(make_checkpoint("qwen3", tmp_path, num_hidden_layers=1))
    rows = [planner.row(slot, [5, 9, 100, 7, 8], sampling(**SAMPLING_PARAMS[params])) for slot in range(2)]
    planner.prefill(rows[0])
    planner.run(rows[:1], [(rows[1], 3)])
    planner.run(rows[:1], [(rows[1], 2)])
    planner.run(rows, [])
    assert [len(row.tokens) for row in rows] == [9, 7]


@pytest.mark.skipif(HAS_GPU, reason="watches the cpu")
def test_latents(tmp_path: Path) -> None:
    planner = watched(make_checkpoint("deepseek_v2", tmp_path, first_k_dense_replace=3, num_hidden_layers=1))
    row = planner.row(0, list(range(40)), sampling())
    planner.prefill(row, chunk=25)
    planner.run([row], [])
    assert len(row.tokens) == 42
