"""Captured decode steps on an NPU: the tokens of transformers, whatever the family, company, padding, prefix
and preemption."""

from pathlib import Path
from typing import Any

import pytest

from tests.ascend.test_exact import LONG, MODELS, SHORT
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]

PAGE, COUNT, SIZES = 128, 8, [2, 4]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: MODELS[name]
    for name in (
        "qwen3",
        "llama, heads of 128, one for all",
        "mistral, windows",
        "mistral, windows, heads of 128",
        "qwen3, experts",
        "deepseek 3",
        "deepseek 3.2",
    )
}


def opened(folder: Path, sizes: list[int] = SIZES, **overrides: Any) -> tuple[Planner, Any]:
    options = {
        "device": "npu",
        "page_size": PAGE,
        "dtype": "float32",
        "max_len": 512,
        "max_total_tokens": 2048,
        "graph_sizes": sizes,
    }
    executor, ready = start(folder, **(options | overrides))
    for size in sizes:
        answer = executor.capture(size)
        assert answer.error == "" and answer.size == size
    return Planner(executor, ready, PAGE), executor


class Replays:
    """The graphs of a rank, counted."""

    def __init__(self, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[list[int]] = []
        self.count = 0
        graphs = executor.runner.device.graphs
        replay = graphs.replay

        def counted(graph: Any, lengths: Any) -> None:
            self.count += 1
            if len(lengths):
                self.lengths.append(lengths.tolist())
            replay(graph, lengths)

        monkeypatch.setattr(graphs, "replay", counted)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a prompt between decodes; a prefix that is shared; one row to three, over the end of a page;
    one that begins anew."""
    family, overrides = CASES[case]
    folder = make_checkpoint(family, tmp_path, **overrides)
    planner, executor = opened(folder)
    replays = Replays(executor, monkeypatch)
    short, long = planner.row(2, SHORT, sampling()), planner.row(5, LONG[:252], sampling())
    branch = planner.row(1, [*LONG[:PAGE], 3, 4, 5], sampling(), prefix=long, shared=PAGE)
    planner.run([], [(short, len(SHORT))])
    for count in (100, 1, 151):
        planner.run([short], [])
        planner.run([short], [(long, count)])
    branch.pages = long.pages[:1]
    planner.run([short, long], [(branch, 3)])
    for _ in range(COUNT):
        planner.run([short, branch, long], [])
    again = planner.row(5, long.tokens, sampling())  # in the same slot, with other pages
    planner.prefill(again, chunk=200)
    for _ in range(3):
        planner.run([again], [])
    assert replays.count == 2 * (3 + COUNT + 3), "a forward and a choice for each step of decodes"
    assert bool(replays.lengths) == executor.runner.device.graphs.reads_lengths == (case != "deepseek 3.2")
    if replays.lengths:
        assert replays.lengths[0] == [len(SHORT) + 1, 1], "with this step's token; 1 for padding"
        assert [len(lengths) for lengths in replays.lengths] == [2] * 3 + [4] * COUNT + [2] * 3
        assert max(replays.lengths[-1]) > 2 * PAGE, "the end of a page was passed"
    reference = Reference(folder)
    for row, prompt in ((short, SHORT), (branch, [*LONG[:PAGE], 3, 4, 5]), (again, LONG[:252])):
        assert row.tokens[len(prompt) :] == reference.greedy(prompt, len(row.tokens) - len(prompt))


@pytest.mark.parametrize("is_padded", [True, False])
def test_few_sequences_are_padded_to_a_large_graph(
    is_padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row replays a graph of 16, unless padding is off."""
    folder = make_checkpoint("qwen3", tmp_path)
    planner, executor = opened(folder, [16], max_slots=16, graph_pads=is_padded)
    replays = Replays(executor, monkeypatch)
    row = planner.row(3, SHORT, sampling())
    assert planner.generate(row, COUNT) == Reference(folder).greedy(SHORT, COUNT)
    assert [len(lengths) for lengths in replays.lengths] == ([16] * (COUNT - 1) if is_padded else [])


def test_steps_in_flight_have_their_own_lengths(tmp_path: Path) -> None:
    """Several replays are launched before anybody waits: an update must not reach the replay before it."""
    folder = make_checkpoint("mistral", tmp_path, sliding_window=150)
    planner, executor = opened(folder, [2])
    rows = [planner.row(0, LONG[:200], sampling()), planner.row(3, SHORT, sampling())]
    for row in rows:
        planner.prefill(row)
    launched = []
    for _ in range(COUNT):
        plan = planner.plan(rows, [])
        launched.append(executor.launch(plan))
        for row in rows:
            row.tokens.append(-1)  # the device knows it
    found = [pending.result().token_ids.tolist() for pending in launched]
    reference = Reference(folder)
    for i, prompt in enumerate((LONG[:200], SHORT)):
        assert [tokens[i] for tokens in found] == reference.greedy(prompt, COUNT + 1)[1:]


@pytest.mark.parametrize("captured", [[], [2]])
def test_one_that_cannot_be_captured_leaves_the_others(
    captured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    planner, executor = opened(folder, captured, graph_sizes=[2, 4, 8])
    model, forward = executor.runner.model, executor.runner.model.forward

    def reads(batch: Any, compiled: Any = None) -> Any:
        hidden = forward(batch)
        assert hidden[0, 0].item() is not None
        return hidden

    monkeypatch.setattr(model, "forward", reads)
    refused = executor.capture(4)
    assert "during a capture" in refused.error and refused.size == 4
    monkeypatch.undo()
    for size in (2, 8):
        assert size in captured or executor.capture(size).error == ""
    row: Row = planner.row(0, SHORT, sampling())
    assert planner.generate(row, COUNT) == Reference(folder).greedy(SHORT, COUNT)
    assert executor.runner.graphs.ready == [2, 8]


@pytest.mark.parametrize("case", ["qwen3", "deepseek 3"])
def test_prompts_in_pieces_are_those_of_transformers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a prompt, with and without padding, beside a row that decodes."""
    family, overrides = CASES[case]
    folder = make_checkpoint(family, tmp_path, **overrides)
    planner, executor = opened(folder, sizes=[], piecewise_sizes=[64, 128])
    assert [executor.capture(size, "tokens").error for size in (64, 128)] == ["", ""]
    graphs, replays = executor.runner.device.graphs, []
    replay = graphs.replay
    monkeypatch.setattr(
        graphs, "replay", lambda graph, lengths: (replays.append(graph), replay(graph, lengths))
    )
    short, long = planner.row(2, SHORT, sampling()), planner.row(5, LONG[:200], sampling())
    planner.run([], [(short, len(SHORT))])
    for count in (100, 37, 63):
        planner.run([short], [(long, count)])
    planner.run([short, long], [])
    assert len(replays) == 5 * (len(executor.runner.model.attentions) + 1)
    reference = Reference(folder)
    for row in (short, long):
        assert row.tokens[row.prompt_len :] == reference.greedy(
            row.tokens[: row.prompt_len], len(row.tokens) - row.prompt_len
        )
