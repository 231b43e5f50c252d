"""Tiny checkpoints with the tokens that transformers gives for them, and sequences that run in company."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.devices.drive import Planner, Row, sampling
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.reference import Reference

Prompts = Sequence[list[int]]


class Expected(NamedTuple):
    """A checkpoint, and what transformers makes of it."""

    folder: Path
    reference: Reference
    tokens: list[list[int]]  # greedy, of each prompt


Checkpoints = Callable[[str], Expected]


def random_prompts(*sizes: int) -> list[list[int]]:
    """Prompts of these lengths, always the same ones."""
    random = np.random.default_rng(7)
    return [random.integers(0, VOCAB_SIZE, size).tolist() for size in sizes]


def expected_of(folder: Path, prompts: Prompts, num_tokens: int) -> Expected:
    """What transformers generates from a folder that it can read."""
    reference = Reference(folder)
    return Expected(folder, reference, [reference.greedy(prompt, num_tokens) for prompt in prompts])


def open_checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
    make: Callable[[str, Path], Path],
    prompts: Prompts,
    num_tokens: int,
) -> Checkpoints:
    """Cases by name, each made by `make(case, folder)` when it is first asked for."""

    @cache
    def checkpoint(case: str) -> Expected:
        return expected_of(make(case, tmp_path_factory.mktemp("model")), prompts, num_tokens)

    return checkpoint


def maker(cases: dict[str, tuple[str, dict[str, object]]]) -> Callable[[str, Path], Path]:
    """A `make` of open_checkpoints for cases that are a family and what differs from its sizes."""

    def make(case: str, folder: Path) -> Path:
        family, overrides = cases[case]
        return make_checkpoint(family, folder, **overrides)  # type: ignore[arg-type]

    return make


def finish(
    planner: Planner, waiting: list[Row], running: list[Row], num_tokens: int, chunk: int, pause: int = 0
) -> None:
    """Extends the waiting rows one by one, chunk by chunk, while the others decode, until all have
    `num_tokens`; `pause`: decode steps before the next row joins."""

    def decodes() -> list[Row]:
        return [row for row in running if len(row.tokens) < row.prompt_len + num_tokens]

    for row in waiting:
        total = len(row.tokens)
        while row.computed < total:
            planner.run(decodes(), [(row, min(chunk, total - row.computed))])
        running.append(row)
        for _ in range(pause):
            planner.run(decodes(), [])
    while rows := decodes():
        planner.run(rows, [])


def in_company(
    planner: Planner, prompts: Prompts, num_tokens: int, chunk: int, pause: int = 0
) -> list[list[int]]:
    """The new tokens of sequences that join while others decode, so most steps mix decode and extend rows."""
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(prompts)]
    finish(planner, rows, [], num_tokens, chunk, pause)
    return [row.tokens[row.prompt_len :] for row in rows]
