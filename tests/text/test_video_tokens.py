"""Tokens of videos whose times a prompt names, sizes of their frames, and files that cannot be served."""

import json

import numpy as np
import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from runtime.errors import ModelError
from runtime.messages.media import MediaInput, MediaKind, TokenGrid
from runtime.models.config.encoder_parts import MomentMarks
from runtime.models.config.patch_image_config import PatchImageConfig, PixelBounds
from runtime.models.config.qwen3_vl_config import read_qwen3_vl
from runtime.models.vision.learned_positions import cubic_taps, linear_taps
from runtime.scheduling.encodings import token_grids
from runtime.text.media_prompts import Prepared, expand
from runtime.text.video_tokens import moment_times, moments_apart

QWEN = MomentMarks(
    row_id=9, start_id=7, end_id=8, form="<{:.1f} seconds>", time_first=True, replaces_own=True
)
GLM = MomentMarks(row_id=9, start_id=7, end_id=8, form="{:.0f}", time_first=False, replaces_own=False)


def test_times_are_of_the_middle_or_of_the_first_frame() -> None:
    assert moment_times((0.0, 0.5, 1.75), 2, QWEN) == [0.25, 1.75]
    assert moment_times((0.0, 0.5, 1.75), 2, GLM) == [0, 1]


def test_each_moment_has_a_grid_between_its_marks() -> None:
    def encode(text: str) -> list[int]:
        return [100 + len(text)]

    before = moments_apart((2, 1, 2), [0.25, 10.5], QWEN, encode)
    assert before.token_ids == [113, 7, 9, 9, 8, 114, 7, 9, 9, 8]
    assert before.positions.tolist() == [2, 3, 7, 8]
    assert before.token_grids == (TokenGrid(2, 1, 1, 2), TokenGrid(7, 1, 1, 2))
    behind = moments_apart((2, 1, 2), [0, 1], GLM, encode)
    assert behind.token_ids == [7, 9, 9, 8, 101, 7, 9, 9, 8, 101]
    assert behind.positions.tolist() == [1, 2, 6, 7]
    media = MediaInput(
        kind=MediaKind.VIDEO,
        digest=b"",
        start=20,
        positions=behind.positions,
        values=np.empty(0, np.float32),
        token_grids=behind.token_grids,
    )
    own = [1, 1, 2, 1, 0, 0, -1]
    assert token_grids((media,)).tolist() == [21, *own, 26, *own]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1, 7, 9, 8, 2], [1, 5, 5, 2]), ([7, 9, 8], [5, 5]), ([7, 9, 2], [7, 5, 5, 2]), ([9, 8], [5, 5, 8])],
)
def test_marks_on_both_sides_are_replaced_with_a_placeholder(prompt: list[int], expected: list[int]) -> None:
    file = Prepared(
        kind=MediaKind.VIDEO,
        digest=b"",
        values=np.empty(0, np.float32),
        token_ids=[5, 5],
        positions=np.arange(2, dtype=np.int32),
        replaced=(7, 8),
    )
    ids, (media,) = expand(prompt, {MediaKind.VIDEO: 9}, [file])
    assert ids == expected and media.start == expected.index(5)


@pytest.mark.parametrize(
    ("prompt", "expected", "starts"),
    [
        ([1, 9, 2], [1, 22, 9, 5, 22, 2], [1]),
        ([1, 21, 9, 21], [1, 23, 9, 5, 23], [1]),
        ([9, 9, 22], [22, 9, 5, 24, 9, 5, 24], [0, 3]),
        ([24, 9], [24, 22, 9, 5, 22], [1]),  # there is no token of 26
    ],
)
def test_newlines_join_with_those_of_an_image(
    prompt: list[int], expected: list[int], starts: list[int]
) -> None:
    """Tokens 21 to 24 are one to four newlines."""
    joined = {(20 + a, 20 + b): 20 + a + b for a in range(1, 5) for b in range(1, 5) if a + b < 5}
    file = Prepared(
        kind=MediaKind.IMAGE,
        digest=b"",
        values=np.empty(0, np.float32),
        token_ids=[22, 9, 5, 22],
        positions=np.array([2], np.int32),
        joined=joined,
    )
    ids, media = expand(prompt, {MediaKind.IMAGE: 9}, [file] * len(starts))
    assert ids == expected and [one.start for one in media] == starts
    assert all(ids[one.start + 2] == 5 for one in media)


@pytest.mark.parametrize("shape", [(2, 90, 30), (5, 7, 300), (3, 40, 60), (24, 400, 300), (4, 16, 3000)])
def test_bounds_of_all_frames_give_sizes_of_transformers(shape: tuple[int, int, int]) -> None:
    config = PatchImageConfig(
        size=PixelBounds(2048, 65536), patch_size=4, temporal_patch_size=2, spans_frames=True
    )
    expected = smart_resize(*shape, factor=8, min_pixels=2048, max_pixels=65536)
    assert config.resized(*shape[1:], shape[0]) == expected


def test_positions_between_entries_of_a_table() -> None:
    entries, weights = linear_taps(np.arange(4), 4, 7)
    assert entries.tolist() == [[0, 1], [2, 3], [4, 5], [6, 6]]
    assert weights.tolist() == [[1, 0]] * 4
    entries, weights = cubic_taps(np.arange(2), 2, 4)
    assert entries.tolist() == [[0, 0, 1, 2], [1, 2, 3, 3]]
    assert np.allclose(weights.sum(axis=1), 1) and np.allclose(weights[0], weights[0][::-1])
    assert linear_taps(np.zeros(1, np.int64), 1, 5)[0].tolist() == [[0, 1]], "one patch is at the begin"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"deepstack_visual_indexes": [0, 27]}, "must be different layers of the 27"),
        ({"deepstack_visual_indexes": [1, 1]}, "must be different layers"),
        ({"out_hidden_size": 65}, "out_hidden_size 65 is not the text model's hidden_size 64"),
        ({"hidden_act": "swish"}, "hidden_act swish is not supported"),
    ],
    ids=str,
)
def test_files_that_cannot_be_served(fields: dict[str, object], message: str) -> None:
    raw = {"vision_config": {"out_hidden_size": 64} | fields}
    with pytest.raises(ModelError, match=message):
        read_qwen3_vl(json.dumps(raw).encode(), 64)
