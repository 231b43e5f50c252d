"""As test_published.py, for models with recurrent layers."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.models.config.model_config import read_config
from runtime.options.model_sizes import float_bytes, weight_count

MAMBA: dict[str, Any] = {"architectures": ["MambaForCausalLM"], "vocab_size": 50280, "state_size": 16}
# fields of config.json, and weights
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "mamba-130m": (
        MAMBA | {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 24},
        129_135_360,
    ),
    "mamba-2.8b": (
        MAMBA | {"hidden_size": 2560, "intermediate_size": 5120, "num_hidden_layers": 64},
        2_768_345_600,
    ),
    "falcon-mamba-7b": (
        MAMBA
        | {
            "architectures": ["FalconMambaForCausalLM"],
            "vocab_size": 65024,
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "expand": 16,
            "num_hidden_layers": 64,
            "tie_word_embeddings": False,
        },
        7_272_665_088,
    ),
    "Jamba-v0.1": (
        {
            "architectures": ["JambaForCausalLM"],
            "vocab_size": 65536,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "mamba_dt_rank": 256,
        },
        51_570_323_328,
    ),
    "granite-4.0-h-tiny": (
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "vocab_size": 100352,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 40,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "tie_word_embeddings": True,
            "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
        },
        6_939_037_248,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_as_many_as_published(name: str, tmp_path: Path) -> None:
    fields, num_weights = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert weight_count(config, 1) + float_bytes(config) // 4 == num_weights
    assert num_weights / 4 < weight_count(config, 4, 4) < num_weights / 3.5
