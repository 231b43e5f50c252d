"""Captured decode steps with the GPU's own kernels, replayed by a double; and what is asked of torch.cuda,
by a recording one."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from triton.runtime import interpreter

from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cuda.attention import AttentionPlan, plan_decodes
from runtime.devices.cuda.attention_backends import HybridAttentionBackend, TritonBackend
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.graphs import CudaGraphs
from runtime.devices.cuda.kernels.launch import INTERPRETER
from runtime.devices.cuda.lora import CudaLoraOps
from runtime.devices.cuda.mla_prolog import CudaPrologs
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.cuda.ops import CudaOps, SplitCounters
from runtime.devices.facts import ANY_K
from runtime.devices.progress import Progress
from runtime.messages.ranks import StartRank
from runtime.ranks.open_executor import DEVICES as MODULES
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices import taped
from tests.devices.cuda.torch_device import HAS_GPU
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise
from tests.models.reference import Reference
from tests.ranks.lora_slots import decode_with_adapters

TORCH_DEVICE = torch.device("cuda", 0)


class KernelTapes(taped.Tapes):
    """Launches of kernels are on the tape as well, with the tensors and numbers of the capture."""

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan:  # type: ignore[override]
        return plan_decodes(slots, lengths, page_tables, page_size)

    def capture(self, body: Callable[[], None], stream: Any = None) -> Any:
        run = interpreter.InterpretedFunction.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            def again() -> None:
                run(kernel, *args, **kwargs)

            tape = self.recording[-1]
            with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
                again()
            tape.calls.append(again)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.InterpretedFunction, "run", launch)
            return super().capture(body)


class Captured(TorchExecutor):
    """The cpu with the kernels of the GPU, interpreted."""

    def __init__(self, rank: int, start: StartRank, progress: Progress) -> None:
        self.tapes = KernelTapes()
        facts = structs.replace(
            FACTS,
            name="kernels",
            dtypes=("float32",),
            graph_max_running=64,
            captured_samplers=((ANY_K, True),),
        )

        def opened(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
            device = open_device(start, rank, dtype)
            adapters = (
                None
                if start.adapters is None
                else CudaLoraOps(INTERPRETER, device.torch_device, start.adapters.num_lora_slots)
            )
            counters = SplitCounters.of("all", INTERPRETER, device.torch_device)
            ops = CudaOps(dtype, INTERPRETER, fusion="all", counters=counters)
            return replace(
                device,
                facts=facts,
                ops=ops,
                experts=CudaExperts(INTERPRETER),
                fused=CudaFusedOps(ops),
                mla_prologs=CudaPrologs(),
                joins_latents=True,
                lora_ops=adapters,
                graphs=self.tapes,
                programs=None,
            )

        super().__init__(start_torch_rank(rank, start, progress, opened, facts))


def open_executor(rank: int, start: StartRank, progress: Progress) -> Captured:
    return Captured(rank, start, progress)


@pytest.mark.skipif(HAS_GPU, reason="kernels are interpreted without a GPU")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"num_hidden_layers": 1}),
        pytest.param("mistral", {"sliding_window": 7}, marks=pytest.mark.full),
        ("gemma2", {"num_hidden_layers": 2}),
        pytest.param("gpt_oss", {"num_hidden_layers": 2}, marks=pytest.mark.full),
        ("deepseek_v2", {"first_k_dense_replace": 3, "num_hidden_layers": 1}),
    ],
    ids=["qwen3", "window", "cap", "sinks", "latent"],
)
def test_greedy_equals_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths at the replay are others than at the capture, some rows are padding, and sequences leave."""
    monkeypatch.setitem(MODULES, "kernels", __name__)
    folder = make_checkpoint(family, tmp_path, **overrides)
    reference, prompts = Reference(folder), [[5], [9, 100, 7], list(range(17))]
    runner, ready = start(
        folder, device="kernels", graph_sizes=[4], max_len=32, max_total_tokens=128, max_slots=4
    )
    assert isinstance(runner, Captured) and runner.capture(4).error == ""
    planner = Planner(runner, ready, 4)
    rows: list[Row] = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(prompts)]
    planner.run([], [(row, row.prompt_len) for row in rows])
    for step in range(5):
        planner.run(rows[step > 2 :], [])
    assert runner.tapes.replays == 10
    for row in rows:
        assert row.tokens[row.prompt_len :] == reference.greedy(
            row.tokens[: row.prompt_len], len(row.tokens) - row.prompt_len
        )


@pytest.mark.skipif(HAS_GPU, reason="kernels are interpreted without a GPU")
def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "kernels", __name__)
    folder = make_checkpoint("llama", tmp_path / "base", num_hidden_layers=1)
    executor = decode_with_adapters(folder, tmp_path, 2, device="kernels", graph_sizes=[4])
    assert isinstance(executor, Captured) and executor.tapes.replays == 2 * 2 * 3 * 2


@pytest.mark.skipif(HAS_GPU, reason="kernels are interpreted without a GPU")
@pytest.mark.parametrize(("family", "format"), [("qwen3_moe", ""), ("qwen3_moe", "awq"), ("qwen2", "fp8")])
def test_experts_and_weights_in_few_bits(
    family: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the same kernels launched one by one, with other choices of experts in each step."""
    monkeypatch.setitem(MODULES, "kernels", __name__)
    folder = make_checkpoint(family, tmp_path / "plain", num_hidden_layers=1)
    if format:
        quantise(folder, tmp_path, format)
        folder = tmp_path / "quantised"
    found = []
    for captures in (True, False):
        runner, ready = start(
            folder, device="kernels", graph_sizes=[4], max_len=32, max_total_tokens=128, max_slots=4
        )
        assert isinstance(runner, Captured) and (not captures or runner.capture(4).error == "")
        planner = Planner(runner, ready, 4)
        rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(([5], [9, 100], [8]))]
        planner.run([], [(row, row.prompt_len) for row in rows])
        for batch in (rows, rows[1:]):
            planner.run(batch, [])
        assert runner.tapes.replays == (4 if captures else 0)
        found.append([row.tokens for row in rows])
    assert found[0] == found[1]


@pytest.mark.skipif(HAS_GPU, reason="kernels are interpreted without a GPU")
def test_random_tokens_are_those_of_steps_without_graphs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODULES, "kernels", __name__)
    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    requests = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.9, "top_p": 0.8, "seed": 4},
        {"temperature": 1.5, "top_k": 5, "seed": 5, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
    ]
    found = []
    for captures in (True, False):
        runner, ready = start(
            folder, device="kernels", graph_sizes=[4], max_len=32, max_total_tokens=128, max_slots=4
        )
        assert isinstance(runner, Captured)
        if captures:
            assert runner.capture(4).error == ""
        planner = Planner(runner, ready, 4)
        rows = [planner.row(slot, [5, 9, 100], sampling(**request)) for slot, request in enumerate(requests)]
        planner.run([], [(row, 3) for row in rows])
        for batch in (rows, rows[:3], rows[2:], rows):
            planner.run(batch, [])
        assert runner.tapes.replays == (8 if captures else 0)
        assert runner.runner is not None
        found.append(
            [row.tokens for row in rows]
            + [runner.runner.slots.penalties.counts.generated[1:].sum(0).tolist()]
        )
    assert found[0] == found[1]


class Recording:
    """A double of torch.cuda that records calls. A capture can be made to fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.is_invalid = False
        recording = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                recording.calls.append(("begin", pool, capture_error_mode))

            def capture_end(self) -> None:
                recording.calls.append("end")
                if recording.is_invalid:
                    raise RuntimeError("capture was invalidated")

            def replay(self) -> None:
                recording.calls.append("replay")

        @contextmanager
        def stream(which: Any) -> Iterator[None]:
            recording.calls.append(f"on {which}")
            try:
                yield
            finally:
                recording.calls.append(f"off {which}")

        names = iter(range(100))
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "Stream", lambda torch_device: f"stream {next(names)}")
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(names)))
        patch.setattr(torch.cuda, "synchronize", lambda torch_device: recording.calls.append("synchronize"))
        patch.setattr(torch.cuda, "empty_cache", lambda: recording.calls.append("empty_cache"))
        patch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda index, pool: recording.calls.append(("leave", pool))
        )

    def take(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls


def test_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(monkeypatch)
    graphs, was_still = CudaGraphs(TORCH_DEVICE), []

    def body() -> None:
        was_still.append(not gc.isenabled())
        recording.calls.append("body")

    graph = graphs.capture(body)
    assert recording.take() == [
        "synchronize",
        "on stream 1",
        ("begin", (0, 0), "thread_local"),
        "body",
        "end",
        "off stream 1",
    ]
    graphs.replay(graph, ())
    assert recording.take() == ["replay"] and was_still == [True] and gc.isenabled()
    CudaGraphs(TORCH_DEVICE, allows_gc=True).capture(body)
    assert was_still == [True, False]


def test_backends_get_lengths_before_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the kernels whose attention is in the graph, and in no other."""
    recording = Recording(monkeypatch)

    class RecordingBackend(TritonBackend):
        def replan(self, metadata: Any, lengths: Any) -> None:
            recording.calls.append(lengths)

    backend = RecordingBackend(torch.float32, INTERPRETER)
    graphs, tables = (
        CudaGraphs(TORCH_DEVICE, attention_backend=HybridAttentionBackend(backend, backend)),
        torch.zeros(1, 2, 3, dtype=torch.int32),
    )
    forward = graphs.capture(
        lambda: (
            graphs.plan_decodes(torch.arange(2), torch.ones(2, dtype=torch.int64), tables, 4, (0,)) and None
        )
    )
    choice = graphs.capture(lambda: None)
    recording.take()
    graphs.replay(forward, "lengths")
    graphs.replay(choice, ())
    assert recording.take() == ["lengths", "replay", "replay"]


def test_no_memory_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps left lying about goes, then the graph fits: in the same pool, whose capture has ended
    properly."""
    recording = Recording(monkeypatch)
    bodies = iter([True, False])

    def body() -> None:
        if next(bodies):
            raise torch.OutOfMemoryError("no room")

    CudaGraphs(TORCH_DEVICE).capture(body)
    once = ["synchronize", "on stream 1", ("begin", (0, 0), "thread_local"), "end", "off stream 1"]
    assert recording.take() == [*once, "empty_cache", *once]


def test_an_invalid_capture_leaves_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body's error is raised, and the next capture has a pool and a stream of its own."""
    recording = Recording(monkeypatch)
    graphs = CudaGraphs(TORCH_DEVICE)
    recording.is_invalid = True

    def body() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(body)
    assert recording.take()[-3:] == ["end", ("leave", (0, 0)), "off stream 1"]
    with pytest.raises(RuntimeError, match="invalidated"):
        graphs.capture(lambda: None)
    assert ("leave", (0, 2)) in recording.take()
    recording.is_invalid = False
    graphs.capture(lambda: None)
    assert recording.take()[1:3] == ["on stream 5", ("begin", (0, 4), "thread_local")]
