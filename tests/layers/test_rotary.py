"""Frequencies against transformers' own; the positions' part is tested with whole models."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.devices.cpu.ops import CpuOps
from runtime.layers.rotary import Rotary
from runtime.models.config.rope_config import Rope

CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.9},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_frequencies_and_scale(parameters: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=parameters | {"rope_theta": theta},
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rotary = Rotary(
        Rope(**parameters, rope_theta=theta, max_position_embeddings=512),
        64,
        CpuOps(torch.float32),
        torch.device("cpu"),
    )
    torch.testing.assert_close(rotary.frequencies, frequencies, atol=0, rtol=2e-6)
    assert rotary.scale == pytest.approx(scale)


@pytest.mark.parametrize("length", [1, 512, 513, 700, 2048])
def test_dynamic_turns_as_the_last_of_so_many(length: int) -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=512, rope_parameters=parameters
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
    rotary = Rotary(
        Rope(rope_type="dynamic", factor=4.0, max_position_embeddings=512),
        64,
        CpuOps(torch.float32),
        torch.device("cpu"),
    )
    cos, sin = rotary.tables(torch.tensor([3, length - 1, 2000]))
    angles = (length - 1) * frequencies
    torch.testing.assert_close(cos[1, 0], torch.cat((angles, angles)).cos(), atol=2e-3, rtol=0)
    torch.testing.assert_close(sin[1, 0], torch.cat((-angles, angles)).sin(), atol=2e-3, rtol=0)
