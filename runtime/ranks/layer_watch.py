"""Sees what the layers of a model compute: calls hooks (--forward-hooks), and keeps tensors for a file of
each step (--debug-tensor-dump-*).

A layer has the name by which its weights are found, as `layers.0.mlp.down_proj`. Its output is what its
`forward` returns. Blocks of a decoder, `layers.0`, return their output and the residual apart; here it is the
sum of both, which is what transformers calls a hidden state. Every step is computed layer by layer.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.errors import StartError
from runtime.layers.weight import Layer, LayerTree
from runtime.messages.diagnosis import Diagnosis, LayerHook
from runtime.models.base import Model
from runtime.models.norm_sums import SummedLayer
from runtime.ranks.tensor_dump import TensorFiles

Output: TypeAlias = Tensor | tuple[Tensor, ...]


class Hook(Protocol):
    """What a factory of --forward-hooks returns."""

    def __call__(self, layer: Layer, inputs: tuple[object, ...], output: Output) -> Output | None:
        """`inputs`: what the layer was called with. -> what stands for its output; None: the output."""
        ...


class LayerWatch:
    """The hooks and the files of a rank, and the model that they are attached to."""

    def __init__(self, hooks: Sequence[tuple[LayerHook, Hook]], files: TensorFiles | None) -> None:
        """`files`: None: no tensors are kept."""
        self.hooks = hooks
        self.files = files
        self.model: weakref.ref[Model] | None = None

    def forward(self, model: Model, batch: ForwardBatch) -> Tensor:
        """Model.forward. What a hook raises ends the rank, whose death names it."""
        if self.model is None or self.model() is not model:
            self._attach(model)
        if self.files is None:
            return model.forward(batch)
        self.files.begin(batch)
        hidden = model.forward(batch)
        self.files.end()
        return hidden

    def _attach(self, model: Model) -> None:
        for name, layer in named_layers(model):
            hooks = [hook for setup, hook in self.hooks if matches(name, setup.target_modules)]
            files = self.files if self.files is not None and self.files.wants(name) else None
            if hooks or files is not None:
                attach(layer, name, hooks, files)
        self.model = weakref.ref(model)


def open_watch(device: Device, diagnosis: Diagnosis) -> LayerWatch | None:
    """What the rank of a device watches; None: nothing. Raises StartError."""
    if not diagnosis.watches_layers:
        return None
    hooks = [(setup, open_hook(setup)) for setup in diagnosis.hooks]
    rank = device.stage.index * device.collectives.size + device.collectives.rank
    return LayerWatch(hooks, None if diagnosis.dump is None else TensorFiles(rank, diagnosis.dump))


def open_hook(setup: LayerHook) -> Hook:
    """The hook that a factory makes. Raises StartError."""
    module, _, function = setup.hook_factory.partition(":")
    try:
        hook: Hook = getattr(import_module(module), function)(setup.config)
    except Exception as error:  # whatever the user's module and function do
        raise StartError(
            f"--forward-hooks: {setup.hook_factory} made no hook ({type(error).__name__}: {error}); it is "
            "package.module:function, found by Python (PYTHONPATH=FOLDER), and called with `config`"
        ) from None
    if not callable(hook):
        raise StartError(
            f"--forward-hooks: {setup.hook_factory} returned {type(hook).__name__}; it returns a function "
            "of (layer, inputs, output)"
        )
    return hook


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of the patterns', with `model.` before it or without."""
    return any(fnmatchcase(name, pattern.removeprefix("model.")) for pattern in patterns)


def named_layers(tree: LayerTree, prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """All layers below a model with their names, from the top down."""
    for name, child in tree.children():
        if isinstance(child, Layer):
            yield prefix + name, child
            yield from named_layers(child, f"{prefix}{name}.")


def attach(layer: Layer, name: str, hooks: Sequence[Hook], files: TensorFiles | None) -> None:
    """Has the output of a layer pass through hooks and into files. Layers that are neither blocks nor have a
    `forward` are left alone: those above or below them compute."""
    if (end := getattr(type(layer), "after_attention", None)) is not None:
        vars(layer)["after_attention"] = _block_end(weakref.ref(layer), end, name, hooks, files)
    elif (forward := getattr(type(layer), "forward", None)) is not None:
        vars(layer)["forward"] = _forward(weakref.ref(layer), forward, name, hooks, files)


def _forward(
    layer: Callable[[], Layer | None],
    forward: Callable[..., Output],
    name: str,
    hooks: Sequence[Hook],
    files: TensorFiles | None,
) -> Callable[..., Output]:
    """The layer's `forward`, watched. It holds the layer weakly, whose memory goes when it is dropped."""

    def watched(*inputs: object, **named: object) -> Output:
        own = layer()
        assert own is not None, "a layer that was dropped is called"
        return _seen(own, inputs, forward(own, *inputs, **named), name, hooks, files)

    return watched


def _block_end(
    layer: Callable[[], Layer | None],
    end: Callable[..., tuple[Tensor, Tensor]],
    name: str,
    hooks: Sequence[Hook],
    files: TensorFiles | None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A block's `after_attention`, watched: the residual that it returns is the block's output."""

    def watched(attended: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        own = layer()
        assert own is not None, "a layer that was dropped is called"
        x, residual = end(own, attended, residual, batch)
        if isinstance(own, SummedLayer) and own.output_ranks is not None:
            x = own.output_ranks.all_reduce(x)
        hidden = _seen(own, (attended, residual), x + residual, name, hooks, files)
        assert isinstance(hidden, Tensor), f"a hook of {name} returned no tensor"
        return torch.zeros_like(hidden), hidden

    return watched


def _seen(
    layer: Layer,
    inputs: tuple[object, ...],
    output: Output,
    name: str,
    hooks: Sequence[Hook],
    files: TensorFiles | None,
) -> Output:
    if not isinstance(output, Tensor | tuple):  # of a layer that computes in parts
        return output
    for hook in hooks:
        replaced = hook(layer, inputs, output)
        output = output if replaced is None else replaced
    return output if files is None else files.see(name, output)
