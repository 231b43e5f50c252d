"""Checkpoints whose tensors hold several modules: Llama in the layout of InternLM 2 gives the same tokens."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.models.fused_tensors import Fused, Rows, equal_parts, split
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

PROMPT = [3, 141, 59, 26, 5, 35, 89, 79]
NAMES = {
    "embed_tokens": "tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}


def in_internlm2_layout(folder: Path) -> None:
    """Rewrites a Llama checkpoint: 4 query heads, 2 key/value heads of size 16, in groups of 2 + 1 + 1."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        block = f"model.layers.{layer}."
        q, k, v = (tensors.pop(f"{block}self_attn.{one}_proj.weight") for one in "qkv")
        groups = [
            torch.cat((q[32 * i : 32 * i + 32], k[16 * i : 16 * i + 16], v[16 * i : 16 * i + 16]))
            for i in range(2)
        ]
        tensors[f"{block}attention.wqkv.weight"] = torch.cat(groups)
    for ours, theirs in NAMES.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    (folder / "config.json").write_text(json.dumps(config))


def test_internlm2_gives_the_tokens_of_an_equal_llama(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    expected = Reference(folder).greedy(PROMPT, 12)
    in_internlm2_layout(folder)
    executor, ready = start(folder)
    planner = Planner(executor, ready, 4)
    row = planner.row(0, PROMPT, sampling())
    planner.prefill(row)
    while len(row.tokens) < len(PROMPT) + 12:
        planner.run([row], [])
    assert row.tokens[len(PROMPT) :] == expected


class Whole:
    """A TensorReader of a tensor in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.tensor[index]  # type: ignore[index]


@pytest.mark.parametrize("index", [slice(0, 4), slice(1, 3), slice(2, 4), slice(0, 1), slice(2, 2)])
def test_rows_of_several_ranges(index: slice) -> None:
    """A shard may lie in one range or across them."""
    tensor = torch.arange(24.0).view(8, 3)
    rows = Rows(Whole(tensor), [(1, 3), (5, 7)])
    wanted = tensor[[1, 2, 5, 6]]
    assert rows.get_shape() == [4, 3]
    assert rows[index].equal(wanted[index])
    assert rows[index, slice(1, 3)].equal(wanted[index, 1:3])


def test_layouts_name_their_modules() -> None:
    assert equal_parts("a", "b") == Fused((("a", 1), ("b", 1)))
    assert list(split(iter([]), {})) == []
