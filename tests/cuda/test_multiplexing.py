"""PD multiplexing on a card: the tokens of steps whose prompts and decodes run on two parts of it are those
of transformers, with graphs and without, and both parts run at the same time.

    .venv/bin/python -m pytest -m cuda tests/cuda/test_multiplexing.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_both_parts_run_at_the_same_time() -> None:
    """A product that fills a part of the card takes as long beside one on the other part as alone, within a
    third; on the streams of one whole card it would take twice as long."""
    from runtime.devices.cuda.green_contexts import open_partitions

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    opened = open_partitions(Multiplexing(num_divisions=2), device)
    assert opened is not None
    partition = opened.of(1000)  # the one with the most even parts
    x = torch.randn(4096, 4096, device=device)

    def took(*streams: Any) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(20):
                    x @ x
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    took(*partition)  # a warm-up
    alone = max(took(partition.prompts), took(partition.decodes))
    together = took(*partition)
    print(f"alone {alone:.1f} ms, together {together:.1f} ms")
    assert together < 1.33 * alone
