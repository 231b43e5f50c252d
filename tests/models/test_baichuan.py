"""Baichuan, for which transformers has no class: Llama's layers with queries, keys and values in one tensor,
and in Baichuan 2 a head whose rows are divided by their length (its published code). Models with 13B weights
have biases of distance in place of rotary positions. The reference is transformers' Llama with the head
normalized beforehand, and with biases in its mask."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from runtime.models.config.dense_families import BAICHUAN2_VOCAB
from runtime.models.config.model_config import read_config
from tests.devices.drive import Planner, sampling, start
from tests.models.compare import in_company, random_prompts
from tests.models.make import make_checkpoint

NUM_TOKENS = 12


def make_baichuan(folder: Path, **overrides: Any) -> None:
    """Writes a Llama's weights under Baichuan's names."""
    make_checkpoint("llama", folder, **({"num_key_value_heads": 4} | overrides))
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


def distance_biases(num_heads: int, length: int) -> Tensor:
    """Biases of a text by their definition, [1, num_heads, length, length], and -inf for what is hidden. The
    number of heads is a power of two, or one and a half times one."""
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / lower) for i in range(1, lower + 1)]
    slopes += [2 ** (-8 * i / (2 * lower)) for i in range(1, 2 * (num_heads - lower), 2)]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    biases = -torch.tensor(slopes)[:, None, None] * distance
    return biases.masked_fill(distance < 0, -torch.inf).unsqueeze(0)


def biased_reference(folder: Path, prompt: list[int], num_heads: int) -> list[int]:
    """Tokens of a Llama whose positions are all 0, which turns nothing, with biases as its mask."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + NUM_TOKENS:
            logits = model(
                torch.tensor([tokens]),
                attention_mask=distance_biases(num_heads, len(tokens)),
                position_ids=torch.zeros(1, len(tokens), dtype=torch.int64),
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_heads", [4, 6])
def test_models_with_13b_weights_have_biases_of_distance(num_heads: int, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16 * num_heads,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
    }
    make_checkpoint("llama", tmp_path / "llama", **sizes)
    make_baichuan(tmp_path / "baichuan", **sizes)
    path = tmp_path / "baichuan" / "config.json"
    fields = json.loads(path.read_text())
    fields["model_max_length"] = fields.pop("max_position_embeddings")
    path.write_text(json.dumps(fields))
    assert read_config(path.parent).context_len == fields["model_max_length"]
    prompts = random_prompts(9, 40, 70)
    expected = [biased_reference(tmp_path / "llama", prompt, num_heads) for prompt in prompts]
    for chunk in (1000, 7):
        executor, ready = start(path.parent)
        assert in_company(Planner(executor, ready, 4), prompts, NUM_TOKENS, chunk) == expected
