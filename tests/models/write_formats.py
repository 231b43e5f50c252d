"""One checkpoint in the other forms that weights are stored in."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.write_mistral import write_mistral

SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def of_checkpoint(folder: Path, target: Path) -> dict[str, Tensor]:
    """Copies all but the weights of a folder. -> its weights."""
    target.mkdir()
    for name in SMALL_FILES:
        if (folder / name).exists():
            shutil.copy(folder / name, target)
    return load_file(folder / "model.safetensors")


def write_bin(folder: Path, target: Path) -> None:
    """One file of torch.save."""
    torch.save(of_checkpoint(folder, target), target / "pytorch_model.bin")


def write_bin_shards(folder: Path, target: Path) -> None:
    """Two files of torch.save and an index, next to a file that holds no weights."""
    weights = of_checkpoint(folder, target)
    names = sorted(weights)
    index = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, target / file)
        index |= dict.fromkeys(part, file)
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    torch.save({"lr": 0.1}, target / "training_args.bin")


def write_old_bin(folder: Path, target: Path) -> None:
    """A file as torch wrote it before 1.6: a pickle with the bytes behind it; tensors under `state_dict`."""
    weights = {"state_dict": of_checkpoint(folder, target)}
    torch.save(weights, target / "model.pt", _use_new_zipfile_serialization=False)


# name -> how it is written, and --load-format of it
FORMATS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "bin": (write_bin, "auto"),
    "bin shards": (write_bin_shards, "pt"),
    "bin of old": (write_old_bin, "auto"),
    "npcache": (write_bin, "npcache"),
    "mistral": (write_mistral, "auto"),
}
