"""What clients may know of the served model: number and form of its weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from runtime.http.ollama.models import short
from runtime.messages.weight_facts import WeightFacts
from runtime.model_card import weight_facts
from runtime.models.config.model_config import read_config
from tests.models.make import make_checkpoint
from tests.models.make_gguf import Type, write_gguf
from tests.models.quantise import quantise
from tests.options.test_footprint import planned


def facts(path: Path, **options: Any) -> WeightFacts:
    plan, _ = planned(path, **options)
    return weight_facts(plan, read_config(path, quantization=options.get("quantization")))


def stored_numbers(folder: Path) -> int:
    """All numbers in the safetensors files of a folder."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            count += sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())
    return count


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_are_counted(family: str, dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    level = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    assert facts(folder, dtype=dtype) == WeightFacts(stored_numbers(folder), level, "safetensors")


def test_quantized_weights_count_as_those_that_they_stand_for(tmp_path: Path) -> None:
    plain = make_checkpoint("qwen2", tmp_path / "plain", hidden_size=128, intermediate_size=256)
    quantise(plain, tmp_path, "awq")
    assert facts(tmp_path / "quantised") == WeightFacts(stored_numbers(plain), "AWQ", "safetensors")
    assert facts(plain, quantization="fp8").level == "FP8"


def test_a_gguf_file_says_its_main_type(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "plain", hidden_size=256, intermediate_size=512)
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, "llama", lambda name: Type.Q4_K if name.startswith("blk.") else Type.F32)
    numbers = sum(int(np.prod(one.shape)) for one in gguf.GGUFReader(path).tensors)
    found = facts(path)
    assert (found.num_weights, found.level, found.format) == (numbers, "Q4_K", "gguf")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (8_030_261_248, "8.0B"),
        (70_000_000_000, "70B"),
        (361_821_120, "361.82M"),
        (5_000_000, "5M"),
        (12_345, "12K"),
        (999, "999"),
    ],
)
def test_numbers_are_short(number: int, text: str) -> None:
    assert short(number) == text
