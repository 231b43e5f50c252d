"""`check memory` counts the encoder of every family that has one: as many numbers as a rank allocates."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.devices.cpu.device import open_device
from runtime.devices.progress import without_progress
from runtime.layers.weight import named_weights
from runtime.models.config.model_config import read_config
from runtime.models.vision.open_encoder import open_encoder
from runtime.ranks.open_executor import open_executor
from runtime.settings import start_rank as start_rank_of
from tests.devices.drive import start_rank
from tests.models import make_tiles
from tests.models.make_audio import make_qwen_audio
from tests.models.make_deepseek_ocr import make_deepseek_ocr
from tests.models.make_dual import make_dual
from tests.models.make_gemma_vision import make_gemma_vision
from tests.models.make_glm_vision import make_glm_vision
from tests.models.make_images import Rows, Tiles
from tests.models.make_media import make_llava, make_qwen_vl
from tests.models.make_minicpmv import MiniCpmV
from tests.models.make_moonvit import Kimi
from tests.models.make_omni import make_omni
from tests.models.make_onevision import make_onevision
from tests.models.make_qwen3_vl import make_qwen3_vl
from tests.models.make_whisper import make_whisper
from tests.options.test_footprint import planned

MAKERS: dict[str, Callable[[Path], Any]] = {
    "llava": make_llava,
    "llava onevision": make_onevision,
    "qwen2-vl": partial(make_qwen_vl, version="2"),
    "qwen2.5-vl": partial(make_qwen_vl, version="2.5"),
    "qwen3-vl": make_qwen3_vl,
    "glm-4.1v": make_glm_vision,
    "gemma 3": make_gemma_vision,
    "pixtral": Rows(1).make,
    "mistral small 3.1": Rows(2).make,
    "internvl": Tiles().make,
    "llama 4": make_tiles.Llama4().make,
    "deepseek-vl": make_tiles.DeepSeekVl().make,
    "deepseek-vl, two towers": make_tiles.DeepSeekVlHybrid().make,
    "aya vision": make_tiles.AyaVision().make,
    "command a vision": make_tiles.Cohere2Vision().make,
    "idefics 3": make_tiles.Idefics3().make,
    "kimi-vl": Kimi("kimi-vl").make,
    "minicpm-v": MiniCpmV().make,
    "deepseek-ocr 2": make_deepseek_ocr,
    "qwen2.5-omni": partial(make_omni, version="2.5"),
    "qwen3-omni": partial(make_omni, version="3"),
}


# whose count is not that of the encoder alone: of texts' side, too, or without a bias that is zero
WHOLE: dict[str, Callable[[Path], Any]] = {
    "qwen2-audio": make_qwen_audio,
    "whisper": make_whisper,
    "clip": partial(make_dual, kind="clip"),
    "siglip": partial(make_dual, kind="siglip"),
}


@pytest.mark.parametrize("family", MAKERS)
def test_a_rank_allocates_what_is_counted(family: str, tmp_path: Path) -> None:
    MAKERS[family](tmp_path)
    config = read_config(tmp_path).media
    assert config is not None
    encoder: Any = open_encoder(open_device(start_rank(""), 0, torch.float32), torch.float32, config)
    assert config.num_weights == sum(weight.tensor.numel() for _, weight in named_weights(encoder))
    _, found = planned(tmp_path, dtype="float32", max_total_tokens=64)
    assert found.weights_bytes > 4 * config.num_weights and found.encodings_bytes > 0


@pytest.mark.parametrize("family", WHOLE)
def test_a_rank_measures_what_was_planned(family: str, tmp_path: Path) -> None:
    WHOLE[family](tmp_path)
    plan, found = planned(tmp_path, dtype="float32", max_total_tokens=64)
    rank = open_executor(0, start_rank_of(plan, read_config(tmp_path)), without_progress)
    rank.close()
    assert found.weights_bytes == pytest.approx(rank.ready.weights_bytes, rel=0.005)
