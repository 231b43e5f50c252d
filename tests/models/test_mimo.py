"""MiMo-V2-Flash by its makers' config.json and names of tensors, and what of it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from tests.models.make import make_checkpoint
from tests.models.test_quantised import log_probabilities

PUBLISHED: dict[str, Any] = {
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "sliding_window": 6,
    "sliding_window_size": 6,
    "rope_theta": 1e5,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-5,
    "routed_scaling_factor": 1.5,
    "n_shared_experts": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
}
OTHERS = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps")  # of transformers


def publish(folder: Path, **changes: Any) -> None:
    """Rewrites a checkpoint of transformers in its makers' words."""
    path = folder / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in OTHERS}
    path.write_text(json.dumps(config | PUBLISHED | changes))
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace(".sinks", ".attention_sink_bias"): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_makers_files(tmp_path: Path) -> None:
    """Configuration and numbers are those that were written."""
    folder = make_checkpoint("mimo_v2", tmp_path)
    wanted, before = read_config(folder), log_probabilities(folder)[0]
    publish(folder)
    found = read_config(folder)
    differing = {name for name in wanted.__struct_fields__ if getattr(wanted, name) != getattr(found, name)}
    assert not differing, differing
    assert (log_probabilities(folder)[0] == before).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swa_head_dim": 32}, "swa_head_dim"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ({"v_head_dim": 48, "swa_v_head_dim": 48}, "v_head_dim 48 above head_dim 24"),
        ({"hybrid_layer_pattern": [0, 1]}, "layer_types must name"),
    ],
    ids=["heads", "sinks", "values", "layers"],
)
def test_what_no_model_has_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = make_checkpoint("mimo_v2", tmp_path)
    publish(folder, **changes)
    with pytest.raises(ModelError, match=words):
        read_config(folder)
