"""The weights of the experts of one layer, stacked: [experts, 2 * inner, hidden] and [experts, hidden,
inner]."""

import torch
from torch import Tensor

from runtime.devices.all_to_all import PackedExperts
from runtime.devices.base import Device, Quantized
from runtime.errors import ModelError
from runtime.layers.moe.ggml_experts import GgmlExperts, ggml_experts, is_ggml
from runtime.layers.quantization.allocate import allocate_quantized
from runtime.layers.quantization.quantized_weight import QuantizedWeight, quantized_operand
from runtime.layers.weight import (
    FormatLookup,
    Layer,
    Shard,
    SourceTensor,
    Weight,
    WeightOnly,
    replicated_shard,
)
from runtime.models.config.quantization_schemes import Int8, WeightFormat


class Expert(Layer):
    """Where the checkpoint's tensors of one expert go: views of the stacks. On ranks without the expert their
    shards have size 0."""

    def __init__(self, gate_up: Layer, down: Layer) -> None:
        self.gate_up_proj = gate_up
        self.down_proj = down


class ExpertWeights:
    """The stacked weights of experts on this rank, and the view that each expert has of them."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        inner: Shard,
        num_experts: int,
        own: tuple[int, ...],
        *,
        is_first: bool,
    ) -> None:
        """`inner`: this rank's shard of each expert's inner dimension; `own`: the expert of each entry of the
        stacks; `is_first`: of the ranks that share an expert."""
        self.device, self.dtype, self.hidden, self.inner = device, dtype, hidden, inner
        self.num_experts, self.own, self.is_first = num_experts, own, is_first
        self.has_int8_activations = False  # the experts themselves quantize their input, by token, to int8
        self.tensors: tuple[Tensor, Tensor] | None = None
        # in place of `tensors`, where experts are quantized: the tensors of both stacks by name
        self.quantized: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        # of one expert of this rank: how any of them is quantized
        self.example: tuple[QuantizedWeight, QuantizedWeight] | None = None
        self.ggml: GgmlExperts | None = (
            None  # in place of all these, where a device computes with ggml's types
        )

    def allocate(self, formats: FormatLookup) -> list[Expert]:
        """Takes memory for the stacks. -> all experts of the layer. Raises ModelError where they are
        quantized differently."""
        found = {
            (formats(f"experts.{i}.gate_up_proj"), formats(f"experts.{i}.down_proj"))
            for i in range(self.num_experts)
        }
        if len(found) > 1:
            raise ModelError("the experts of a layer are quantised differently, which is not supported")
        first, second = found.pop()
        self.has_int8_activations = first is not None and first.scheme == Int8("token")
        num_experts = len(self.own)
        if is_ggml(first) or is_ggml(second):
            self.ggml = ggml_experts(
                self.device, self.dtype, (first, second), self.hidden, self.inner, self.num_experts, self.own
            )
            if self.ggml is not None:
                return [Expert(*weights) for weights in self.ggml.weights]
            first = second = None
        if (first is None) != (second is None):
            raise ModelError("experts have only some of their weights quantised, which is not supported")
        if first is None or second is None:
            self.tensors = (
                torch.empty(
                    num_experts,
                    2 * self.inner.size,
                    self.hidden,
                    dtype=self.dtype,
                    device=self.device.torch_device,
                ),
                torch.empty(
                    num_experts,
                    self.hidden,
                    self.inner.size,
                    dtype=self.dtype,
                    device=self.device.torch_device,
                ),
            )
            return [self._plain_expert(self.tensors, self._entry(i)) for i in range(self.num_experts)]
        torch_device, lead = self.device.torch_device, (num_experts,)
        hidden = replicated_shard(self.hidden)
        self.quantized = (
            allocate_quantized(first.scheme, 2 * self.inner.size, hidden, self.dtype, torch_device, lead),
            allocate_quantized(second.scheme, self.hidden, self.inner, self.dtype, torch_device, lead),
        )
        return [self._quantized_expert(first, second, self._entry(i)) for i in range(self.num_experts)]

    def _entry(self, expert: int) -> int | None:
        """Where the stacks have an expert, the first time if it has copies; None: it is on other ranks."""
        return self.own.index(expert) if expert in self.own else None

    def _plain_expert(self, stacks: tuple[Tensor, Tensor], index: int | None) -> Expert:
        gate_up, down = stacks
        inner, hidden = self.inner, self.hidden
        if index is not None:
            tensors = gate_up[index], down[index]
        else:
            inner = Shard(inner.full, 0, 0)
            tensors = gate_up.new_empty(0, hidden), down.new_empty(hidden, 0)
        shape = (inner.full, hidden)
        sources = {"gate": SourceTensor(shape, 0, inner), "up": SourceTensor(shape, 0, inner, inner.size)}
        return Expert(
            WeightOnly(Weight(tensors[0], sources)),
            WeightOnly(Weight(tensors[1], {"": SourceTensor((hidden, inner.full), 1, inner)})),
        )

    def _quantized_expert(self, first: WeightFormat, second: WeightFormat, index: int | None) -> Expert:
        assert self.quantized is not None
        quantizer = self.device.row_quantizer
        is_local, hidden = index is not None, replicated_shard(self.hidden)
        tensors = [
            {name: t[index] for name, t in stack.items()} if is_local else {} for stack in self.quantized
        ]
        inner, outputs = (
            (self.inner, hidden) if is_local else (Shard(self.inner.full, 0, 0), Shard(self.hidden, 0, 0))
        )
        weights = (
            QuantizedWeight(
                first,
                {"gate": inner, "up": inner},
                hidden,
                tensors[0],
                loads_quant_bias=True,
                quantizer=quantizer,
            ),
            QuantizedWeight(
                second,
                {"": outputs},
                self.inner,
                tensors[1],
                loads_quant_bias=self.is_first,
                quantizer=quantizer,
            ),
        )
        if is_local:
            self.example = weights
        return Expert(*weights)

    def pack(self) -> PackedExperts:
        """What Experts.pack or Experts.pack_quantized makes of the loaded stacks, which are given up. Call it
        once."""
        if self.ggml is not None:
            packed, self.ggml = self.ggml.pack(), None
            return packed
        self._fill_copies()
        experts = self.device.experts
        if self.quantized is not None and self.example is not None:
            stacks = zip(self.example, self.quantized, strict=True)
            first, second = (quantized_operand(weight, stack) for weight, stack in stacks)
            if isinstance(first, Quantized) and isinstance(second, Quantized):
                packed = experts.pack_quantized(first, second)
            else:
                assert isinstance(first, Tensor) and isinstance(second, Tensor), "both have one format"
                packed = experts.pack(first, second)
        else:
            assert self.tensors is not None
            packed = experts.pack(*self.tensors)
        self.tensors = self.quantized = self.example = None
        return packed

    def _fill_copies(self) -> None:
        """Gives an expert's further entries what its first one has."""
        stacks = [*(self.tensors or ()), *(t for stack in self.quantized or () for t in stack.values())]
        for i, expert in enumerate(self.own):
            if (first := self.own.index(expert)) != i:
                for stack in stacks:
                    stack[i].copy_(stack[first])
