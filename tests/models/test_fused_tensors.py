"""Checkpoints whose tensors hold several modules: Llama in another layout gives the same tokens."""

from pathlib import Path

import pytest
import torch

from runtime.models.config.model_config import read_config
from runtime.models.fused_tensors import Fused, Rows, equal_parts, split
from tests.devices.drive import Planner, sampling, start
from tests.models.layouts import LAYOUTS
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

PROMPT = [3, 141, 59, 26, 5, 35, 89, 79]


@pytest.mark.parametrize("family", LAYOUTS)
def test_another_layout_gives_the_tokens_of_an_equal_model(family: str, tmp_path: Path) -> None:
    architecture, base, rewrite, sizes = LAYOUTS[family]
    folder = make_checkpoint(base, tmp_path, **sizes)
    expected = Reference(folder).greedy(PROMPT, 12)
    rewrite(folder)
    assert read_config(folder).architecture == architecture
    executor, ready = start(folder)
    planner = Planner(executor, ready, 4)
    row = planner.row(0, PROMPT, sampling())
    planner.prefill(row)
    while len(row.tokens) < len(PROMPT) + 12:
        planner.run([row], [])
    assert row.tokens[len(PROMPT) :] == expected


class Whole:
    """A TensorReader of a tensor in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.tensor[index]  # type: ignore[index]


@pytest.mark.parametrize("index", [slice(0, 4), slice(1, 3), slice(2, 4), slice(0, 1), slice(2, 2)])
def test_rows_of_several_ranges(index: slice) -> None:
    """A shard may lie in one range or across them."""
    tensor = torch.arange(24.0).view(8, 3)
    rows = Rows(Whole(tensor), [(1, 3), (5, 7)])
    wanted = tensor[[1, 2, 5, 6]]
    assert rows.get_shape() == [4, 3]
    assert rows[index].equal(wanted[index])
    assert rows[index, slice(1, 3)].equal(wanted[index, 1:3])


def test_layouts_name_their_modules() -> None:
    assert equal_parts("a", "b") == Fused((("a", 1), ("b", 1)))
    assert list(split(iter([]), {})) == []
