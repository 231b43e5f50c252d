"""Baichuan, for which transformers has no class: Llama's layers with queries, keys and values in one tensor,
and in Baichuan 2 a head whose rows are divided by their length (its published code). The reference is
transformers' Llama with the head normalized beforehand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from runtime.errors import ModelError
from runtime.models.config.dense_families import BAICHUAN2_VOCAB
from runtime.models.config.model_config import read_config
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint

NUM_TOKENS = 12


def make_baichuan(folder: Path, **overrides: Any) -> None:
    """Writes a Llama's weights under Baichuan's names."""
    make_checkpoint("llama", folder, num_key_value_heads=4, **overrides)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{path}{part}_proj.weight") for part in "qkv"]
        tensors[f"{path}W_pack.weight"] = torch.cat(parts)
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    del fields["num_key_value_heads"], fields["attention_bias"], fields["mlp_bias"]
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["BaichuanForCausalLM"]}))


def reference(folder: Path, prompt: list[int], *, normalizes: bool) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        if normalizes:
            weight = model.lm_head.weight
            weight.copy_(weight / weight.norm(dim=1, keepdim=True))
        while len(tokens) < len(prompt) + NUM_TOKENS:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("vocab_size", [259, BAICHUAN2_VOCAB])
def test_greedy_equals_the_reference(vocab_size: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "vocab_size": vocab_size}
    make_checkpoint("llama", tmp_path / "llama", num_key_value_heads=4, **sizes)
    make_baichuan(tmp_path / "baichuan", **sizes)
    prompt = list(range(30, 60))
    expected = reference(tmp_path / "llama", prompt, normalizes=vocab_size == BAICHUAN2_VOCAB)
    executor, ready = start(tmp_path / "baichuan")
    planner = Planner(executor, ready, 4)
    row = planner.row(0, prompt, sampling())
    planner.prefill(row, chunk=11)
    while len(row.tokens) < len(prompt) + NUM_TOKENS:
        planner.run([row], [])
    assert row.tokens[len(prompt) :] == expected


def test_models_with_13b_weights_are_refused(tmp_path: Path) -> None:
    make_baichuan(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["model_max_length"] = fields.pop("max_position_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="alibi"):
        read_config(tmp_path)
