"""Adapters with random numbers as PEFT writes them, and the model that each of them makes of a checkpoint,
with its weights merged."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from runtime.models.config.model_config import read_config

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def weights_of_uses(base: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's weights; those of a block that layers share once for each use, as PEFT adapts them."""
    weights, recurrent = load_file(base / "model.safetensors"), read_config(base).recurrent
    if recurrent is None or recurrent.shared is None:
        return weights
    uses, count = [i for i, kind in enumerate(recurrent.kinds) if kind == "parallel"], recurrent.shared.count
    for number, use in enumerate(uses):
        first = f".{uses[number % count]}.shared_transformer."
        for name in [name for name in weights if first in name]:
            weights[name.replace(first, f".{use}.shared_transformer.")] = weights[name].clone()
    return weights


def make_adapter(
    base: Path,
    folder: Path,
    *,
    seed: int,
    targets: tuple[str, ...] = ALL,
    rank: int = 4,
    alpha: float = 8.0,
    prefix: str = "base_model.model.",
    **config: Any,
) -> Path:
    """Changes the `targets` of all layers, but not those of experts, by about as much as their weights
    are."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights_of_uses(base).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and name.endswith(".weight") and ".experts." not in name:
            own = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
            tensors[f"{prefix}{module}.lora_A.weight"] = (
                torch.randn(own, weight.shape[1], generator=generator) * 0.15
            )
            tensors[f"{prefix}{module}.lora_B.weight"] = (
                torch.randn(weight.shape[0], own, generator=generator) * 0.15
            )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": rank,
                "lora_alpha": alpha,
                "target_modules": list(targets),
                "bias": "none",
                "modules_to_save": None,
                **config,
            }
        )
    )
    return folder


def merge(base: Path, adapter: Path, folder: Path, scales: dict[str, float]) -> Path:
    """The checkpoint W + scale * B A; `scales` by the module's last name, "" for the others."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    weights, pairs = weights_of_uses(base), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in pairs if ".lora_A." in name]:
        module = name.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
        scale = scales.get(module.rpartition(".")[2], scales[""])
        weights[f"{module}.weight"] += scale * pairs[name.replace(".lora_A.", ".lora_B.")] @ pairs[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
