"""Counts of the tokens of each expert, against a count by hand of what the routers chose."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from runtime.devices.cpu.self_check import load_library
from runtime.layers.moe.feed_forward import Router
from runtime.messages.ranks import CountExperts, ExpertCounts
from runtime.ranks import expert_counts, open_executor
from tests.devices import taped
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint

PROMPTS = [[1, 2, 3, 4, 5], list(range(40, 57)), [200, 100]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(open_executor.DEVICES, "taped", taped.__name__)
    return make_checkpoint("qwen3_moe", tmp_path / "model", num_hidden_layers=3, mlp_only_layers=[1])


def asked(executor: Any, action: Any, folder: str = "") -> ExpertCounts:
    found = executor.count_experts(CountExperts(7, action, folder)).result()
    assert isinstance(found, ExpertCounts) and found.id == 7
    return found


def run(planner: Planner) -> None:
    """Chunks of prompts beside decodes, then decodes of three rows and of one."""
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(PROMPTS)]
    for i, row in enumerate(rows):
        while row.computed < row.prompt_len:
            planner.run(rows[:i], [(row, min(7, row.prompt_len - row.computed))])
    for batch in (rows, rows[:1]):
        for _ in range(3):
            planner.run(batch, [])


def compute_by_layers(executor: Any) -> None:
    """Takes the device's program of whole steps away, if it has one."""
    forward = executor.runner.forward
    forward.device = replace(forward.device, programs=None)


def test_a_program_of_whole_steps_counts_as_layers_do(folder: Path) -> None:
    found = []
    for is_by_layers in (False, True):
        executor, ready = start(folder, expert_steps=4)
        if is_by_layers:
            compute_by_layers(executor)
        run(Planner(executor, ready, 4))
        assert (executor.runner.forward.program is None) == (is_by_layers or load_library() is None)
        found.append(asked(executor, "read").counts)
    assert found[0].sum() > 0 and np.array_equal(*found)


def test_counts_are_those_of_the_routers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    executor, ready = start(folder, expert_steps=4)
    compute_by_layers(executor)
    chosen: list[list[int]] = []  # of each call, a layer of a step
    forward = Router.forward

    def watched(router: Router, x: Tensor, wide: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = forward(router, x, wide)
        chosen.append(ids.flatten().tolist())
        return ids, weights

    monkeypatch.setattr(Router, "forward", watched)
    run(planner := Planner(executor, ready, 4))
    found = asked(executor, "start")
    by_hand = [Counter(i for ids in chosen[layer::2] for i in ids) for layer in (0, 1)]
    counts = found.counts.reshape(2, -1)
    assert found.layers == (0, 2) and found.num_steps == 0
    assert [[by_hand[layer][i] for i in range(counts.shape[1])] for layer in (0, 1)] == counts.tolist()
    chosen.clear()
    run(planner)
    dumped = asked(executor, "dump", str(tmp_path / "out"))
    record = load_file(dumped.file)
    assert (
        dumped.num_steps == 4
        and record["logical_count"].shape == (4, 3, counts.shape[1])
        and not record["logical_count"][:, 1].any()
    )
    assert record["step"].tolist() == list(range(record["step"][0], record["step"][0] + 4)), (
        "the latest, the oldest first"
    )
    assert (record["num_tokens"].tolist(), record["num_decodes"].tolist()) == ([3, 1, 1, 1], [3, 1, 1, 1])
    last = [Counter(ids) for ids in chosen[-8:]]
    expected = [
        [last[2 * step + layer][i] for i in range(counts.shape[1])] for step in range(4) for layer in (0, 1)
    ]
    assert record["logical_count"][:, [0, 2]].reshape(8, -1).tolist() == expected
    assert asked(executor, "dump", str(tmp_path / "out")).error == "nothing was recorded"
    asked(executor, "stop")
    run(planner)
    assert asked(executor, "read").num_steps == 0


def test_a_record_without_bound_goes_to_host_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(expert_counts, "ROWS", 3)
    records = []
    for steps in (100, expert_counts.ALL_STEPS):
        executor, ready = start(folder, expert_steps=steps)
        planner = Planner(executor, ready, 4)
        asked(executor, "start")
        run(planner)
        dumped = asked(executor, "dump", str(tmp_path / str(steps)))
        records.append((dumped.num_steps, load_file(dumped.file)))
        run(planner)
        again = asked(executor, "dump", str(tmp_path / str(steps)))
        records[-1] += (load_file(again.file),)
    (count, *bounded), (other_count, *unbounded) = records
    assert count == other_count > 2 * 3
    for one, other in zip(bounded, unbounded, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_graphs_count_and_padding_does_not(folder: Path) -> None:
    """Three rows and one run in graphs of four and of two."""
    found = []
    for options in ({}, {"device": "taped", "graph_sizes": [2, 4], "piecewise_sizes": [16], "max_len": 128}):
        executor, ready = start(folder, expert_steps=0, **options)
        run(Planner(executor, ready, 4))
        found.append(asked(executor, "read").counts)
    assert executor.tapes.replays > 6 and found[0].any()  # type: ignore[attr-defined]
    assert np.array_equal(found[0], found[1])


def test_a_step_that_is_launched_again_counts_once(folder: Path) -> None:
    """There was no memory, first in the midst of the layers, then behind them."""
    found = []
    for fails in ((), ("forward",), ("logits",)):
        executor, ready = start(folder, expert_steps=0)
        planner, model = Planner(executor, ready, 4), executor.runner.model  # type: ignore[attr-defined]
        for name in fails:
            target, name = (model.layers[2].mlp, name) if name == "forward" else (model, name)
            plain = getattr(target, name)

            def full(*args: Any, target: Any = target, name: str = name, plain: Any = plain) -> Any:
                setattr(target, name, plain)
                raise torch.OutOfMemoryError("full")

            setattr(target, name, full)
        run(planner)
        found.append(asked(executor, "read").counts.tolist())
    assert found[0] == found[1] == found[2] and any(found[0])


def test_without_the_option_nothing_is_counted(folder: Path) -> None:
    executor, _ = start(folder)
    assert executor.runner.load is None  # type: ignore[attr-defined]
    layers = executor.runner.model.layers  # type: ignore[attr-defined]
    assert all(getattr(layer.mlp, "counts", None) is None for layer in layers)


def test_a_folder_that_cannot_be_written_is_reported(folder: Path, tmp_path: Path) -> None:
    executor, ready = start(folder, expert_steps=2)
    asked(executor, "start")
    run(Planner(executor, ready, 4))
    (tmp_path / "file").write_text("")
    assert "file" in asked(executor, "dump", str(tmp_path / "file")).error
