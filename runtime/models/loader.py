"""Fills a model's weights from a checkpoint, strictly: every weight once, nothing left over, every shape as config.json says.

Each rank reads only its share of the bytes (files are mapped, not read), straight to the weight's final place, so the peak
is the weights and one tensor's share beside them.
"""

from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from runtime.devices.base import Progress
from runtime.errors import ModelError
from runtime.layers.weight import Layer, Part, Weight, finish, named_weights
from runtime.models.checkpoint import TensorSlice, tensors, weight_files
from runtime.models.config import ModelConfig
from runtime.models.stacked import unstacked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Fused = dict[str, tuple[str, str]]  # module of the checkpoint -> fused module here, part
Renames = tuple[tuple[str, str], ...]  # pieces of the checkpoint's names -> ours, one after the other
PREFIXES = ("model.", "bert.", "roberta.", "distilbert.")
LEFT_OUT = ("lm_head.", "cls.", "dense.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.")  # heads of models that embed
Targets = dict[tuple[str, str], Weight]  # (weight name, part name) -> weight


def resolve_dtype(wish: str, config: ModelConfig, supported: tuple[str, ...]) -> torch.dtype:
    """The dtype to compute in: `wish`, or for "auto" the checkpoint's own. Raises ModelError."""
    name = (config.dtype or "float32") if wish == "auto" else wish
    if name not in DTYPES or name not in supported:
        raise ModelError(f"dtype {name} is not supported here; set --dtype to one of {', '.join(supported)}")
    return DTYPES[name]


def load(model: Layer, fused: Fused, config: ModelConfig, folder: Path, load_format: str, seed: int, progress: Progress,
         renames: Renames = ()) -> int:
    """Fills all weights of `model` and finishes it; returns their bytes. Raises ModelError, naming tensor and file.

    `load_format` "dummy" draws weights from `seed` instead, the same for any number of ranks, and reads no files.
    """
    weights = dict(named_weights(model))
    num_bytes = sum(weight.tensor.nbytes for weight in weights.values())
    targets = {(name, part): weight for name, weight in weights.items() for part in weight.parts}
    with torch.inference_mode():
        if load_format == "dummy":
            _fill_random(targets, seed, progress)
        else:
            _fill_from_files(targets, fused, renames, config, folder, progress)
        weights.clear()
        targets.clear()  # so that packing can free what it replaces
        finish(model)
    return num_bytes


def target_name(tensor_name: str, fused: Fused, renames: Renames = ()) -> tuple[str, str]:
    """("model.layers.0.self_attn.q_proj.weight", fused) -> ("layers.0.self_attn.qkv_proj.weight", "q")."""
    for prefix in PREFIXES:
        tensor_name = tensor_name.removeprefix(prefix)
    for old, new in renames:
        tensor_name = tensor_name.replace(old, new)
    path, _, leaf = tensor_name.rpartition(".")
    parent, _, module = path.rpartition(".")
    module, part = fused.get(module, (module, ""))
    return ".".join(piece for piece in (parent, module, leaf) if piece), part


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """What some checkpoints carry though it follows from the rest, or is not used for what the model is to do. `name` is ours."""
    if config.pooling is not None and config.pooling.task == "embed" and name.startswith(LEFT_OUT):
        return True
    if config.draft_layers and (layer := name.removeprefix("layers.").partition(".")[0]).isdigit():
        return config.num_layers <= int(layer) < config.num_layers + config.draft_layers
    return name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")) or (config.is_tied and name == "lm_head.weight")


def _fill_from_files(targets: Targets, fused: Fused, renames: Renames, config: ModelConfig, folder: Path, progress: Progress) -> None:
    missing, extra = dict(targets), []
    for source in unstacked(tensors(weight_files(folder))):
        key = target_name(source.name, fused, renames)
        if key in missing:
            weight = missing.pop(key)
            _copy(source, weight, weight.parts[key[1]])
            done = len(targets) - len(missing)
            if done * 100 // len(targets) > (done - 1) * 100 // len(targets):
                progress("weights", done / len(targets))
        elif not _is_redundant(key[0], config):
            extra.append(source)
    if missing:
        name, part = next(iter(missing))
        known_as = [old for old, new in fused.items() if new[1] == part and f".{new[0]}." in name] if part else []
        shown = name.replace(fused[known_as[0]][0], known_as[0]) if known_as else name
        raise ModelError(f"the checkpoint lacks {len(missing)} weights that config.json asks for, {shown} among them; "
                         "finish the download, or use the config.json that belongs to these weights")
    if extra:
        raise ModelError(f"the checkpoint has {len(extra)} weights that {config.architecture} does not use, {extra[0].name} in "
                         f"{extra[0].file} among them; use the config.json that belongs to these weights")


def _copy(source: TensorSlice, weight: Weight, part: Part) -> None:
    raw: Any = source.raw
    shape, share = tuple(raw.get_shape()), part.share
    if shape != part.shape:
        raise ModelError(f"{source.name} in {source.file} has shape {list(shape)}, but config.json asks for {list(part.shape)}; "
                         "use the config.json that belongs to these weights")
    if raw.get_dtype() not in ("F32", "BF16", "F16", "F64"):
        raise ModelError(f"{source.name} in {source.file} is of dtype {raw.get_dtype()}; "
                         "only unquantised floating point weights are supported")
    if share.size == 0:  # another rank's
        return
    where = slice(share.start, share.start + share.size)
    weight.destination(part).copy_(raw[where] if part.dim == 0 else raw[:, where])


def _fill_random(targets: Targets, seed: int, progress: Progress) -> None:
    """Uniform in ±0.05 (norm weights: 1); each tensor from its own name, drawn whole, so that any split gives the same model."""
    for done, ((name, part_name), weight) in enumerate(targets.items(), 1):
        part = weight.parts[part_name]
        if part.share.size == 0:  # another rank's
            continue
        if "norm" in name.split(".")[-2] and name.endswith(".weight"):
            weight.destination(part).fill_(1)
        else:
            generator = torch.Generator().manual_seed(crc32(f"{seed} {name} {part_name}".encode()))
            whole: Tensor = torch.empty(part.shape).uniform_(-0.05, 0.05, generator=generator)
            weight.destination(part).copy_(whole.narrow(part.dim, part.share.start, part.share.size))
        progress("weights", done / len(targets))
