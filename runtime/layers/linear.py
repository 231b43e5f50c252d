"""Linear layers, sharded by declaration (Megatron-LM, Shoeybi et al., 2019): a column layer splits its
outputs over the ranks, the row layer that follows splits its inputs alike and sums, so a pair of them costs
one exchange."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from runtime.devices.base import Device, Quantized
from runtime.layers.parallel.sequence_parallel import Parts
from runtime.layers.quantization.quantized_weight import PER_ROW, Storage, allocate, completed, dequantized
from runtime.layers.weight import Layer, Lookup, Part, Share, Weight, even_share, kv_share, scaled
from runtime.models.quantization_schemes import Stored

# over the ranks, of their own part of the tokens alone; of all; or somebody else does
Sums = Literal["parts"] | bool


class Linear(Layer):
    """x [N, in] -> x Wᵀ + b [N, out]; with shard="column" this rank's share of out, with shard="row" of in,
    with shard="whole" all.

    `outputs` maps part names to sizes: several for fused weights, {"": size} otherwise. A column layer may
    give shares of its own choice instead of sizes. A row layer sums over the ranks as `sums` says.
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        inputs: int,
        outputs: dict[str, int | Share],
        *,
        shard: Literal["column", "row", "whole"],
        bias: bool = False,
        sums: Sums = True,
    ) -> None:
        self.device, self.dtype = device, dtype
        assert sums or not bias, "whoever sums would add the bias once a rank"
        self.is_row, self.is_column = shard == "row", shard == "column"
        self.outputs = {name: self._output_share(out) for name, out in outputs.items()}
        self.inputs = (
            even_share(inputs, device.collectives, "row inputs") if self.is_row else Share(inputs, 0, inputs)
        )
        self.size = sum(share.size for share in self.outputs.values())
        self.has_bias = bias
        self.weight: Weight | None = None
        self.bias: Weight | None = None
        self.storage: Storage | None = None  # in place of the weight where it is in few bits
        self.packed: Any = None
        # what adapters add to the product (layers/lora.py)
        self.adapted: Callable[[Tensor, Tensor], Tensor] | None = None
        self.sum: Callable[[Tensor], Tensor] | None = None
        if sums and self.is_row and device.collectives.size > 1:
            self.sum = Parts(device.collectives).sum if sums == "parts" else device.collectives.all_reduce

    def _output_share(self, out: int | Share) -> Share:
        if isinstance(out, Share):
            return out
        return (
            even_share(out, self.device.collectives, "column outputs")
            if self.is_column
            else Share(out, 0, out)
        )

    def open(self, lookup: Lookup) -> None:
        if (stored := lookup("")) is not None:
            self.storage = self._storage(stored)
        offset, weights, biases = 0, {}, {}
        for name, share in self.outputs.items():
            shape = (share.full, self.inputs.full)
            weights[name] = Part(shape, 1, self.inputs) if self.is_row else Part(shape, 0, share, offset)
            biases[name] = Part((share.full,), 0, share, offset)
            offset += share.size
        if self.storage is None:
            self.weight = Weight((self.size, self.inputs.size), weights, self.dtype, self.device.torch_device)
        if self.has_bias and not (self.storage is not None and self.storage.has_bias_inside):
            self.bias = Weight((self.size,), biases, self.dtype, self.device.torch_device)
            if self.storage is not None:
                self.storage.entries.pop("bias", None)  # what it has to say of layers without one

    def _storage(self, stored: Stored) -> Storage:
        tensors = allocate(stored.scheme, self.size, self.inputs, self.device.torch_device)
        return Storage(
            stored,
            self.outputs,
            self.inputs,
            tensors,
            counts_sums=not self.is_row or self.device.collectives.rank == 0,
        )

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        yield from (child for child in super().children() if child[0] != "storage")
        if self.storage is not None:
            yield from self.storage.children()

    def per_row(self) -> Iterator[Tensor]:
        """All tensors that have a row for each output, so that rows may be put into another order before
        `finish`."""
        yield from (weight.tensor for weight in (self.weight, self.bias) if weight is not None)
        if self.storage is not None:
            yield from (self.storage.tensors[name] for name in PER_ROW if name in self.storage.tensors)

    def stored(self) -> Tensor | Quantized:
        """The weight, once, in place of `finish`."""
        if self.storage is not None:
            return completed(self.storage)
        assert self.weight is not None
        return self.weight.tensor

    def values(self) -> Tensor:
        """[out, in] in full, before `finish`."""
        if self.storage is None:
            assert self.weight is not None
            return self.weight.tensor
        return dequantized(completed(self.storage), self.dtype)

    def finish(self) -> None:
        weight = self.stored()
        self.packed = (
            self.device.ops.pack_linear(weight)
            if isinstance(weight, Tensor)
            else self.device.ops.pack_quantized(weight)
        )
        self.weight = self.storage = None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.tensor if self.bias is not None else None
        out = self.device.ops.linear(x, self.packed, bias if self.sum is None else None)
        if self.adapted is not None:
            out = self.adapted(x, out)
        if self.sum is None:
            return out
        out = self.sum(out)
        return out if bias is None else out + bias


class QkvLinear(Linear):
    """Queries, keys and values in one column layer, split by whole heads; keys and values repeat where ranks
    outnumber them."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        inputs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
    ) -> None:
        q, kv = (
            even_share(num_heads, device.collectives, "attention heads"),
            kv_share(num_kv_heads, device.collectives),
        )
        self.heads = (q.size, kv.size, kv.size)  # of this rank
        outputs: dict[str, int | Share] = {
            "q": scaled(q, head_dim),
            "k": scaled(kv, head_dim),
            "v": scaled(kv, head_dim),
        }
        super().__init__(device, dtype, inputs, outputs, shard="column", bias=bias)
