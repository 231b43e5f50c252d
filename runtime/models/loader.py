"""Fills a model's weights from a checkpoint, strictly: every weight once, nothing left over, every shape as
config.json says.

Each rank reads only its shard of the bytes, straight to the weight's final place where it can
(models/file_tensor.py). So the memory in use is at most the weights and one tensor's shard.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch

from runtime.devices.progress import Gauge, Progress, without_progress
from runtime.errors import ModelError
from runtime.layers.moe.expert_weights import ExpertWeights
from runtime.layers.parallel.replicated import REPLICATED_MODULES
from runtime.layers.quantization.ggml_weight import GgmlWeight
from runtime.layers.weight import (
    DirectReader,
    FormatLookup,
    LayerTree,
    PackedModules,
    SourceTensor,
    Weight,
    allocate_weights,
    finish_loading,
    layers_below,
    named_weights,
)
from runtime.messages.stages import Stage
from runtime.models.base import Model, names_tensors, takes_apart
from runtime.models.checkpoint import Checkpoint, TensorSlice
from runtime.models.config.gguf.container import is_gguf
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.quantization_config import Quantization
from runtime.models.config.quantization_schemes import Full, Ggml, WeightFormat
from runtime.models.config.renames import Renames
from runtime.models.config.wrappers import OTHER_WEIGHTS
from runtime.models.dummy_weights import fill_with_random
from runtime.models.fused_tensors import FusedModules, split
from runtime.models.kept_weights import leave_empty, quantized_weights
from runtime.models.stacked_experts import unstacked
from runtime.models.transposed_tensors import untransposed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# in front of the names of a model's layers; removed in this order
PREFIXES = ("thinker.", "model.", "language_model.", "model.", "bert.", "roberta.", "distilbert.")
ENCODER = "media_encoder."  # in front of the names of an encoder's layers, which are those of no decoder
LEAVES = {  # other names of the same
    "weight_scale_inv": "weight_scale",
    "activation_scale": "input_scale",
    "_weight_qdata": "weight",
    "_weight_scale": "weight_scale",
    "_weight_zero_point": "weight_zero_point",
}
CACHE_SCALES = ("k_scale", "v_scale")  # of a layer's attention, wherever below it the checkpoint has them
# a module with one of these tensors is quantized
MARKERS = ("weight_scale", "weight_packed", "qweight", "weight_absmax", "SCB", "B")
# heads that a model does not need to embed
UNUSED_HEADS = ("lm_head.", "cls.", "dense.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.")
# what the first or the last stage of a pipeline has besides layers
AT_ENDS = ("embed_tokens", "embed_norm", "norm", "lm_head", "score", "projections", "media_encoder")
Targets = dict[tuple[str, str], Weight]  # (weight name, part name) -> weight


def resolve_dtype(requested: str, config: ModelConfig, supported: tuple[str, ...]) -> torch.dtype:
    """The dtype to compute in: `requested`, or for "auto" the checkpoint's own. Raises ModelError for one
    that is not supported."""
    name = (config.dtype or "float32") if requested == "auto" else requested
    if name not in DTYPES or name not in supported:
        raise ModelError(f"dtype {name} is not supported here; set --dtype to one of {', '.join(supported)}")
    return DTYPES[name]


def load(model: Model, config: ModelConfig, checkpoint: Checkpoint, seed: int, progress: Progress) -> int:
    """Allocates and fills all weights of `model`. -> their bytes. Raises ModelError as `fill`."""
    num_bytes = allocate(model, config, checkpoint)
    fill(model, config, checkpoint, seed, progress)
    return num_bytes


def allocate(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> int:
    """Takes memory for all weights of `model`. -> their bytes. Raises ModelError."""
    allocate_weights(model, _formats(model, config, checkpoint))
    return _num_bytes(model)


def fill(
    model: Model,
    config: ModelConfig,
    checkpoint: Checkpoint,
    seed: int,
    progress: Progress,
    kept: frozenset[str] = frozenset(),
) -> None:
    """Fills all weights of `model` and finishes its layers. Raises ModelError, naming tensor and file.

    A checkpoint that is random makes weights from `seed` instead and reads no files. Weights in `kept` are
    checked and not read: the device has kept what it makes of them.
    """
    leave_empty(model, kept)
    weights = dict(named_weights(model))
    targets = {(name, part): weight for name, weight in weights.items() for part in weight.sources}
    with torch.inference_mode():
        if checkpoint.is_random:
            fill_with_random(targets, seed, progress)
        else:
            fill_from_files(targets, model, config, checkpoint, progress, take=partial(take, kept))
        weights.clear()
        targets.clear()  # so that packing can free the weights that it replaces
        _pack(model, progress)


def fill_experts(
    model: Model, config: ModelConfig, checkpoint: Checkpoint, prefix: str, weights: ExpertWeights
) -> None:
    """Takes memory for some experts of a layer of `model`, which is loaded, and fills it; the files are not
    read for anything else. `prefix`: of the names of the layer's weights. Raises ModelError."""
    formats = _formats(model, config, checkpoint)
    experts = weights.allocate(lambda name: formats(prefix + name))
    targets = {
        (name, part): weight
        for i in weights.own
        for name, weight in named_weights(experts[i], f"{prefix}experts.{i}.")
        for part in weight.sources
    }
    fill_from_files(
        targets, model, config, checkpoint, without_progress, partial(take, frozenset()), is_part=True
    )


def layer_sizes(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> list[int]:
    """Bytes of each layer's weights on this rank. The model must be one that is never filled. Raises
    ModelError."""
    allocate(model, config, checkpoint)
    return [_num_bytes(layer) for layer in model.layers]


def check_weights(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises ModelError where `load` would, judged by the headers of the files: no weights are read. The
    model must be one that is never filled."""
    allocate_weights(model, _formats(model, config, checkpoint))
    targets = {(name, part): weight for name, weight in named_weights(model) for part in weight.sources}
    fill_from_files(targets, model, config, checkpoint, without_progress, take=_check)


def target_name(tensor_name: str, packed_modules: PackedModules, renames: Renames = ()) -> tuple[str, str]:
    """Weight name and part that a checkpoint's tensor fills: "model.layers.0.self_attn.q_proj.weight" ->
    ("layers.0.self_attn.qkv_proj.weight", "q")."""
    for prefix in PREFIXES:
        tensor_name = tensor_name.removeprefix(prefix)
    for old, new in renames:
        tensor_name = tensor_name.replace(old, new)
    if tensor_name.startswith(ENCODER):
        packed_modules = REPLICATED_MODULES
    path, dot, below = tensor_name.partition(".weight.")  # bitsandbytes: weight.quant_state.bitsandbytes__nf4
    tensor_name = f"{path}.weight_{below.replace('.', '_')}" if dot else tensor_name
    path, _, leaf = tensor_name.rpartition(".")
    parent, _, module = path.rpartition(".")
    if leaf in CACHE_SCALES:
        return f"{path if module == 'self_attn' else parent}.{leaf}", ""
    module, part = packed_modules.get(module, (module, ""))
    return ".".join(name for name in (parent, module, LEAVES.get(leaf, leaf)) if name), part


def _num_bytes(layer: LayerTree) -> int:
    return (
        sum(weight.tensor.nbytes for _, weight in named_weights(layer))
        + sum(weight.num_bytes for _, weight in quantized_weights(layer))
        + sum(ggml.num_bytes for one in layers_below(layer) if (ggml := ggml_below(one)) is not None)
    )


def ggml_below(layer: LayerTree) -> GgmlWeight | None:
    """The weight of ggml's types that a layer is, or has in place of another."""
    return layer if isinstance(layer, GgmlWeight) else vars(layer).get("ggml")


def _formats(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> FormatLookup:
    quantized = None
    if is_gguf(checkpoint.folder):
        # random weights are plain ones; a head that computes in float32 has no use for packed rows
        if checkpoint.is_random or config.has_wide_head:
            return lambda name: None
    elif config.quantization is not None and not checkpoint.is_random:
        quantized = _quantized_modules(checkpoint, model, config)
    return format_lookup(config.quantization, model.packed_modules, quantized)


def _quantized_modules(checkpoint: Checkpoint, model: Model, config: ModelConfig) -> set[tuple[str, str]]:
    """(module, part) of all modules that are quantized in the files."""
    read = (source for source in checkpoint.tensors(config) if not is_ignored(source.name, model))
    found = unstacked(read, config.hidden_size)
    keys = (target_name(source.name, model.packed_modules, model.renames) for source in found)
    return {
        (path, part) for name, part in keys for path, _, leaf in [name.rpartition(".")] if leaf in MARKERS
    }


def format_lookup(
    quantization: Quantization | None, packed_modules: PackedModules, quantized: set[tuple[str, str]] | None
) -> FormatLookup:
    """Finds the format of a module, given the (module, part) that are quantized in the files (None: not
    known). The lookup raises ModelError where the parts of a fused module have different formats."""
    parts = {
        new: [(old, part) for old, (module, part) in packed_modules.items() if module == new]
        for new, _ in packed_modules.values()
    }

    def lookup(name: str) -> WeightFormat | None:
        if quantization is None:
            return None
        path = name.rstrip(".")
        parent, dot, module = path.rpartition(".")
        formats: dict[str, WeightFormat | None] = {}
        for old, part in parts.get(module, [(module, "")]):
            if quantized is None or quantization.is_online or (path, part) in quantized:
                formats[part] = formats.get(part) or quantization.format_of(parent + dot + old)
            else:
                formats.setdefault(part, None)
        if any(format is not None and isinstance(format.scheme, Ggml) for format in formats.values()):
            return _joined(formats)
        kinds = set(formats.values())
        if len(kinds) > 1:
            raise ModelError(
                f"the parts of {path} are quantised differently, which is not supported: "
                + ", ".join(
                    f"{part} {format.scheme.name if format else 'not at all'}"
                    for part, format in formats.items()
                )
            )
        format = kinds.pop()
        is_raw = format is not None and isinstance(format.scheme, Full) and format.stored is None
        return None if quantized is None and is_raw else format  # random weights are plain ones

    return lookup


def _joined(formats: dict[str, WeightFormat | None]) -> WeightFormat | None:
    """The format of a fused weight of ggml's types, one for each part; None: one of them has plain numbers,
    so all are dequantized."""
    types: list[tuple[str, str]] = []
    for part, format in formats.items():
        if format is None or not isinstance(format.scheme, Ggml):
            return None
        types.append((part, format.scheme.types[0][1]))
    return WeightFormat(Ggml(tuple(types)), "gguf")


def is_ignored(tensor_name: str, model: Model, others: tuple[str, ...] = ()) -> bool:
    """Whether a model reads nothing of a checkpoint's tensor that has the name of no weight; `others`:
    patterns of further ones."""
    return any(re.search(pattern, tensor_name) for pattern in (*model.ignored_weights, *others))


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor follows from the rest, or is not used for the model's task. `name` is ours."""
    if config.pooling is not None and config.pooling.task == "embed" and name.startswith(UNUSED_HEADS):
        return True
    if config.draft_layers and (layer := name.removeprefix("layers.").partition(".")[0]).isdigit():
        return config.num_layers <= int(layer) < config.num_layers + config.draft_layers
    return name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")) or (
        config.is_tied and name == "lm_head.weight"
    )


def fill_from_files(
    targets: Targets,
    model: Model,
    config: ModelConfig,
    checkpoint: Checkpoint,
    progress: Progress,
    take: Callable[[str, TensorSlice, Weight, SourceTensor], None],
    *,
    is_part: bool = False,
) -> None:
    """Gives each tensor of the files to `take`, with the name of its weight, the weight and the source in it.
    Raises ModelError for tensors that are missing, or left over unless the targets are a part of the
    model's."""
    key_of = (
        model.checkpoint_key
        if names_tensors(model)
        else partial(target_name, packed_modules=model.packed_modules, renames=model.renames)
    )
    missing, extra = dict(targets), list[TensorSlice]()
    size = sum(path.stat().st_size for path in checkpoint.files())
    files = _gauged(checkpoint.tensors(config), Gauge(progress, "weights", size))
    others = OTHER_WEIGHTS if config.wrapper else ()
    is_split = config.moe is None or not config.moe.is_stacked
    if is_split and config.transformers_json is None:
        is_transposed = config.moe is not None and config.moe.is_transposed
        num_experts = 0 if config.moe is None else config.moe.num_experts
        files = unstacked(files, config.hidden_size, is_transposed=is_transposed, num_experts=num_experts)
    if takes_apart(model):
        files = chain.from_iterable(map(model.taken_apart, files))
    files = split(untransposed(files, getattr(model, "transposed_modules", ())), fused_modules(model))
    for tensor in files:
        key = key_of(tensor.name)
        if key in missing:
            weight = missing.pop(key)
            take(key[0], tensor, weight, weight.sources[key[1]])
        elif not (
            is_part
            or is_elsewhere(key[0], model, config)
            or _is_redundant(key[0], config)
            or is_ignored(tensor.name, model, others)
        ):
            extra.append(tensor)
    needed = [key for key, weight in missing.items() if not weight.is_optional]
    if needed:
        raise ModelError(
            f"the checkpoint lacks {len(needed)} weights that config.json asks for, "
            f"{_name_in_files(*needed[0], model.packed_modules)} among them; "
            "finish the download, or use the config.json that belongs to these weights"
        )
    if extra:
        raise ModelError(
            f"the checkpoint has {len(extra)} weights that {config.architecture} does not use, "
            f"{extra[0].name} in {extra[0].file} among them; use the config.json that belongs to these "
            "weights"
        )


def _name_in_files(name: str, part: str, packed_modules: PackedModules) -> str:
    """The name that files have for a part of a weight, which may be fused of several modules."""
    for old, (new, new_part) in packed_modules.items():
        if part and new_part == part and f".{new}." in name:
            return name.replace(new, old)
    return name


def is_elsewhere(name: str, model: Model, config: ModelConfig) -> bool:
    """Whether a tensor is one of another stage of the pipeline. `name` is ours."""
    stage: Stage = getattr(model, "stage", Stage())
    if stage.count == 1:
        return False
    top, _, below = name.partition(".")
    index = below.partition(".")[0]
    if top == "layers" and index.isdigit():
        return int(index) < config.num_layers and int(index) not in stage.layers(config.num_layers)
    return top in AT_ENDS


def fused_modules(model: Model) -> FusedModules:
    """The fused modules that a model's checkpoints have, and it has not."""
    return getattr(model, "fused_modules", {})


def _gauged(slices: Iterator[TensorSlice], gauge: Gauge) -> Iterator[TensorSlice]:
    """Passes tensors on, and counts the bytes of each as loaded when the next one is asked for."""
    for tensor in slices:
        yield tensor
        gauge.add(tensor.num_bytes)
    gauge.finish()


def _pack(model: Model, progress: Progress) -> None:
    """Brings the weights of all layers to the form that the device computes with."""
    num_layers = sum(1 for _ in layers_below(model))
    gauge = Gauge(progress, "packing", num_layers)
    finish_loading(model, lambda: gauge.add(1))
    gauge.finish()


def _check(name: str, tensor: TensorSlice, weight: Weight, source: SourceTensor) -> None:
    reader = tensor.reader
    shape = tuple(reader.get_shape())
    wanted = (source.shape, *source.other_shapes)
    if shape not in wanted and (-1,) * len(shape) not in wanted:
        raise ModelError(
            f"{tensor.name} in {tensor.file} has shape {list(shape)}, but config.json asks for "
            f"{list(source.shape)}; "
            "use the config.json that belongs to these weights"
        )
    if reader.get_dtype() not in source.dtypes:
        raise ModelError(
            f"{tensor.name} in {tensor.file} is of dtype {reader.get_dtype()}, and "
            f"{' or '.join(source.dtypes)} was "
            "expected; use the config.json that belongs to these weights"
        )


def take(kept: frozenset[str], name: str, tensor: TensorSlice, weight: Weight, source: SourceTensor) -> None:
    """Reads this rank's part of a tensor, unless what is made of it was kept."""
    _check(name, tensor, weight, source)
    reader, shard = tensor.reader, source.shard
    if shard.size == 0 or name in kept:  # on another rank
        return
    if source.load is not None:
        source.load(reader)
        return
    index = shard.range if source.dim == 0 else (slice(None),) * source.dim + (shard.range,)
    if isinstance(reader, DirectReader):
        reader.copy_to(weight.target(source), index)
    else:
        weight.target(source).copy_(reader[index])
