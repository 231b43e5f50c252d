"""One checkpoint in the other forms that weights are stored in."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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


def write_mistral(folder: Path, target: Path) -> None:
    """consolidated.safetensors and params.json, with no config.json."""
    weights = of_checkpoint(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").unlink()
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = {
        "model.embed_tokens": "tok_embeddings",
        "model.norm": "norm",
        "lm_head": "output",
        "model.": "",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    found = {}
    for name, weight in weights.items():
        module = name.split(".")[-2]
        if module in heads:  # the two numbers of a rotary pair next to each other
            halves = weight.view(heads[module], 2, -1, weight.shape[-1])
            weight = halves.transpose(1, 2).reshape(weight.shape).contiguous()
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = weight
    save_file(found, target / "consolidated.safetensors")
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "vocab_size": config["vocab_size"],
        "sliding_window": config["sliding_window"],
        "max_seq_len": config["max_position_embeddings"],
    }
    (target / "params.json").write_text(json.dumps(params))


# name -> how it is written, and --load-format of it
FORMATS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "bin": (write_bin, "auto"),
    "bin shards": (write_bin_shards, "pt"),
    "bin of old": (write_old_bin, "auto"),
    "npcache": (write_bin, "npcache"),
    "mistral": (write_mistral, "auto"),
}
