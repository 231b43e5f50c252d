"""PD multiplexing on a device with two partitions, in plain memory: which stream has which rows, who waits
for whom, and that tokens are those of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from runtime.devices.partitions import Partition
from runtime.messages.multiplexing import Multiplexing
from runtime.ranks.side_by_side import num_first
from tests.devices.drive import Planner, Row, sampling, start_rank
from tests.devices.streams import Stream, StreamedRunner, Streams, install
from tests.devices.taped import TapedDevice
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

PROMPTS = [[5, 9, 100, 7], list(range(40, 63)), [3] * 9, list(range(100, 117))]
NUM_TOKENS = 8


class Halves:
    """Two partitions: one for steps of up to two decodes, and one for those of more."""

    def __init__(self, streams: Streams) -> None:
        self.multiplexing = Multiplexing(manual=((3, 1, 1), (2, 2, 3)))
        self.least_rows = self.multiplexing.least_rows(2)
        self.partitions = [
            Partition(Stream(streams, f"prompts {place}"), Stream(streams, f"decodes {place}"))
            for place in range(2)
        ]

    def of(self, num_rows: int) -> Partition:
        return self.partitions[self.multiplexing.choose(num_rows, 2)]


def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, inner: TapedDevice | None = None, **options: Any
) -> tuple[StreamedRunner, Streams]:
    streams = Streams(is_late=False)
    install(monkeypatch, streams)
    start = start_rank(folder, max_total_tokens=512, num_states=16, **options)
    executor = StreamedRunner(streams, inner, start, Halves(streams))

    def watched(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(batch: Any, *compiled: Any) -> Tensor:
            streams.calls.append(f"{len(batch.token_ids)} tokens on {streams.now.name}")
            return forward(batch, *compiled)

        return run

    model: Any = executor.runner.model
    monkeypatch.setattr(model, "forward", watched(model.forward))
    streams.calls.clear()
    return executor, streams


def answers(executor: StreamedRunner, **params: Any) -> list[list[int]]:
    """Sequences join one by one, in chunks of 5 tokens, while those before them decode."""
    planner, rows = Planner(executor, executor.ready, 4), list[Row]()
    for slot, prompt in enumerate(PROMPTS):
        row = planner.row(slot, prompt, sampling(**params))
        while row.computed < row.prompt_len:
            planner.run(rows, [(row, min(5, row.prompt_len - row.computed))])
        rows.append(row)
    while any(len(row.tokens) < row.prompt_len + NUM_TOKENS for row in rows):
        planner.run(rows, [])
    executor.close()
    return [row.tokens[row.prompt_len :][:NUM_TOKENS] for row in rows]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {}),
        ("mistral", {"sliding_window": 7}),
        pytest.param("deepseek_v2", {}, marks=pytest.mark.full),
        pytest.param("qwen3_next", {}, marks=pytest.mark.full),
    ],
)
def test_tokens_are_those_of_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(family, tmp_path, **overrides)
    executor, _ = opened(folder, monkeypatch)
    reference = Reference(folder)
    assert answers(executor) == [reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


def test_both_parts_wait_for_the_inputs_and_the_head_for_both_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, streams = opened(make_checkpoint("qwen3", tmp_path), monkeypatch)
    planner = Planner(executor, executor.ready, 4)
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(PROMPTS)]
    planner.run([], [(rows[0], 4)])
    assert "4 tokens on main" in streams.calls
    streams.calls.clear()
    planner.run(rows[:1], [(rows[1], 23)])
    named = [call for call in streams.calls if "side" not in call.split()]
    assert [call for call in named if "event" not in call] == [
        "prompts 0 waits for main",
        "decodes 0 waits for main",
        "23 tokens on prompts 0",
        "1 tokens on decodes 0",
        "main waits for prompts 0",
        "main waits for decodes 0",
    ]
    streams.calls.clear()
    planner.run(rows[:2], [(rows[2], 9)])
    planner.run(rows[:3], [(rows[3], 17)])
    assert {"9 tokens on prompts 0", "17 tokens on prompts 1", "3 tokens on decodes 1"} <= {*streams.calls}
    streams.calls.clear()
    planner.run(rows, [])
    assert "4 tokens on main" in streams.calls
    executor.close()


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.8, "seed": 4}])
def test_decodes_by_graphs(params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of each size for its partition, next to that of steps without prompts; the tokens are those
    without graphs."""
    folder = make_checkpoint("qwen3", tmp_path)
    inner = TapedDevice()
    executor, streams = opened(folder, monkeypatch, inner, graph_sizes=[2, 4])
    tapes: Any = inner.tapes
    graphs = dict[int, str]()

    def capture(body: Callable[[], None], stream: Any = None) -> Any:
        tape = type(tapes).capture(tapes, body)
        graphs[id(tape)] = "all" if stream is None else stream.name
        return tape

    def replay(graph: Any, lengths: Any) -> None:
        streams.calls.append(f"graph of {graphs[id(graph)]} on {streams.now.name}")
        type(tapes).replay(tapes, graph, lengths)

    monkeypatch.setattr(tapes, "capture", capture)
    monkeypatch.setattr(tapes, "replay", replay)
    assert [executor.capture(size).error for size in (2, 4)] == ["", ""]
    streams.calls.clear()
    assert sorted(name for name in graphs.values() if name != "all") == ["decodes 0", "decodes 1"]
    found = answers(executor, **params)
    replayed = {call for call in streams.calls if "graph" in call}
    assert replayed == {
        "graph of all on main",
        "graph of decodes 0 on decodes 0",
        "graph of decodes 1 on decodes 1",
    }
    assert not any("on decodes" in call for call in streams.calls if "tokens" in call), "all by graphs"
    with monkeypatch.context() as patch:
        assert found == answers(opened(folder, patch)[0], **params)


def test_what_is_not_cut() -> None:
    counts = np.array([1, 1, 3, 20])
    assert [num_first(counts, num_whole) for num_whole in (0, 2, 3, 4)] == [0, 2, 5, 0]
