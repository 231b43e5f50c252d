"""Fills a model's weights from a checkpoint, strictly: every weight once, nothing left over, every shape as
config.json says.

Each rank reads only its share of the bytes (files are mapped, not read), straight to the weight's final
place, so the peak is the weights and one tensor's share beside them.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from runtime.devices.executor import Progress
from runtime.errors import ModelError
from runtime.layers.quantization.quantized_weight import Storage
from runtime.layers.weight import Layer, Lookup, Part, Weight, finish, named_weights, open_weights
from runtime.models.checkpoint import TensorSlice, tensors, weight_files
from runtime.models.config import ModelConfig
from runtime.models.quantization_config import Quantization
from runtime.models.quantization_schemes import Stored
from runtime.models.stacked_experts import unstacked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Fused = dict[str, tuple[str, str]]  # module of the checkpoint -> fused module here, part
Renames = tuple[tuple[str, str], ...]  # pieces of the checkpoint's names -> ours, one after the other
PREFIXES = ("model.", "bert.", "roberta.", "distilbert.")
LEAVES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}  # other names of the same
CACHE_SCALES = ("k_scale", "v_scale")  # of a layer's attention, wherever below it the checkpoint has them
MARKS = ("weight_scale", "weight_packed", "qweight")  # a module that has one is quantised
# heads of models that embed
LEFT_OUT = ("lm_head.", "cls.", "dense.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.")
DRAWN = 1 << 22  # numbers of a tensor of random weights; what is larger repeats them
Targets = dict[tuple[str, str], Weight]  # (weight name, part name) -> weight


def resolve_dtype(wish: str, config: ModelConfig, supported: tuple[str, ...]) -> torch.dtype:
    """The dtype to compute in: `wish`, or for "auto" the checkpoint's own. Raises ModelError."""
    name = (config.dtype or "float32") if wish == "auto" else wish
    if name not in DTYPES or name not in supported:
        raise ModelError(f"dtype {name} is not supported here; set --dtype to one of {', '.join(supported)}")
    return DTYPES[name]


def load(
    model: Layer,
    fused: Fused,
    config: ModelConfig,
    folder: Path,
    load_format: str,
    seed: int,
    progress: Progress,
    renames: Renames = (),
) -> int:
    """Fills all weights of `model` and finishes it; returns their bytes. Raises ModelError, naming tensor and
    file.

    `load_format` "dummy" draws weights from `seed` instead, the same for any number of ranks, and reads no
    files.
    """
    marked = (
        _marked(folder, fused, renames)
        if config.quantization is not None and load_format != "dummy"
        else None
    )
    open_weights(model, stored_by(config.quantization, fused, marked))
    weights = dict(named_weights(model))
    num_bytes = sum(weight.tensor.nbytes for weight in weights.values()) + sum(
        storage.num_bytes for storage in storages(model)
    )
    targets = {(name, part): weight for name, weight in weights.items() for part in weight.parts}
    with torch.inference_mode():
        if load_format == "dummy":
            _fill_random(targets, seed, progress)
        else:
            _fill_from_files(targets, fused, renames, config, folder, progress, take=_copy)
        weights.clear()
        targets.clear()  # so that packing can free what it replaces
        finish(model)
    return num_bytes


def layer_sizes(model: Any, config: ModelConfig, folder: Path, load_format: str) -> list[int]:
    """Bytes of each layer's weights on this rank, of a model that is not filled and never will be. Raises
    ModelError."""
    renames = getattr(model, "renames", ())
    marked = (
        _marked(folder, model.fused, renames)
        if config.quantization is not None and load_format != "dummy"
        else None
    )
    open_weights(model, stored_by(config.quantization, model.fused, marked))
    return [
        sum(weight.tensor.nbytes for _, weight in named_weights(layer))
        + sum(storage.num_bytes for storage in storages(layer))
        for layer in model.layers
    ]


def look(model: Layer, fused: Fused, config: ModelConfig, folder: Path, renames: Renames = ()) -> None:
    """Whether `load` would find all that it needs, by the headers of the files; nothing is read. Raises
    ModelError."""
    marked = _marked(folder, fused, renames) if config.quantization is not None else None
    open_weights(model, stored_by(config.quantization, fused, marked))
    targets = {(name, part): weight for name, weight in named_weights(model) for part in weight.parts}
    _fill_from_files(targets, fused, renames, config, folder, lambda phase, fraction: None, take=_check)


def target_name(tensor_name: str, fused: Fused, renames: Renames = ()) -> tuple[str, str]:
    """("model.layers.0.self_attn.q_proj.weight", fused) -> ("layers.0.self_attn.qkv_proj.weight", "q")."""
    for prefix in PREFIXES:
        tensor_name = tensor_name.removeprefix(prefix)
    for old, new in renames:
        tensor_name = tensor_name.replace(old, new)
    path, _, leaf = tensor_name.rpartition(".")
    parent, _, module = path.rpartition(".")
    if leaf in CACHE_SCALES:
        return f"{path if module == 'self_attn' else parent}.{leaf}", ""
    module, part = fused.get(module, (module, ""))
    return ".".join(piece for piece in (parent, module, LEAVES.get(leaf, leaf)) if piece), part


def storages(layer: Layer) -> Iterator[Storage]:
    """All weights in few bits below a layer."""
    for child in vars(layer).values():
        for one in child if isinstance(child, list) else [child]:
            if isinstance(one, Storage):
                yield one
            elif isinstance(one, Layer):
                yield from storages(one)


def _marked(folder: Path, fused: Fused, renames: Renames) -> set[tuple[str, str]]:
    """(module here, part) of all that the files have quantised."""
    keys = (target_name(source.name, fused, renames) for source in tensors(weight_files(folder)))
    return {(path, part) for name, part in keys for path, _, leaf in [name.rpartition(".")] if leaf in MARKS}


def stored_by(quantization: Quantization | None, fused: Fused, marked: set[tuple[str, str]] | None) -> Lookup:
    """How a module here is stored, given what the files have quantised. Raises ModelError where its parts are
    not stored alike."""
    parts = {
        new: [(old, part) for old, (module, part) in fused.items() if module == new]
        for new, _ in fused.values()
    }

    def lookup(name: str) -> Stored | None:
        if quantization is None:
            return None
        path = name.rstrip(".")
        parent, dot, module = path.rpartition(".")
        found: dict[str, Stored | None] = {}
        for old, part in parts.get(module, [(module, "")]):
            if marked is None or quantization.is_online or (path, part) in marked:
                found[part] = found.get(part) or quantization.of(parent + dot + old)
            else:
                found.setdefault(part, None)
        kinds = set(found.values())
        if len(kinds) > 1:
            raise ModelError(
                f"the parts of {path} are quantised differently, which is not supported: "
                + ", ".join(
                    f"{part} {stored.scheme.name if stored else 'not at all'}"
                    for part, stored in found.items()
                )
            )
        return kinds.pop()

    return lookup


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """What some checkpoints carry though it follows from the rest, or is not used for what the model is to
    do. `name` is ours."""
    if config.pooling is not None and config.pooling.task == "embed" and name.startswith(LEFT_OUT):
        return True
    if config.draft_layers and (layer := name.removeprefix("layers.").partition(".")[0]).isdigit():
        return config.num_layers <= int(layer) < config.num_layers + config.draft_layers
    return name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")) or (
        config.is_tied and name == "lm_head.weight"
    )


def _fill_from_files(
    targets: Targets,
    fused: Fused,
    renames: Renames,
    config: ModelConfig,
    folder: Path,
    progress: Progress,
    take: Callable[[TensorSlice, Weight, Part], None],
) -> None:
    missing, extra, done = dict(targets), [], 0
    total = sum(not weight.is_optional for weight in targets.values())
    found = tensors(weight_files(folder))
    for source in found if config.moe is not None and config.moe.is_stacked else unstacked(found):
        key = target_name(source.name, fused, renames)
        if key in missing:
            weight = missing.pop(key)
            take(source, weight, weight.parts[key[1]])
            done += not weight.is_optional
            if not weight.is_optional and done * 100 // total > (done - 1) * 100 // total:
                progress("weights", done / total)
        elif not _is_redundant(key[0], config):
            extra.append(source)
    if missing := {key: weight for key, weight in missing.items() if not weight.is_optional}:
        name, part = next(iter(missing))
        known_as = (
            [old for old, new in fused.items() if new[1] == part and f".{new[0]}." in name] if part else []
        )
        shown = name.replace(fused[known_as[0]][0], known_as[0]) if known_as else name
        raise ModelError(
            f"the checkpoint lacks {len(missing)} weights that config.json asks for, {shown} among them; "
            "finish the download, or use the config.json that belongs to these weights"
        )
    if extra:
        raise ModelError(
            f"the checkpoint has {len(extra)} weights that {config.architecture} does not use, {extra[0].name} in "
            f"{extra[0].file} among them; use the config.json that belongs to these weights"
        )


def _check(source: TensorSlice, weight: Weight, part: Part) -> None:
    raw: Any = source.raw
    shape = tuple(raw.get_shape())
    if shape != part.shape and shape not in part.shapes:
        raise ModelError(
            f"{source.name} in {source.file} has shape {list(shape)}, but config.json asks for {list(part.shape)}; "
            "use the config.json that belongs to these weights"
        )
    if raw.get_dtype() not in part.dtypes:
        raise ModelError(
            f"{source.name} in {source.file} is of dtype {raw.get_dtype()}, and {' or '.join(part.dtypes)} was expected; "
            "use the config.json that belongs to these weights"
        )


def _copy(source: TensorSlice, weight: Weight, part: Part) -> None:
    _check(source, weight, part)
    raw, share = cast(Any, source.raw), part.share
    if share.size == 0:  # another rank's
        return
    if part.load is not None:
        part.load(raw)
        return
    where = slice(share.start, share.start + share.size)
    weight.destination(part).copy_(raw[where] if part.dim == 0 else raw[(slice(None),) * part.dim + (where,)])


def _fill_random(targets: Targets, seed: int, progress: Progress) -> None:
    """Uniform in ±0.05 (norm weights: 1); each tensor from its own name, alike for all ranks, so that any
    split gives the same model."""
    for done, ((name, part_name), weight) in enumerate(targets.items(), 1):
        part = weight.parts[part_name]
        if part.share.size == 0 or weight.is_optional:  # another rank's; or nobody's
            continue
        if part.load is not None:
            part.load(
                Drawn(part, torch.Generator().manual_seed(crc32(f"{seed} {name} {part_name}".encode())))
            )
        elif "norm" in name.split(".")[-2] and name.endswith(".weight"):
            weight.destination(part).fill_(1)
        else:
            generator = torch.Generator().manual_seed(crc32(f"{seed} {name} {part_name}".encode()))
            _draw(weight.destination(part), part, generator)
        progress("weights", done / len(targets))


def _draw(target: Tensor, part: Part, generator: torch.Generator) -> None:
    """Rows of a large tensor repeat: drawing 8B numbers one by one would take minutes."""
    rows = min(part.shape[0], max(1, DRAWN // max(1, math.prod(part.shape[1:]))))
    drawn: Tensor = torch.empty(rows, *part.shape[1:]).uniform_(-0.05, 0.05, generator=generator)
    share = slice(part.share.start, part.share.start + part.share.size)
    if rows == part.shape[0]:
        target.copy_(drawn.narrow(part.dim, share.start, part.share.size))
        return
    drawn = drawn.to(target.dtype).to(target.device)
    places = torch.arange(part.shape[0], device=target.device) % rows
    target.copy_(
        drawn.index_select(0, places[share])
        if part.dim == 0
        else drawn.narrow(part.dim, share.start, part.share.size)[places]
    )


class Drawn:
    """A tensor of random numbers in place of a checkpoint's, whole on every rank; indexed as safetensors' own
    slices are."""

    def __init__(self, part: Part, generator: torch.Generator) -> None:
        self.dtype = part.dtypes[0]
        self.tensor = DRAWS[part.draw](part.shape, self.dtype, generator)

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, where: Any) -> Tensor:
        return self.tensor[where]


def _drawn_weight(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> Tensor:
    if dtype in ("I32", "I8"):
        return (
            torch.randint(
                -128, 128, (*shape, 4 if dtype == "I32" else 1), dtype=torch.int8, generator=generator
            )
            .flatten()
            .view(torch.int32 if dtype == "I32" else torch.int8)
            .view(shape)
        )
    values = torch.empty(shape).uniform_(-1, 1, generator=generator)
    return (values * 448).to(torch.float8_e4m3fn) if dtype == "F8_E4M3" else values * 0.05


# what a part says of its numbers -> (shape, dtype, generator) -> tensor; together they give weights of about
# ±0.05
DRAWS: dict[str, Callable[[tuple[int, ...], str, torch.Generator], Tensor]] = {
    "": _drawn_weight,
    "scale": lambda shape, dtype, generator: torch.empty(shape).uniform_(1e-4, 2e-4, generator=generator),
    "input scale": lambda shape, dtype, generator: torch.full(shape, 0.02),
    "zero": lambda shape, dtype, generator: torch.zeros(shape),
}
