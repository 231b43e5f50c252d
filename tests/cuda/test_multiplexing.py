"""PD multiplexing on a card: the tokens of steps whose prompts and decodes run on two parts of it are those
of transformers, with graphs and without.

    .venv/bin/python -m pytest -m cuda tests/cuda/test_multiplexing.py
"""

from pathlib import Path
from typing import Any

import pytest

from runtime.messages.multiplexing import Multiplexing
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

pytestmark = pytest.mark.cuda
PROMPTS = [[5, 9, 100, 7], list(range(40, 63)), [3] * 9, list(range(100, 217))]
NUM_TOKENS = 24
MULTIPLEXING = Multiplexing(num_divisions=2, rows_divisor=4)  # the second one from 4 decodes on
SMALL: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_len": 256,
    "max_total_tokens": 4096,
    "memory_fraction": 0.5,
    "page_size": 16,
}


def answers(folder: Path, graph_sizes: list[int], **options: Any) -> list[list[int]]:
    """Sequences join one by one, in chunks of 11 tokens, while those before them decode; each step is
    launched before the result of the one before it has come."""
    executor, ready = start(folder, graph_sizes=graph_sizes, **SMALL, **options)
    assert [executor.capture(size).error for size in graph_sizes] == [""] * len(graph_sizes)
    planner, rows = Planner(executor, ready, 16), list[Row]()
    for slot, prompt in enumerate(PROMPTS):
        row = planner.row(slot, prompt, sampling())
        while row.computed < row.prompt_len:
            planner.run(rows, [(row, min(11, row.prompt_len - row.computed))])
        rows.append(row)
    while any(len(row.tokens) < row.prompt_len + NUM_TOKENS for row in rows):
        planner.run(rows, [])
    executor.close()
    return [row.tokens[row.prompt_len :][:NUM_TOKENS] for row in rows]


@pytest.mark.parametrize("graph_sizes", [[], [1, 2, 4]])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2", "qwen3_moe"])
def test_tokens_with_and_without(family: str, graph_sizes: list[int], tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert answers(folder, graph_sizes) == expected
    assert answers(folder, graph_sizes, multiplexing=MULTIPLEXING) == expected
