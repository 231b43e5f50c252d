"""Images as patches against transformers' own processor on Pillow, and files that cannot be served."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from runtime.errors import InvalidRequest, ModelError
from runtime.messages.media import Media, MediaKind, TokenGrid
from runtime.models.config.model_config import read_config
from runtime.models.config.patch_image_config import PatchImageConfig, read_patch_images, read_patch_videos
from runtime.models.config.qwen_vl_config import QwenVlEncoder, read_qwen2_vl, read_qwen25_vl
from runtime.text.patch_image_processor import PatchImageProcessor, image_patches, video_patches
from tests.models.make_media import PLACEHOLDER, QWEN_PREPARATION, make_qwen_vl

SHAPES = [(40, 50), (8, 8), (3, 5), (300, 31), (1, 199), (500, 700), (12, 20)]


def encoder(**fields: Any) -> QwenVlEncoder:
    vision = {"patch_size": 4, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
    raw = {"image_token_id": 9, "vision_config": vision | fields}
    return read_qwen2_vl(json.dumps(raw).encode(), 64)


def config(folder: Path, **fields: Any) -> PatchImageConfig:
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_PREPARATION | fields))
    return read_patch_images(folder, encoder())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"size": {"shortest_edge": 900, "longest_edge": 1000}, "resample": 2}, {"do_normalize": False}],
    ids=str,
)
def test_patches_equal_transformers(settings: dict[str, Any], shape: tuple[int, int], tmp_path: Path) -> None:
    image = np.random.default_rng(4).integers(0, 256, (*shape, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(**QWEN_PREPARATION | settings)
    expected = processor(image, return_tensors="np", input_data_format="channels_last")
    own = config(tmp_path, **settings)
    size = own.resized(*shape)
    patches = image_patches(image, size, own)
    assert [[1, size[0] // 4, size[1] // 4]] == expected["image_grid_thw"].tolist()
    frames = np.repeat(patches[:, :, None], 2, axis=2)
    assert patches.dtype == np.float32
    assert (frames.reshape(len(frames), -1) == expected["pixel_values"]).all()


def processor(own: PatchImageConfig) -> PatchImageProcessor:
    return PatchImageProcessor(encoder(), own, own, list)


def media(height: int, width: int, kind: MediaKind = MediaKind.IMAGE) -> Media:
    return Media(kind=kind, param="field", digest=b"d", values=np.zeros((1, height, width, 3), np.uint8))


def test_a_prepared_image_has_its_tokens_and_their_grid(tmp_path: Path) -> None:
    prepared = processor(config(tmp_path)).prepare(media(40, 48))
    assert prepared.grid == (1, 10, 12) and prepared.token_grids == (TokenGrid(0, 1, 5, 6),)
    assert prepared.token_ids == [9] * 30 and prepared.positions.tolist() == list(range(30))
    other = processor(config(tmp_path, min_pixels=300)).prepare(media(40, 48))
    assert other.digest != prepared.digest
    as_is = processor(config(tmp_path, do_resize=False))
    assert as_is.prepare(media(40, 48)).grid == (1, 10, 12)
    for given, message in (
        (media(40, 50), "multiples of 8 pixels, not 50 x 40"),
        (media(8, 8 * 201), "1608 x 8 pixels is too narrow"),
        (media(8, 8, MediaKind.AUDIO), "takes images and videos, and no sounds"),
    ):
        with pytest.raises(InvalidRequest, match=f"field: .*{message}"):
            as_is.prepare(given)


@pytest.mark.parametrize("version", ["2", "2.5"])
def test_weights_are_counted(version: str, tmp_path: Path) -> None:
    model = make_qwen_vl(tmp_path, version)
    found = read_config(tmp_path).media
    assert found is not None and found.placeholder_id == PLACEHOLDER
    assert found.num_weights == sum(one.numel() for one in model.model.visual.parameters())


def test_files_that_cannot_be_served(tmp_path: Path) -> None:
    for fields, message in (
        ({"hidden_act": "swish"}, "hidden_act swish is not supported"),
        ({"hidden_size": 65}, "hidden_size 65 is not the text model's hidden_size 64"),
        ({"num_heads": 3}, "3 heads for a size of 32"),
    ):
        with pytest.raises(ModelError, match=message):
            encoder(**fields)
    with pytest.raises(ModelError, match="window_size 20 is smaller than 2 patches of 14"):
        read_qwen25_vl(b'{"vision_config": {"window_size": 20}}', 3584)
    for fields, message in (
        ({"patch_size": 14}, "a patch_size of 14, and config.json one of 4"),
        ({"max_pixels": 100}, "no pixels between its bounds"),
        ({"image_std": [0, 1, 1]}, "an image_std of 0"),
    ):
        with pytest.raises(ModelError, match=message):
            config(tmp_path, **fields)


def video_config(folder: Path) -> PatchImageConfig:
    return read_patch_videos(folder, encoder(), config(folder))


def test_files_say_how_videos_are_prepared(tmp_path: Path) -> None:
    assert video_config(tmp_path).bounds == (128 * 28 * 28, 768 * 28 * 28), "no file speaks of videos"
    fields = QWEN_PREPARATION | {"size": {"shortest_edge": 64, "longest_edge": 999}, "resample": None}
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": fields}))
    assert video_config(tmp_path).bounds == (64, 999)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(fields | {"merge_size": 4}))
    with pytest.raises(ModelError, match=r"video_preprocessor_config\.json has a merge_size of 4"):
        video_config(tmp_path)


def test_long_videos_become_smaller_and_moments_have_two_frames(tmp_path: Path) -> None:
    own = config(tmp_path, size={"shortest_edge": 64, "longest_edge": 2**24})
    assert own.resized(2000, 3000) == (2000, 3000)
    height, width = own.resized(2000, 3000, num_frames=100)
    assert 0.9 * 2**25 < 100 * height * width <= 2**25 and abs(width / height - 1.5) < 0.05
    frames = np.random.default_rng(4).integers(0, 256, (3, 16, 24, 3), dtype=np.uint8)
    found = video_patches(frames, (16, 24), own)
    assert found.shape == (2 * 24, 3, 2, 4, 4)
    for moment, depth, frame in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        expected = image_patches(frames[frame], (16, 24), own)
        assert (found.reshape(2, 24, 3, 2, 4, 4)[moment, :, :, depth] == expected).all()
