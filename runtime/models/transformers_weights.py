"""The tensors of a model of transformers, and what checkpoints have in their place: other names, and experts
one by one where transformers computes with one tensor of all experts of a layer.

  experts.gate_up_proj  [experts, 2 * inner, hidden] experts.N.gate_proj.weight above experts.N.up_proj.weight
  experts.down_proj     [experts, hidden, inner]     experts.N.down_proj.weight

Which names these are, transformers' conversions say. Checkpoints that have the tensor of all experts are read
as well.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)

from runtime.errors import ModelError
from runtime.layers.weight import SourceTensor, TensorReader, Weight, replicated_shard
from runtime.models.checkpoint import TensorSlice
from runtime.models.stacked_experts import ExpertRows


class Stack(NamedTuple):
    """A tensor of all experts of a layer, and its parts in checkpoints."""

    target: str  # end of its name
    sources: tuple[str, ...]  # ends of the parts' names, one below the other, with * for the expert


class CheckpointNames:
    """Which tensors of a checkpoint fill which tensors of a model, and which part of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError where checkpoints have a tensor in a form that is not read here."""
        self.prefix = model.base_model_prefix
        self.names = dict.fromkeys(stored_tensors(model), True)
        conversions = get_model_conversion_mapping(model)
        self.renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        self.converters = [one for one in conversions if not isinstance(one, WeightRenaming)]
        self.stacks: dict[str, Stack] = {}  # by the name of the model's tensor
        for name in self.names:
            converter = next((one for one in self.converters if _makes(one, name)), None)
            if converter is not None:
                self.stacks[name] = stack_of(converter, type(model).__name__)

    def key(self, tensor_name: str) -> tuple[str, str]:
        """Tensor and part of it that a checkpoint's tensor fills, which may have the prefix of the model's
        body or not. A part is "expert.position"."""
        name, source = rename_source_key(
            tensor_name, self.renamings, self.converters, self.prefix, self.names
        )
        if source is None or name not in self.stacks:
            return name, ""
        renamed = apply_renamings(tensor_name, self.renamings)
        expert = re.search(re.escape(source).replace(r"\*", r"(\d+)"), renamed)
        return name, f"{expert[1]}.{self.stacks[name].sources.index(source)}" if expert else ""

    def taken_apart(self, source: TensorSlice) -> Iterator[TensorSlice]:
        """A tensor of all experts as the tensors that other checkpoints have in its place; any other as it
        is."""
        stack = self.stacks.get(self.key(source.name)[0])
        shape = source.reader.get_shape()
        if stack is None or not source.name.endswith(stack.target) or len(shape) != 3:
            yield source
            return
        experts, rows, _ = shape
        size = rows // len(stack.sources)
        path = source.name.removesuffix(stack.target)
        for expert in range(experts):
            for position, end in enumerate(stack.sources):
                part = ExpertRows(source.reader, expert, position * size, size)
                yield TensorSlice(path + end.replace("*", str(expert)), source.file, part)

    def weight(self, name: str, tensor: Tensor) -> Weight:
        """A tensor as the loader fills it: whole, or by experts and parts."""
        tensor = tensor.detach()
        if tensor.ndim == 0:

            def load(reader: TensorReader) -> None:
                tensor.copy_(reader[...])

            source = SourceTensor((), 0, replicated_shard(1), load=load, other_shapes=((1,),))
            return Weight(tensor, {"": source})
        if name not in self.stacks:
            return Weight(tensor, {"": SourceTensor(tuple(tensor.shape), 0, replicated_shard(len(tensor)))})
        experts, rows, columns = tensor.shape
        count = len(self.stacks[name].sources)
        size = rows // count
        rows_of_all = tensor.view(experts * rows, columns)
        parts = {
            f"{expert}.{position}": SourceTensor(
                (size, columns), 0, replicated_shard(size), offset=expert * rows + position * size
            )
            for expert in range(experts)
            for position in range(count)
        }
        return Weight(rows_of_all, parts)


def _makes(converter: WeightConverter, name: str) -> bool:
    """Whether a conversion makes the model's tensor of this name."""
    return any(re.search(pattern, name) for pattern in converter.target_patterns)


def stack_of(converter: WeightConverter, architecture: str) -> Stack:
    """The stack that a conversion makes. Raises ModelError for a conversion of another kind."""
    target, sources = converter.target_patterns[0], tuple(converter.source_patterns)
    kinds = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
    merge, join = (MergeModulelist, 0), (Concatenate, 1)
    is_stack = kinds == [merge] and len(sources) == 1 or kinds == [merge, join]
    if not is_stack or any(source.count("*") != 1 for source in sources):
        raise ModelError(
            f"checkpoints of {architecture} keep {target} in another form than transformers computes with "
            f"({', '.join(sources)}); --model-impl transformers does not serve it"
        )
    return Stack(target, sources)


def allocate_tensors(model: PreTrainedModel, torch_device: torch.device) -> None:
    """Gives parameters and buffers memory on the device. Tied parameters stay one; buffers that no checkpoint
    has, as frequencies of rotary positions, are computed."""
    made: dict[int, nn.Parameter] = {}
    kept: list[nn.Parameter] = []  # so that no id is used twice
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                made[id(old)] = nn.Parameter(
                    torch.empty(old.shape, dtype=old.dtype, device=torch_device), requires_grad=False
                )
                made[id(old)]._is_hf_initialized = True  # type: ignore[attr-defined]
                kept.append(old)
            module._parameters[name] = made[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=torch_device)
    if torch_device.type != "meta":
        with torch.no_grad():
            model.initialize_weights()


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors that a checkpoint has, by their names; one name for tied parameters."""
    parameters = dict(model.named_parameters())
    everywhere = dict(model.named_parameters(remove_duplicate=False))
    return parameters | {
        name: tensor for name, tensor in model.state_dict().items() if name not in everywhere
    }


def ignored_weights(model: PreTrainedModel) -> tuple[str, ...]:
    """Patterns of tensors in checkpoints that the model does not read: those that transformers names, and
    copies of tied parameters."""
    first = set(dict(model.named_parameters()))
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = [f"(^|\\.){re.escape(name)}$" for name in every if name not in first]
    named = sorted(model._keys_to_ignore_on_load_unexpected or ())
    return (*named, *tied, r"rotary_emb\.inv_freq$", r"position_ids$")
