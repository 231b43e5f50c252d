"""Captured steps that verify drafts, and captured passes of a draft model, with the GPU's own kernels,
replayed by the double of test_graphs.py."""

from pathlib import Path
from typing import Any

import pytest

from runtime.messages.speculation import DraftModel, Speculation
from runtime.ranks.open_executor import DEVICES as MODULES
from runtime.scheduling.drafts import Draft
from tests.devices.cuda import test_graphs
from tests.devices.cuda.torch_device import HAS_GPU
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference


@pytest.mark.skipif(HAS_GPU, reason="kernels are interpreted without a GPU")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"num_hidden_layers": 1}),
        pytest.param(
            "deepseek_v2", {"first_k_dense_replace": 3, "num_hidden_layers": 1}, marks=pytest.mark.full
        ),
    ],
    ids=["heads", "latent"],
)
def test_steps_that_verify_drafts(
    family: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of different lengths and one row without drafts, some of them wrong, in graphs of the kernels;
    the host knows nothing of what was accepted."""
    monkeypatch.setitem(MODULES, "kernels", test_graphs.__name__)
    folder = make_checkpoint(family, tmp_path, **overrides)
    reference, prompts = Reference(folder), [[5], [9, 100, 7], list(range(9))]
    truths = [reference.greedy(prompt, 12) for prompt in prompts]
    settings = Speculation(algorithm="NGRAM", num_steps=0, topk=1, num_draft_tokens=3)
    runner, ready = start(
        folder,
        device="kernels",
        graph_sizes=[4],
        max_len=32,
        max_total_tokens=128,
        max_slots=4,
        speculation=settings,
    )
    assert isinstance(runner, test_graphs.Captured) and runner.capture(4, "verifies").error == ""
    runner.tapes.reads_lengths = False
    planner = Planner(runner, ready, 4)
    rows: list[Row] = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(prompts)]
    planner.run([], [(row, row.prompt_len) for row in rows])
    for step in range(3):
        done = [len(row.tokens) - row.prompt_len for row in rows]
        right = truths[1][done[1] : done[1] + 2], truths[2][done[2] : done[2] + 1]
        drafts = Draft(right[0]), Draft([*right[1], (truths[2][done[2] + 1] + 1) % 250])
        planner.run(rows[:1], [], list(zip(rows[1:], drafts, strict=True)))
        assert runner.tapes.replays == 3 * (step + 1), "page updates, a forward and a choice"
    for row, truth, count in zip(rows, truths, (4, 10, 7), strict=True):
        assert row.tokens[row.prompt_len :] == truth[:count]


@pytest.mark.skipif(HAS_GPU, reason="kernels are interpreted without a GPU")
def test_passes_of_a_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that drafts for itself is right in graphs of the kernels."""
    monkeypatch.setitem(MODULES, "kernels", test_graphs.__name__)
    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    settings = Speculation(
        algorithm="STANDALONE",
        num_steps=2,
        topk=1,
        num_draft_tokens=3,
        draft_model=DraftModel(path=str(folder)),
    )
    runner, ready = start(
        folder,
        device="kernels",
        graph_sizes=[2],
        max_len=32,
        max_total_tokens=128,
        max_slots=4,
        speculation=settings,
    )
    assert isinstance(runner, test_graphs.Captured) and runner.capture(2, "verifies").error == ""
    runner.tapes.reads_lengths = False
    planner = Planner(runner, ready, 4)
    planner.follows = True
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate([[5], [9, 100, 7]])]
    planner.run([], [(row, row.prompt_len) for row in rows])
    for _ in range(3):
        planner.run([], [], [(row, Draft.own(2)) for row in rows])
    assert runner.tapes.replays == 3 * 5, "page updates, two passes of the draft model, forward and choice"
    for row in rows:
        assert row.tokens[row.prompt_len :] == Reference(folder).greedy(row.tokens[: row.prompt_len], 10)
