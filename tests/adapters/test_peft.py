"""What adapter folders are read, and how others are refused."""

from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ModelError
from runtime.models.config.lora_targets import lora_modules
from runtime.models.config.model_config import read_config
from runtime.models.config.peft import read_adapter
from tests.models.make import make_checkpoint
from tests.models.make_adapter import make_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("base"))


def test_scales_and_ranks_follow_patterns(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(
        base,
        tmp_path,
        seed=0,
        rank=4,
        alpha=8,
        rank_pattern={"k_proj": 2},
        alpha_pattern={r"layers\.1\..*v_proj": 2},
    )
    adapter = read_adapter(str(folder), lora_modules(read_config(str(base))))
    scales = {
        name: adapter.pairs[f"layers.{name}"].scale
        for name in ("0.self_attn.k_proj", "0.self_attn.v_proj", "1.self_attn.v_proj")
    }
    assert scales == {"0.self_attn.k_proj": 4.0, "0.self_attn.v_proj": 2.0, "1.self_attn.v_proj": 0.5}
    assert adapter.rank == 4 and len(adapter.pairs) == 14 and "down_proj" in adapter.targets


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "trains biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed base weights"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"r": 5}, "made for another model"),
        ({"r": "x"}, "not as PEFT writes it"),
    ],
)
def test_refused(base: Path, tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folder = make_adapter(base, tmp_path, seed=0, **config)
    with pytest.raises(ModelError, match=words.replace("(", r"\(")) as caught:
        read_adapter(str(folder), lora_modules(read_config(str(base))))
    assert str(tmp_path) not in str(caught.value)


def test_damaged_or_of_another_model(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path, seed=0, prefix="base_model.model.other.")
    with pytest.raises(ModelError, match="which this model lacks"):
        read_adapter(str(folder), lora_modules(read_config(str(base))))
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="damaged"):
        read_adapter(str(folder), lora_modules(read_config(str(base))))
    with pytest.raises(ModelError, match="adapter_config.json of the adapter cannot be read"):
        read_adapter(str(folder / "nowhere"), lora_modules(read_config(str(base))))
