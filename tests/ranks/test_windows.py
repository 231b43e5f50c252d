"""Layers with a sliding window in a pool of their own: tokens are those of transformers, from few pages."""

from pathlib import Path
from typing import Any

import pytest

from runtime.cache.pool_sizes import MemoryBudget, Pools, divide_memory, has_two_pools, least_pages
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

WINDOW, PAGE_SIZE = 9, 4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "half and half": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "all windows": ("mistral", {"sliding_window": WINDOW}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return make_checkpoint(family, tmp_path_factory.mktemp("model"), **overrides)


def open_planner(folder: Path, num_window_pages: int) -> Planner:
    executor, ready = start(
        folder, page_size=PAGE_SIZE, max_slots=8, max_len=256, max_step_tokens=8, window_ratio=0.05
    )
    assert ready.num_window_pages >= num_window_pages and ready.num_pages == 8 * 64 + 1
    planner = Planner(executor, ready, PAGE_SIZE, window=WINDOW)
    planner.free_window = planner.free_window[:num_window_pages]
    return planner


def poison(planner: Planner) -> None:
    """What is free now is never read: it would make everything NaN."""
    loaded = planner.executor.runner  # type: ignore[attr-defined]
    for keys, values in (loaded.kv[layer.index] for layer in loaded.model.attentions if layer.window):
        for page in planner.free_window:
            keys[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = values[
                page * PAGE_SIZE : (page + 1) * PAGE_SIZE
            ] = float("nan")


@pytest.mark.parametrize("chunk", [1, 7, 8])
def test_long_sequence_from_few_pages(folder: Path, chunk: int) -> None:
    prompt = [(i * 37) % 250 for i in range(101)]
    planner = open_planner(folder, least_pages(WINDOW, PAGE_SIZE, chunk))
    row = planner.row(3, prompt, sampling())
    while row.computed < len(prompt):
        planner.run([], [(row, min(chunk, len(prompt) - row.computed))])
        poison(planner)
    for _ in range(39):
        planner.run([row], [])
        poison(planner)
    assert row.tokens[len(prompt) :] == Reference(folder).greedy(prompt, 40)


def test_rows_take_turns_in_the_same_pages(folder: Path) -> None:
    """What slides out of one row is another's in the same step; a prefix is continued from the pages that its
    window still sees."""
    prompts = [[(i * k) % 250 for i in range(60)] for k in (7, 11)]
    reference = Reference(folder)
    planner = open_planner(folder, 14)
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(prompts)]
    for at in range(0, 60, 5):
        planner.run([], [(row, min(5, 60 - at)) for row in rows])
    for _ in range(20):
        planner.run(rows, [])
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens[60:] == reference.greedy(prompt, 21)
    assert_prefix_continues(planner, rows[0], reference)


def assert_prefix_continues(planner: Planner, row: Row, reference: Reference) -> None:
    shared = row.computed // PAGE_SIZE * PAGE_SIZE
    prompt = [*row.tokens[:shared], 5, 6, 7]
    branch = planner.row(5, prompt, sampling(), prefix=row, shared=shared)
    branch.window = {i: page for i, page in row.window.items() if i < shared // PAGE_SIZE}
    planner.run([], [(branch, 3)])
    assert branch.tokens[len(prompt) :] == reference.greedy(prompt, 1)


@pytest.mark.parametrize(
    ("ratio", "windows", "max_len", "expected"),
    [
        (0.8, (0, 9), 256, True),
        (0.0, (0, 9), 256, False),
        (0.8, (0, 0), 256, False),
        (0.8, (0, 256), 256, False),
        (0.8, (9, 9), 256, True),
    ],
)
def test_when_there_are_two_pools(
    ratio: float, windows: tuple[int, ...], max_len: int, expected: bool
) -> None:
    assert has_two_pools(ratio, windows, max_len) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state_bytes": 1000, "num_states": 4}, Pools(25, states=4)),  # and the padding slot
        ({"state_bytes": 500, "state_ratio": 1.0}, Pools(25, states=9)),
        ({"state_bytes": 500, "state_ratio": 0.0}, Pools(45, states=1)),  # no sequence runs without one
        ({"state_bytes": 5000, "num_states": 2}, Pools(0)),
        ({"state_bytes": 1000, "num_states": 4, "ratio": 0.5}, Pools(33, 16, 4)),
        ({"ratio": 0.0}, Pools(50)),  # 100 bytes and 100 bytes a page, less the padding page
        ({"ratio": 0.5}, Pools(66, 33)),
        ({"ratio": 0.5, "least": 40}, Pools(60, 40)),  # full pages give way to what one window needs
        ({"ratio": 0.5, "most": 20}, Pools(20, 10)),
        ({"ratio": 0.5, "most": 20, "least": 15}, Pools(20, 15)),
        ({"ratio": 0.1, "most": 4, "least": 15}, Pools(4, 4)),  # no row has two window pages
        ({"num_bytes": 250, "ratio": 0.5}, Pools(0, 0)),
        ({"full_page_bytes": 0, "ratio": 0.5}, Pools(404, 101)),  # pages of no layer are numbers
        ({"full_page_bytes": 0, "ratio": 0.5, "most": 200}, Pools(200, 101)),
    ],
)
def test_share(changes: dict[str, Any], expected: Pools) -> None:
    room = MemoryBudget(
        **(
            {
                "num_bytes": 10_200,
                "full_page_bytes": 100,
                "window_page_bytes": 100,
                "most": 1000,
                "longest": 10,
            }
            | changes
        )
    )
    pools = divide_memory(room)
    assert pools == expected
    taken = (pools.full + 1) * room.full_page_bytes + (pools.window + 1) * room.window_page_bytes
    taken += (pools.states + 1) * room.state_bytes
    assert not pools.full or not room.ratio or taken <= room.num_bytes
