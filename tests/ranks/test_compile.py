"""Steps through torch.compile, without a compiler of machine code: the same tokens, and one function for all
layers and sizes."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from runtime.devices.base import Gate
from runtime.devices.cpu.kernels import choice
from runtime.devices.cpu.ops import CpuOps
from runtime.errors import StartError
from runtime.layers import torch_ops as plain
from runtime.messages.ranks import CompileConfig
from runtime.ranks import compile as compiling
from runtime.ranks import open_executor
from runtime.ranks.open_graphs import open_graphs
from tests.devices import taped
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Operators are torch's, which can be compiled; kernels of the cpu device are calls that cannot."""
    monkeypatch.setitem(open_executor.DEVICES, "taped", taped.__name__)
    monkeypatch.setenv(choice.VARIABLE, "none")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_greedy_equals_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the cpu, where nothing is captured: every step runs what is compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiling, "HOW", {"backend": counter})
    folder = make_checkpoint(family, tmp_path, num_hidden_layers=3)
    executor, ready = start(folder, max_len=64, compiled=CompileConfig(max_rows=4))
    loaded: Any = executor.runner  # type: ignore[attr-defined]
    assert counter.frame_count == 2, "for one row and for any number"
    monkeypatch.setattr(loaded.model, "forward", partial(loaded.model.forward, compiled=loaded.compiled))
    planner = Planner(executor, ready, 4)
    rows = [
        planner.row(slot, [(slot + 3) * i % 250 for i in range(5 + slot)], sampling()) for slot in range(3)
    ]
    planner.run([], [(row, row.prompt_len) for row in rows])
    for step in range(4):
        planner.run(rows[: 3 - step % 3], [])
    reference = Reference(folder)
    assert all(
        row.tokens[row.prompt_len :]
        == reference.greedy(row.tokens[: row.prompt_len], len(row.tokens) - row.prompt_len)
        for row in rows
    )
    assert counter.frame_count == 2, "nothing was compiled anew"


@pytest.mark.parametrize(
    ("compiled", "asked"),
    [
        (CompileConfig(max_rows=2), {("graphs", 2): True, ("graphs", 4): False, ("pieces", 8): False}),
        (CompileConfig(is_piecewise=True), {("graphs", 2): False, ("graphs", 4): False, ("pieces", 8): True}),
    ],
)
def test_which_captures_are_compiled(
    compiled: CompileConfig,
    asked: dict[tuple[str, int], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[tuple[str, int], bool] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    executor, _ = start(
        make_checkpoint("llama", tmp_path),
        device="taped",
        max_len=64,
        compiled=compiled,
        graph_sizes=[2, 4],
        piecewise_sizes=[8],
    )
    loaded: Any = executor.runner  # type: ignore[attr-defined]
    kind = "graphs"
    inner = loaded.compiled
    loaded.compiled = lambda layer, x, *rest: (seen.update({(kind, len(x)): True}), inner(layer, x, *rest))[1]
    loaded.graphs, _, loaded.piecewise = open_graphs(loaded)
    for kind, size, unit in (("graphs", 2, "sequences"), ("graphs", 4, "sequences"), ("pieces", 8, "tokens")):
        seen[kind, size] = False
        assert executor.capture(size, unit).error == ""
    assert seen == asked


def test_what_cannot_be_compiled_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, examples: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiling, "HOW", {"backend": broken})
    with pytest.raises(StartError, match="torch.compile failed .*leave --enable-torch-compile"):
        start(make_checkpoint("llama", tmp_path), max_len=64, compiled=CompileConfig(max_rows=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_forms_are_those_of_the_oracle(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(3, 32).to(dtype),
        torch.randn(3, 32).to(dtype),
        torch.randn(32).to(dtype),
    )
    oracle = CpuOps(dtype)
    near = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for found, expected in zip(
        plain.add_rms_norm(x, residual, weight, 1e-5),
        oracle.add_rms_norm(x, residual.clone(), weight, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **near)
    for kind in get_args(Gate):
        torch.testing.assert_close(plain.act_and_mul(x, kind), oracle.act_and_mul(x.clone(), kind), **near)


def test_who_does_not_compile_does_not_load_the_compiler() -> None:
    """It takes a rank seconds to import."""
    words = "import sys, runtime.ranks.torch_executor; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
