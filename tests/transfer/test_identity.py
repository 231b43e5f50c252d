"""Servers take each other's pages where they mean the same by their bytes."""

import json
from pathlib import Path

import msgspec
import pytest

from runtime.models.config.model_config import ModelConfig, read_config
from runtime.options.facts import DEVICES, MachineFacts
from runtime.options.parse import from_argv
from runtime.options.resolve import resolve
from runtime.transfer.open_fetches import transfer_identity

POCKET = Path(__file__).parents[2] / "runtime" / "pocket"
MACHINE = MachineFacts(cores=8, memory_bytes=2**36, entropy=1)
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def latent_model(folder: Path) -> ModelConfig:
    hf = json.loads((POCKET / "config.json").read_text())
    del hf["head_dim"]
    (folder / "config.json").write_text(json.dumps(hf | LATENT))
    return read_config(str(folder))


def identity(model: ModelConfig, words: str) -> bytes:
    device = msgspec.structs.replace(DEVICES["npu"], dtypes=("bfloat16", "float16"))
    argv = ["--model-path", str(POCKET), "--load-format", "dummy", *words.split()]
    return transfer_identity(resolve(from_argv(argv), model, device, MACHINE), model)


@pytest.mark.parametrize("is_latent", [False, True])
def test_pages_in_nz_are_others(is_latent: bool, tmp_path: Path) -> None:
    model = latent_model(tmp_path) if is_latent else read_config(str(POCKET))
    plain, in_nz = (identity(model, words) for words in ("", "--npu-nz-cache"))
    assert plain != in_nz
    assert plain == identity(model, "--tp-size 2"), "ranks divide pages anew"
    assert (in_nz == identity(model, "--npu-nz-cache --tp-size 2")) == is_latent, "but not heads in NZ"
