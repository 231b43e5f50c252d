"""Encoders of images whose config.json or preprocessor_config.json cannot be served, and sizes of tiles."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.image_processing_utils import select_best_resolution

from runtime.errors import ModelError
from runtime.models.config.gemma_vision_config import read_gemma3
from runtime.models.config.glm_vision_config import read_glm4v
from runtime.models.config.onevision_config import PINPOINTS, OneVisionEncoder, read_onevision
from runtime.text.gemma_image_processor import read_gemma_images
from runtime.text.onevision_processor import read_tiles

SIGLIP = {"image_size": 896, "patch_size": 14, "hidden_size": 1152, "num_attention_heads": 16}
Reader = Callable[[bytes, int], Any]


@pytest.mark.parametrize(
    ("read", "fields", "message"),
    [
        (read_gemma3, {"mm_tokens_per_image": 200}, "make 256 rows, and mm_tokens_per_image is 200"),
        (read_gemma3, {"vision_config": SIGLIP | {"num_attention_heads": 5}}, "not a multiple of"),
        (read_gemma3, {"vision_config": SIGLIP | {"hidden_act": "swish"}}, "hidden_act swish"),
        (read_glm4v, {"vision_config": {"out_hidden_size": 65}}, "out_hidden_size 65 is not the text"),
        (read_glm4v, {"vision_config": {"out_hidden_size": 64, "image_size": 9}}, "smaller than a patch"),
        (read_onevision, {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio pad"),
        (read_onevision, {"vision_feature_layer": 27}, "one of 26 layers"),
        (read_onevision, {"vision_feature_layer": [-1, -2]}, "one of 26 layers"),
        (read_onevision, {"image_grid_pinpoints": [[384, 400]]}, "in multiples of 384"),
        (read_onevision, {"image_grid_pinpoints": [[384, 384 * 999]]}, "pixels at most"),
        (read_onevision, {"vision_config": SIGLIP | {"num_attention_heads": 5}}, "not a multiple of"),
    ],
)
def test_files_that_cannot_be_served(read: Reader, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(json.dumps({"vision_config": SIGLIP} | fields if read is read_gemma3 else fields).encode(), 64)


@pytest.mark.parametrize("read", [read_gemma3, read_onevision])
def test_other_towers_serve_text_alone(read: Reader) -> None:
    assert read(json.dumps({"vision_config": SIGLIP | {"model_type": "other"}}).encode(), 64) is None


def onevision() -> OneVisionEncoder:
    encoder = read_onevision(b"{}", 64)
    assert encoder is not None
    return encoder


def test_preparations_that_cannot_be_served(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text('{"do_pan_and_scan": true}')
    with pytest.raises(ModelError, match="do_pan_and_scan is not supported; set it to false"):
        read_gemma_images(tmp_path)
    for fields, message in (
        ({"size": {"height": 400, "width": 384}}, "size must be 384 x 384"),
        ({"image_grid_pinpoints": [[384, 384]]}, "other image_grid_pinpoints"),
        ({"image_std": [0, 1, 1]}, "an image_std of 0"),
    ):
        file.write_text(json.dumps(fields))
        with pytest.raises(ModelError, match=message):
            read_tiles(tmp_path, onevision())


@pytest.mark.parametrize("size", [(1, 1), (384, 384), (700, 300), (1000, 1001), (33, 5000), (4000, 3000)])
def test_the_best_size_is_that_of_transformers(size: tuple[int, int]) -> None:
    assert onevision().best_size(*size) == select_best_resolution(size, [list(one) for one in PINPOINTS])
