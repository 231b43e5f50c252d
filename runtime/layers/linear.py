"""Linear layers, sharded by declaration (Megatron-LM, Shoeybi et al., 2019): a column-parallel layer splits
its outputs over the ranks, the row-parallel layer that follows splits its inputs alike and reduces, so a pair
of them costs one collective."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.devices.base import Collectives, Device, PackedWeight, Quantized
from runtime.devices.lora import LoraWeights
from runtime.layers.parallel.sequence_parallel import SequenceParallel
from runtime.layers.quantization.allocate import allocate_quantized
from runtime.layers.quantization.dequantize import dequantized
from runtime.layers.quantization.ggml_weight import GgmlWeight, ggml_weight, without_ggml
from runtime.layers.quantization.quantized_weight import ROW_TENSORS, QuantizedWeight, quantized_operand
from runtime.layers.weight import (
    FormatLookup,
    Layer,
    Shard,
    SourceTensor,
    Weight,
    even_shard,
    head_shards,
    replicated_shard,
    scaled_shard,
)
from runtime.models.config.quantization_schemes import WeightFormat

# how a row-parallel layer adds up its partial sums: on every rank, on each rank for its own shard of the
# tokens
# alone, or not at all, because a layer above does
Reduction = Literal["all_reduce", "reduce_scatter", "none"]
# which tokens a layer is given: those of this rank's attention group, those of all groups, or this rank's
# shard of its group's
Given = Literal["group", "all", "shard"]


class LinearLora(Protocol):
    """Low-rank products that adapters add to a layer."""

    @property
    def weights(self) -> LoraWeights:
        """Those of all LoRA slots. Their memory stays the same."""
        ...

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Adds what the adapters of the step's tokens make of the input [T, in] to `out` [T, out], in place,
        and returns it."""
        ...


class OutputRows(NamedTuple):
    """Neighbouring columns of a layer's output, and the rows of a checkpoint tensor that make them."""

    first: int  # column
    rows: Tensor  # int64 [columns]


class Linear(Layer):
    """x [N, in] -> x Wᵀ + b [N, out]. With shard="column" a rank has a shard of out, with shard="row" a shard
    of in, with shard="replicated" all.

    `outputs` maps part names to sizes: several for fused weights, {"": size} otherwise. Sizes that are split
    must be multiples of the number of ranks; shards may be given in their place, and then the outputs of a
    column-parallel layer and the inputs of the row-parallel layer that follows have the same ones. A
    row-parallel layer reduces over the ranks as `reduction` says.
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        inputs: int | Shard,
        outputs: dict[str, int | Shard],
        *,
        shard: Literal["column", "row", "replicated"],
        bias: bool = False,
        reduction: Reduction = "all_reduce",
        ranks: Collectives | None = None,
    ) -> None:
        """`ranks`: that share the layer; None: all."""
        self.device, self.dtype = device, dtype
        self.ranks = device.collectives if ranks is None else ranks
        assert reduction != "none" or not bias, "the layer that reduces would add the bias once a rank"
        self.is_row, self.is_column = shard == "row", shard == "column"
        self.outputs = {name: self._output_shard(out) for name, out in outputs.items()}
        self.inputs = self._input_shard(inputs)
        self.size = sum(out.size for out in self.outputs.values())
        self.has_bias = bias
        self.weight: Weight | None = None
        self.bias: Weight | None = None
        self.quantized: QuantizedWeight | None = None  # in place of `weight` where that is quantized
        self.ggml: GgmlWeight | None = None  # in place of `weight` where a device computes with ggml's types
        self.packed: PackedWeight | None = (
            None  # what Ops.pack_linear or Ops.pack_quantized made of the weight
        )
        self.lora: LinearLora | None = None  # what adapters add to the output (layers/lora.py)
        self.given: Given = "group"
        self.reduce: Callable[[Tensor], Tensor] | None = None
        if reduction != "none" and self.is_row and self.ranks.size > 1:
            self.reduce = (
                SequenceParallel(self.ranks).reduce_scatter
                if reduction == "reduce_scatter"
                else self.ranks.all_reduce
            )

    def _input_shard(self, inputs: int | Shard) -> Shard:
        if isinstance(inputs, Shard):
            return inputs
        return even_shard(inputs, self.ranks, "row inputs") if self.is_row else replicated_shard(inputs)

    def _output_shard(self, out: int | Shard) -> Shard:
        if isinstance(out, Shard):
            return out
        return even_shard(out, self.ranks, "column outputs") if self.is_column else replicated_shard(out)

    def allocate(self, formats: FormatLookup) -> None:
        """Takes memory for the weight, quantized or not, and the bias."""
        format = formats("")
        self.ggml = ggml_weight(self.device, self.dtype, format, self.outputs, self.inputs)
        if (format := without_ggml(format)) is not None:
            self.quantized = self._quantized_weight(format)
        offset, weights, biases = 0, {}, {}
        for name, shard in self.outputs.items():
            shape = (shard.full, self.inputs.full)
            weights[name] = (
                SourceTensor(shape, 1, self.inputs) if self.is_row else SourceTensor(shape, 0, shard, offset)
            )
            biases[name] = SourceTensor((shard.full,), 0, shard, offset)
            offset += shard.size
        if self.quantized is None and self.ggml is None:
            self.weight = Weight.empty(
                (self.size, self.inputs.size), weights, self.dtype, self.device.torch_device
            )
        if self.has_bias and not (self.quantized is not None and self.quantized.includes_bias):
            self.bias = Weight.empty((self.size,), biases, self.dtype, self.device.torch_device)
            if self.quantized is not None:
                # the quantized weight expects a bias of zeros where the layer has none; this one has a bias
                self.quantized.weights.pop("bias", None)

    def _quantized_weight(self, format: WeightFormat) -> QuantizedWeight:
        tensors = allocate_quantized(
            format.scheme, self.size, self.inputs, self.dtype, self.device.torch_device
        )
        return QuantizedWeight(
            format,
            self.outputs,
            self.inputs,
            tensors,
            loads_quant_bias=not self.is_row or self.ranks.rank == 0,
            quantizer=self.device.row_quantizer,
        )

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """The weights; those of a quantized one directly, as in the checkpoint."""
        yield from (child for child in super().children() if child[0] not in ("quantized", "ggml"))
        for weight in (self.quantized, self.ggml):
            if weight is not None:
                yield from weight.children()

    def output_rows(self, part: str) -> list[OutputRows]:
        """The columns that a part makes on this rank, in the order that they have when weights are loaded.
        "" of a layer with several parts: all of them, in a checkpoint tensor with one below the other."""
        first, above, found = 0, 0, []
        for name, shard in self.outputs.items():
            if part in (name, ""):
                start = shard.start + above * (part != name)
                found.append(OutputRows(first, torch.arange(start, start + shard.size)))
            first, above = first + shard.size, above + shard.full
        if not found:
            raise KeyError(part)
        return found

    def row_tensors(self) -> Iterator[Tensor]:
        """All tensors that have a row for each output, so that rows may be put into another order before
        `finish_loading`."""
        yield from (weight.tensor for weight in (self.weight, self.bias) if weight is not None)
        if self.quantized is not None:
            yield from (
                self.quantized.tensors[name] for name in ROW_TENSORS if name in self.quantized.tensors
            )

    def take_weight(self) -> Tensor | Quantized:
        """The loaded weight for a caller that packs it itself, in place of `finish_loading`. Call it once."""
        if self.quantized is not None:
            return quantized_operand(self.quantized)
        assert self.weight is not None
        return self.weight.tensor

    def full_weight(self) -> Tensor:
        """The weight [out, in] of this rank, dequantized to `dtype`. Call it before `finish_loading`."""
        if self.quantized is None:
            assert self.weight is not None
            return self.weight.tensor
        operand = quantized_operand(self.quantized)
        return operand if isinstance(operand, Tensor) else dequantized(operand, self.dtype)

    def finish_loading(self) -> None:
        """Packs the weight for the device."""
        if self.ggml is not None:
            self.packed, self.ggml = self.ggml.pack(self.device), None
            return
        weight = self.take_weight()
        self.packed = (
            self.device.ops.pack_linear(weight)
            if isinstance(weight, Tensor)
            else self.device.ops.pack_quantized(weight)
        )
        self.weight = self.quantized = None

    def leave_sum(self) -> None:
        """From now on the output is this rank's part of the sum over ranks, which is left to who reads it."""
        assert not self.has_bias, "it would be added once a rank"
        self.reduce = None

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], or with reduction "reduce_scatter" this rank's shard of the rows."""
        return self.with_lora(x, self.lora)

    def with_lora(self, x: Tensor, lora: LinearLora | None) -> Tensor:
        """As `forward`, with these low-rank products in place of the layer's own."""
        bias = self.bias.tensor if self.bias is not None else None
        out = self.device.ops.linear(x, self.packed, bias if self.reduce is None else None)
        if lora is not None:
            out = lora.add(x, out)
        if self.reduce is None:
            return out
        out = self.reduce(out)
        return out if bias is None else out + bias


class LinearUse(Layer):
    """One of several uses of a linear layer, each with low-rank products of its own. The weight is found at
    the layer."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.lora: LinearLora | None = None
        self.given: Given = "group"

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """None."""
        yield from ()

    def forward(self, x: Tensor) -> Tensor:
        """See Linear.forward."""
        return self.linear.with_lora(x, self.lora)


class ReorderedLinear(Linear):
    """A linear layer that knows which row of its checkpoint tensors stands where when its rows were reordered
    through `row_tensors`, so that adapters are reordered alike. Rows stay within their part."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        inputs: int,
        outputs: dict[str, int | Shard],
        *,
        bias: bool = False,
        ranks: Collectives | None = None,
    ) -> None:
        """Column-parallel; see Linear."""
        super().__init__(device, dtype, inputs, outputs, shard="column", bias=bias, ranks=ranks)
        shards = self.outputs.values()
        self.rows = torch.cat([torch.arange(shard.start, shard.start + shard.size) for shard in shards])

    def row_tensors(self) -> Iterator[Tensor]:
        """See Linear.row_tensors; with them the numbers of the rows."""
        yield from super().row_tensors()
        yield self.rows

    def output_rows(self, part: str) -> list[OutputRows]:
        """See Linear.output_rows."""
        ((first, rows),) = super().output_rows(part)
        return [OutputRows(first, self.rows[first : first + len(rows)])]


class QkvLinear(Linear):
    """Queries, keys and values in one column-parallel layer, split by whole heads: ranks may have different
    numbers of them. Key/value heads are replicated where there are fewer of them than ranks."""

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
        value_dim: int = 0,
    ) -> None:
        """`value_dim`: numbers of a value; 0: head_dim."""
        q, kv = head_shards(num_heads, num_kv_heads, device.head_ranks)
        self.query_heads = q
        self.heads = (q.size, kv.size, kv.size)  # query, key and value heads of this rank
        # of the ranks that have the same key/value head, one counts it in sums over all heads
        self.counts_keys = q.start * kv.full == kv.start * q.full
        outputs: dict[str, int | Shard] = {
            "q": scaled_shard(q, head_dim),
            "k": scaled_shard(kv, head_dim),
            "v": scaled_shard(kv, value_dim or head_dim),
        }
        super().__init__(device, dtype, inputs, outputs, shard="column", bias=bias, ranks=device.head_ranks)
        # the order into which rows of each query and key head are brought when loaded; None: they stay
        self.row_order: list[int] | None = None

    def output_rows(self, part: str) -> list[OutputRows]:
        """See Linear.output_rows."""
        ((first, rows),) = super().output_rows(part)
        return [OutputRows(first, rows if part == "v" else self.ordered(rows))]

    def ordered(self, rows: Tensor) -> Tensor:
        """Rows of query or key heads, int64 [n], in the order of `row_order`."""
        if self.row_order is None:
            return rows
        return rows.unflatten(0, (-1, len(self.row_order)))[:, self.row_order].flatten()
