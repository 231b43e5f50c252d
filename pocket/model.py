"""The shape of pocket, its optimizers, and how it is written to disk.

Checkpoints are safetensors and JSON only, so that reading one can never run code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from pocket.tokenizer import CONTEXT, VOCABULARY

END_OF_TEXT, END_OF_TURN = 0, 2
ROPE_THETA = 10000.0
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": ROPE_THETA,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 5,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": END_OF_TEXT,
    "torch_dtype": "bfloat16",
}


def build() -> Qwen3ForCausalLM:
    """Make the model with fresh weights, drawn from torch's current seed."""
    settings = {k: v for k, v in SHAPE.items() if k not in {"rope_theta", "rope_scaling", "torch_dtype"}}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": ROPE_THETA}
    net: Qwen3ForCausalLM = Qwen3ForCausalLM(Qwen3Config(**settings))
    return net


def optimizers(model: Qwen3ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding and the norms.

    There are two of Muon, each with half of the matrices, so that two threads can step them.
    """
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else rest).append(parameter)
    return [
        *(
            torch.optim.Muon(half, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
            for half in (matrices[::2], matrices[1::2])
        ),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save_checkpoint(
    folder: Path, model: Qwen3ForCausalLM, opts: list[torch.optim.Optimizer], state: dict[str, Any]
) -> None:
    """Write everything that is needed to go on training."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    for i, opt in enumerate(opts):
        for j, entry in opt.state_dict()["state"].items():
            tensors.update({f"optimizer.{i}.{j}.{k}": v.contiguous() for k, v in entry.items()})
    save_file(tensors, folder / "checkpoint.tmp")
    (folder / "checkpoint.tmp").replace(folder / "checkpoint.safetensors")
    (folder / "checkpoint.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(
    folder: Path, model: Qwen3ForCausalLM, opts: list[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Read a checkpoint back; returns the state it was saved with."""
    tensors = load_file(folder / "checkpoint.safetensors")
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    model.load_state_dict(weights, strict=False)
    for i, opt in enumerate(opts):
        content = opt.state_dict()
        for name, tensor in tensors.items():
            if name.startswith(f"optimizer.{i}."):
                _, _, j, key = name.split(".")
                content["state"].setdefault(int(j), {})[key] = tensor
        opt.load_state_dict(content)
    state: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    return state


def export(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write weights in bf16 and the settings that Hugging Face tools expect."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors.tmp", metadata={"format": "pt"})
    (folder / "model.safetensors.tmp").chmod(0o644)
    (folder / "model.safetensors.tmp").replace(folder / "model.safetensors")
    generation = {"eos_token_id": [END_OF_TURN, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    for name, content in (("config.json", SHAPE), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
