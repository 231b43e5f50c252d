"""Prepared images against transformers' own processor on Pillow."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CLIPImageProcessor

from runtime.errors import InvalidRequest, ModelError
from runtime.messages.media import Media, MediaKind
from runtime.models.config.image_config import read_image_config
from runtime.models.config.media_config import LlavaEncoder, read_llava
from runtime.text.image_processor import ClipImageProcessor, clip_pixels
from runtime.text.media_prompts import expand

SMALL = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


@pytest.mark.parametrize("shape", [(28, 28), (40, 50), (300, 31), (5, 9), (1, 3), (29, 1000)])
@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        SMALL | {"resample": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.4, 0.3]},
        {"size": {"height": 20, "width": 30}, "crop_size": {"height": 33, "width": 25}},
        {"size": 17, "crop_size": 21},
        SMALL | {"do_normalize": False},
        SMALL | {"do_rescale": False},
        SMALL | {"do_resize": False},
        SMALL | {"do_center_crop": False},
    ],
    ids=str,
)
def test_pixels_equal_transformers(settings: dict[str, Any], shape: tuple[int, int], tmp_path: Path) -> None:
    image = np.random.default_rng(4).integers(0, 256, (*shape, 3), dtype=np.uint8)
    processor = CLIPImageProcessor(**settings)
    expected = processor(image, return_tensors="np", input_data_format="channels_last")["pixel_values"][0]
    for name, fields in (
        ("preprocessor_config.json", settings),
        ("processor_config.json", {"image_processor": processor.to_dict()}),
    ):
        (tmp_path / name).write_text(json.dumps(fields, default=int))
        found = clip_pixels(image, read_image_config(tmp_path), "field")
        assert found.dtype == np.float32 and (found == expected).all()


def encoder(**fields: Any) -> LlavaEncoder:
    vision = {"hidden_size": 8, "image_size": 28, "patch_size": 7, "num_attention_heads": 2}
    raw = json.dumps({"image_token_index": 9, "vision_config": vision | fields}).encode()
    found = read_llava(raw, 16)
    assert found is not None
    return found


def media(kind: MediaKind = MediaKind.IMAGE, digest: bytes = b"d") -> Media:
    return Media(kind=kind, param="field", digest=digest, values=np.zeros((1, 30, 40, 3), np.uint8))


def test_a_prepared_image_has_its_tokens_and_a_digest_of_file_and_preparation(tmp_path: Path) -> None:
    digests = set()
    for settings in (SMALL, SMALL | {"image_mean": [0.5, 0.5, 0.5]}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        processor = ClipImageProcessor(encoder(), read_image_config(tmp_path))
        digests |= {processor.prepare(media(digest=digest)).digest for digest in (b"d", b"e", b"d")}
        prepared = processor.prepare(media())
        assert prepared.token_ids == [9] * 16 and prepared.positions.tolist() == list(range(16))
        with pytest.raises(InvalidRequest, match="field: this model takes images, and no sounds"):
            processor.prepare(media(MediaKind.AUDIO))
    assert len(digests) == 4
    with pytest.raises(InvalidRequest, match="field: the image is 28 x 28 pixels when prepared"):
        ClipImageProcessor(encoder(image_size=14), read_image_config(tmp_path)).prepare(media())
    ids, inputs = expand([1, 9, 2, 9], {MediaKind.IMAGE: 9}, [prepared, prepared])
    assert ids == [1, *[9] * 16, 2, *[9] * 16] and [one.start for one in inputs] == [1, 18]


def test_a_folder_that_does_not_say_how(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no preprocessor_config.json"):
        read_image_config(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 0}')
    with pytest.raises(ModelError, match="preprocessor_config.json has a size"):
        read_image_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_feature_layer": [-2, -5]}, "joins several layers"),
        ({"vision_feature_layer": -9}, "none of the 2 layers"),
        ({"projector_hidden_act": "tanh"}, "projector_hidden_act tanh is not supported"),
        ({"vision_feature_select_strategy": "cls"}, "neither default nor full"),
        ({"vision_config": {"hidden_size": 7, "num_attention_heads": 2}}, "not a multiple"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"vision_config": {"num_hidden_layers": 2}}
    with pytest.raises(ModelError, match=message):
        read_llava(json.dumps(base | fields).encode(), 16)
    assert read_llava(b'{"vision_config": {"model_type": "siglip_vision_model"}}', 16) is None
