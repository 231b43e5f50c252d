"""Positions of tokens in grids against transformers' own, and decodes behind an image by graphs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLConfig, Qwen2VLModel

from runtime.devices.cpu.ops import CpuOps
from runtime.errors import ModelError
from runtime.layers.rotary import Rotary, section_axes
from runtime.models.config.rope_config import Rope
from runtime.ranks.open_executor import DEVICES as MODULES
from runtime.ranks.token_grids import TokenGrids
from runtime.scheduling.drafts import Draft
from tests.devices import taped
from tests.devices.drive import Planner, sampling, speculation, start
from tests.models.make_media import QWEN_TEXT, QWEN_VISION, make_qwen_vl

# the second follows the first
PLAIN = [0, 0, -1]  # the grid begins and ends where the tokens around it say
GRIDS = np.array([[3, 1, 4, 2, 1, *PLAIN], [11, 1, 1, 5, 1, *PLAIN], [20, 1, 3, 3, 1, *PLAIN]], np.float64)
LENGTH = 34


def expected_positions() -> tuple[np.ndarray, int]:
    """int64 [LENGTH, 3], and what is added to places behind the last grid."""
    config = Qwen2VLConfig(vision_config=QWEN_VISION | {"embed_dim": 32}, text_config=QWEN_TEXT)
    with torch.device("meta"):
        model = Qwen2VLModel(config)
    kinds = torch.zeros(1, LENGTH, dtype=torch.int32)
    for first, frames, rows, columns in GRIDS[[0, 2], :4].astype(int).tolist():
        kinds[0, first : first + frames * rows * columns] = 1
    kinds[0, 11:16] = 2  # as a video: transformers separates neighbours by their kinds alone
    grids = torch.tensor(GRIDS[:, 1:4].astype(int).tolist()) * torch.tensor([1, 2, 2])
    found, delta = model.get_rope_index(
        torch.zeros(1, LENGTH, dtype=torch.int64), kinds, grids[[0, 2]], grids[[1]]
    )
    return found[:, 0].T.numpy(), int(delta)


@pytest.mark.parametrize("chunk", [1, 4, 9, LENGTH])
def test_positions_equal_transformers_however_a_prompt_is_cut(chunk: int) -> None:
    expected, delta = expected_positions()
    grids = TokenGrids(3, torch.device("cpu"))
    shifts = grids.reserve()
    grids.admit(1, GRIDS.ravel())
    for begin in range(0, LENGTH, chunk):
        places = np.arange(begin, min(begin + chunk, LENGTH))
        slots, counts = np.array([0, 1]), np.array([2, len(places)])
        found = grids.positions(slots, counts, np.concatenate(([70, 71], places)))
        found = np.repeat(found[:, None], 3, axis=1) if found.ndim == 1 else found
        assert found[:2].tolist() == [[70] * 3, [71] * 3], "another slot's tokens"
        assert (found[2:] == expected[places]).all()
    assert shifts.tolist() == [0, delta, 0]
    assert grids.shifted(np.array([1, 0]), np.array([50, 50])).tolist() == [50 + delta, 50]
    grids.admit(1, np.empty(0))
    assert not grids.has_any and shifts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("gap_s", [0.5, 1.0, 0.7, 0.041, 3.3])
def test_moments_of_a_video_are_as_far_apart_as_its_time(gap_s: float) -> None:
    """Positions in a video are those of transformers; text behind it goes on behind the greatest of them."""
    config = Qwen2_5_VLConfig(vision_config=QWEN_VISION | {"tokens_per_second": 2}, text_config=QWEN_TEXT)
    with torch.device("meta"):
        model = Qwen2_5_VLModel(config)
    frames, rows, columns = 7, 2, 3
    kinds = torch.tensor([[0, 0, *[2] * (frames * rows * columns)]])
    size = torch.tensor([[frames, 2 * rows, 2 * columns]])
    expected, _ = model.get_rope_index(
        torch.zeros_like(kinds), kinds, None, size, torch.tensor([gap_s], dtype=torch.float32)
    )
    grids = TokenGrids(1, torch.device("cpu"))
    grids.admit(0, np.array([2, frames, rows, columns, 2 * gap_s, *PLAIN]))
    count = kinds.shape[1]
    found = grids.positions(np.array([0]), np.array([count + 1]), np.arange(count + 1))
    assert (found[:-1] == expected[:, 0].T.numpy()).all()
    assert found[-1].tolist() == [int(expected.max()) + 1] * 3
    assert grids.shifted(np.array([0]), np.array([count])).tolist() == [int(expected.max()) + 1]


def test_graphs_decode_with_the_positions_of_their_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODULES, "taped", taped.__name__)
    make_qwen_vl(tmp_path, "2")

    def run(grid: list[int], **options: Any) -> list[list[int]]:
        executor, ready = start(tmp_path, page_size=4, max_len=128, **options)
        planner = Planner(executor, ready, 4)
        rows = [planner.row(slot, [5, 9, 100, 7, 8, 3, 60, 2], sampling()) for slot in range(2)]
        for row in rows:
            planner.prefill(row)
        executor.runner.slots.grids.admit(1, np.array(grid, np.float64))
        for _ in range(12):
            planner.run(rows, [])
        return [row.tokens for row in rows]

    plain, expected = run([]), run([0, 1, 2, 3, 1, *PLAIN])
    assert plain[0] == expected[0] and plain[1] != expected[1]
    graphs: dict[str, Any] = {"device": "taped", "graph_sizes": [2]}
    assert run([0, 1, 2, 3, 1, *PLAIN], **graphs) == expected and run([], **graphs) == plain


@pytest.mark.parametrize("options", [{}, {"device": "taped", "graph_sizes": [2]}], ids=["", "graphs"])
@pytest.mark.parametrize("shape", [{}, {"topk": 2, "num_steps": 3, "num_draft_tokens": 6}], ids=["", "trees"])
def test_a_draft_model_rotates_by_them(
    options: dict[str, Any], shape: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts for itself is right as often behind a grid as it is behind text."""
    monkeypatch.setitem(MODULES, "taped", taped.__name__)
    make_qwen_vl(tmp_path, "2")

    def run(grid: list[int], drafts: int) -> tuple[list[list[int]], int]:
        settings = {"speculation": speculation("STANDALONE", tmp_path, **shape)} if drafts else {}
        executor, ready = start(tmp_path, page_size=4, max_len=128, **options, **settings)
        planner = Planner(executor, ready, 4)
        planner.follows = drafts > 0
        rows = [planner.row(slot, [5, 9, 100, 7, 8, 3, 60, 2], sampling()) for slot in range(2)]
        for row in rows:
            planner.prefill(row)
        executor.runner.slots.grids.admit(1, np.array(grid, np.float64))  # type: ignore[attr-defined]
        steps = 0
        while any(len(row.tokens) < 24 for row in rows):
            planner.run([] if drafts else rows, [], [(row, Draft.own(drafts)) for row in rows if drafts])
            steps += 1
        return [row.tokens[:24] for row in rows], steps

    drafts = shape.get("num_draft_tokens", 4) - 1
    expected, _ = run([0, 1, 2, 3, 1, *PLAIN], 0)
    found, steps = run([0, 1, 2, 3, 1, *PLAIN], drafts)
    assert found == expected and found[0] != found[1]
    _, of_text = run([], drafts)
    assert (steps, of_text) == (4, 4) if not shape else max(steps, of_text) <= 7, "16 without drafts"


def test_pairs_of_dimensions_turn_with_frame_row_and_column() -> None:
    rotary = Rotary(Rope(mrope_section=(1, 2, 1)), 8, CpuOps(torch.float32), torch.device("cpu"))
    rotary.check_sections()
    places = torch.tensor([[4, 7, 9]])
    cos, sin = rotary.angles(places)
    for pair, place in enumerate((4, 7, 7, 9)):
        of_one = rotary.angles(torch.tensor([place]))
        assert cos[0, pair] == of_one[0][0, pair] and sin[0, pair] == of_one[1][0, pair]
    rope = Rope(mrope_section=(3, 2, 1), mrope_interleaved=True)
    assert section_axes(rope) == [0, 1, 2, 0, 1, 0]
    with pytest.raises(ModelError, match="add up to 4"):
        Rotary(Rope(mrope_section=(1, 2, 2)), 8, CpuOps(torch.float32), torch.device("cpu")).check_sections()
