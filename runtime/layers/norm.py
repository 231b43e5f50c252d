"""Norms of hidden states, in the kinds of models/config/block.py."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from runtime.devices.base import Collectives, Device
from runtime.devices.operands import NormInputs
from runtime.layers.fused_ops import fused_ops_of
from runtime.layers.linear import Linear
from runtime.layers.weight import Layer, SourceTensor, TensorReader, Weight, replicated_shard
from runtime.models.config.block import NormKind


class RMSNorm(Layer):
    """RMSNorm over the last dimension, of size `size`. Every rank has the whole weight.

    Quantization tools may move outliers out of the weights behind a norm; their checkpoints have a bias for
    the norm, unless `may_have_bias` is False.
    """

    def __init__(
        self, device: Device, dtype: torch.dtype, size: int, eps: float, *, may_have_bias: bool = True
    ) -> None:
        self.ops, self.fused = device.ops, fused_ops_of(device)
        self.eps = eps
        # what becomes of the norm: a layer's packed weight, once there is one
        self.feeds: Callable[[], object] = _nothing
        self.is_read_once: Callable[[], bool] = _unknown  # whether nothing else reads what becomes of it
        self.weight = Weight.empty(
            (size,), {"": SourceTensor((size,), 0, replicated_shard(size))}, dtype, device.torch_device
        )
        self.shift: Tensor | None = None  # the bias, where the checkpoint has one
        source = SourceTensor((size,), 0, replicated_shard(size), load=self._load_bias)
        self.bias = Weight(torch.empty(0), {"": source}, is_optional=True) if may_have_bias else None

    def _load_bias(self, reader: TensorReader) -> None:
        self.shift = torch.empty_like(self.weight.tensor).copy_(reader[...])

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        normed = self.ops.rms_norm(x, self.weight.tensor, self.eps)
        return normed if self.shift is None else normed + self.shift

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        if self.shift is not None:
            normed, total = self.ops.add_rms_norm(x, residual, self.weight.tensor, self.eps)
            return normed + self.shift, total
        given = x, residual, self.weight.tensor, self.eps, self.feeds()
        found = self.fused.quantized_norm(*given) if self.is_read_once() else None
        return self.fused.add_rms_norm(*given) if found is None else found

    def inputs(self, x: Tensor, residual: Tensor) -> NormInputs | None:
        """What `add` makes its results of, for a layer that makes them itself; None: there is a bias as
        well."""
        return None if self.shift is not None else NormInputs(x, residual, self.weight.tensor, self.eps)

    def add_of_ranks(self, x: Tensor, residual: Tensor, ranks: Collectives) -> tuple[Tensor, Tensor]:
        """`add` of the sum over ranks of x, of which each has a part."""
        inputs = self.inputs(x, residual)
        found = None if inputs is None else self.fused.add_rms_norm_of_ranks(inputs, self.feeds())
        return self.add(ranks.all_reduce(x), residual) if found is None else found

    def add_wide(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(norm of x + residual, the same as float32 where one launch gives both, x + residual)."""
        if self.shift is not None:
            normed, total = self.add(x, residual)
            return normed, None, total
        return self.fused.add_rms_norm_wide(x, residual, self.weight.tensor, self.eps)


def added(norm: "Norm", x: Tensor, residual: Tensor, ranks: Collectives | None) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual). `ranks`: the norm is a RMSNorm, and x one of their parts of a sum
    that is taken first; None: x is whole."""
    if ranks is None:
        return norm.add(x, residual)
    assert isinstance(norm, RMSNorm), "only these sum"
    return norm.add_of_ranks(x, residual, ranks)


# first projections of attention and of feed-forwards
FIRST = ("qkv_proj", "qkv_a_proj", "gate_up_proj")


def feed(norm: "Norm", layer: Layer, *, is_whole: bool = False) -> None:
    """Tells a norm that its results go to this layer's first projection as they are. Of other norms and
    layers it says nothing. `is_whole`: all of them, and to this layer alone, which may have others read them
    (`reads_once`)."""
    linear = next((found for name in FIRST if (found := getattr(layer, name, None)) is not None), None)
    if isinstance(norm, RMSNorm) and isinstance(linear, Linear):
        norm.feeds = partial(getattr, linear, "packed")
        if is_whole and getattr(layer, "reads_once", False):
            norm.is_read_once = partial(_has_no_adapters, linear)


def _nothing() -> None:
    """What a norm feeds that is not known."""


def _unknown() -> bool:
    """False: others may read it."""
    return False


def _has_no_adapters(linear: Linear) -> bool:
    """Whether only the layer's own product reads its input."""
    return linear.lora is None


class UnitOffsetRMSNorm(RMSNorm):
    """RMSNorm for checkpoints that store weight - 1. The weight is float32: the sum in fewer bits would lose
    the difference from 1."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        super().__init__(device, torch.float32, size, eps, may_have_bias=False)
        source = SourceTensor((size,), 0, replicated_shard(size), load=self._load)
        self.weight = Weight.empty((size,), {"": source}, torch.float32, device.torch_device)

    def _load(self, reader: TensorReader) -> None:
        self.weight.tensor.copy_(reader[...]).add_(1)


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension (Ba et al., 2016)."""

    def __init__(
        self, device: Device, dtype: torch.dtype, size: int, eps: float, *, bias: bool = True
    ) -> None:
        self.eps = eps
        sources = {"": SourceTensor((size,), 0, replicated_shard(size))}
        self.weight = Weight.empty((size,), sources, dtype, device.torch_device)
        self.bias = Weight.empty((size,), sources, dtype, device.torch_device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        bias = None if self.bias is None else self.bias.tensor
        return layer_norm(x, x.shape[-1:], self.weight.tensor, bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        total = x + residual
        return self.forward(total), total


class UnitOffsetLayerNorm(LayerNorm):
    """LayerNorm for checkpoints that store weight - 1; see UnitOffsetRMSNorm."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        super().__init__(device, torch.float32, size, eps)
        source = SourceTensor((size,), 0, replicated_shard(size), load=self._load)
        self.weight = Weight.empty((size,), {"": source}, torch.float32, device.torch_device)

    def _load(self, reader: TensorReader) -> None:
        self.weight.tensor.copy_(reader[...]).add_(1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return super().forward(x.float()).to(x.dtype)


class PlainLayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps), over the last dimension, without weights."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return layer_norm(x, (self.size,), eps=self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        total = x + residual
        return self.forward(total), total


class NoNorm(Layer):
    """In place of a norm that a block lacks."""

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, twice."""
        total = x + residual
        return total, total


Norm = RMSNorm | LayerNorm | PlainLayerNorm | NoNorm


def _unbiased(device: Device, dtype: torch.dtype, size: int, eps: float) -> LayerNorm:
    return LayerNorm(device, dtype, size, eps, bias=False)


NORMS: dict[NormKind, Callable[[Device, torch.dtype, int, float], RMSNorm | LayerNorm | PlainLayerNorm]] = {
    "rms": RMSNorm,
    "rms_offset": UnitOffsetRMSNorm,
    "layer": LayerNorm,
    "layer_unbiased": _unbiased,
    "layer_offset": UnitOffsetLayerNorm,
    "layer_plain": PlainLayerNorm,
}
