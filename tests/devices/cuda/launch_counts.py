"""Launches of captured decode steps: `python -m tests.devices.cuda.launch_counts FOLDER:FUSION ...`. Prints
JSON: of each, launches of the forward graph, and of sampling graphs.

A rank captures on the cpu with the kernels as an H200 would be given them. They run nothing; each is counted,
and so is each operator of torch that is neither a view nor an allocation.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cuda.attention import AttentionPlan, plan_decodes
from runtime.devices.cuda.compile_ahead import ALLOCATIONS, ZeroedMemory
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.mla_prolog import CudaPrologs
from runtime.devices.cuda.moe import CudaExperts, route_counter
from runtime.devices.cuda.ops import CudaOps, SplitCounters
from runtime.devices.facts import ANY_K
from runtime.devices.progress import without_progress
from runtime.messages.ranks import StartRank
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.cuda import no_gpu
from tests.devices.cuda.variants import ARCH, H200
from tests.devices.drive import start_rank

ROWS = 4


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        returns = [one.alias_info for one in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if is_view and isinstance(found, Tensor):  # unless it was copied after all
            memory = found.untyped_storage().data_ptr()
            is_view = any(x.untyped_storage().data_ptr() == memory for x in args if isinstance(x, Tensor))
        if not is_view and function.overloadpacket not in ALLOCATIONS:
            self.counts[function.overloadpacket.__name__] += 1
        return found


class CountedGraphs:
    """Graphs (devices/base.py) whose captures are counted."""

    reads_lengths = False

    def __init__(self) -> None:
        self.captured: list[Counter[str]] = []
        self.counts: Counter[str] | None = None  # of the capture under way

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan:
        return plan_decodes(slots, lengths, page_tables, page_size)

    def capture(self, body: Callable[[], None], stream: object = None) -> object:
        with Launches() as launches:
            self.counts = launches.counts
            body()
            self.counts = None
        self.captured.append(launches.counts)
        return object()

    def forget(self) -> None:
        raise AssertionError("no graph is given up")

    def replay(self, graph: object, lengths: np.ndarray | tuple[()]) -> None:
        raise AssertionError("nothing is replayed")


def start(message: StartRank, graphs: CountedGraphs, fusion: Any) -> TorchExecutor:
    """A rank with the kernels of an H200."""
    facts = structs.replace(FACTS, graph_max_running=64, captured_samplers=((ANY_K, True),))

    def opened(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        device = open_device(start, rank, dtype)
        counters = SplitCounters.of(fusion, H200, device.torch_device)
        ops = CudaOps(dtype, H200, fusion=fusion, counters=counters)
        counter = route_counter(device.torch_device, are_all_here=True, fusion=fusion)
        return replace(
            device,
            facts=facts,
            ops=ops,
            experts=CudaExperts(H200, fusion, counter=counter),
            fused=CudaFusedOps(ops),
            mla_prologs=None if fusion == "off" else CudaPrologs(),
            graphs=graphs,
            programs=None,
            logits_ops=None,
            row_quantizer=None,
        )

    return TorchExecutor(start_torch_rank(0, message, without_progress, opened, facts))


class Counting:
    """Kernels and products that are launched, counted for the capture under way."""

    def __init__(self) -> None:
        self.graphs = CountedGraphs()

    def add(self, name: str) -> None:
        if self.graphs.counts is not None:
            self.graphs.counts[name] += 1

    def run(self, *args: Any) -> None:
        """In place of a compiled kernel's."""
        self.add("kernels")

    def mm(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        """A product that torch has on GPUs alone."""
        self.add("mm")
        with _disable_current_modes():
            return torch.zeros(len(x), weight.shape[1], dtype=out_dtype)


def captured(folder: str, fusion: str, counting: Counting) -> dict[str, dict[str, int]]:
    """Launches of a step of ROWS rows, by graph and name."""
    counting.graphs = graphs = CountedGraphs()
    message = start_rank(
        folder,
        page_size=64,
        max_slots=ROWS,
        max_len=8192,
        max_step_tokens=64,
        max_total_tokens=1 << 15,
        dtype="bfloat16",
        graph_sizes=[ROWS],
    )
    with ZeroedMemory():
        found = start(message, graphs, fusion).capture(ROWS)
    assert found.error == "", found.error
    return dict(zip(("forward", "greedy", "random", "penalised"), map(dict, graphs.captured), strict=False))


def main(*cases: str) -> None:
    """Captures a step of each FOLDER:FUSION."""
    no_gpu.install(ARCH, lambda *_: None)
    counting = Counting()
    no_gpu.Nothing.run = counting.run  # type: ignore[assignment, method-assign]
    torch.mm = counting.mm  # type: ignore[assignment]
    print(json.dumps([captured(*case.rsplit(":", 1), counting) for case in cases]))


if __name__ == "__main__":
    main(*sys.argv[1:])
