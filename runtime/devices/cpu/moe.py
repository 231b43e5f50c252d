"""Experts on the cpu: by the kernels in one call, else a pair of GEMMs for each expert that some token is
routed to."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu.kernels.library import Library, Step
from runtime.devices.cpu.matrices import NUMBERS, Matrix, Threads, can_pack, pack, pack_mxfp4, pack_quantized
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cpu.quantized import entry
from runtime.devices.operands import CodedStack
from runtime.layers.moe.routing import route
from runtime.models.config.moe_config import Routing

# weights of one expert as Ops.linear takes them: gate and up, then down
ExpertWeights = tuple[Tensor | Quantized | Matrix, Tensor | Quantized | Matrix]


class Act(IntEnum):
    """experts::Act of experts.h."""

    SILU = 0
    GELU = 1
    CLAMPED = 2


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ExpertStack:
    """The experts of one layer, packed for the kernels: their matrices are of one kind and shape. See
    PackedTensors."""

    library: Library

    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    biases: tuple[Tensor, Tensor] | None
    handle: int  # experts::Weights*

    def moved(self) -> None:
        """The biases are at other addresses now; the matrices know for themselves."""
        if self.biases is not None:
            addresses = (bias.data_ptr() for bias in self.biases)
            self.library.functions.kernels_move_experts(self.handle, *addresses)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        biases = sum(bias.nbytes for bias in self.biases or ())
        return sum(matrix.num_bytes for matrix in (*self.gate_up, *self.down)) + biases


def stack_experts(
    threads: Threads,
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    act: Act = Act.SILU,
    biases: tuple[Tensor, Tensor] | None = None,
) -> ExpertStack:
    """Experts whose halves of `gate_up` are whole blocks (see `whole_halves`), with biases float32 [experts,
    outputs of gate_up] and [experts, hidden]."""
    count, functions = len(gate_up), threads.functions
    if biases is not None:
        biases = biases[0].contiguous(), whole_rows(biases[1], threads.library.outputs, 1).contiguous()
    handles = ((ctypes.c_void_p * count)(*(matrix.handle for matrix in part)) for part in (gate_up, down))
    addresses = (None, None) if biases is None else (bias.data_ptr() for bias in biases)
    handle = functions.kernels_experts(act, count, *handles, *addresses)
    stack = ExpertStack(threads.library, tuple(gate_up), tuple(down), biases, handle)
    weakref.finalize(stack, functions.kernels_free_experts, handle).atexit = False
    return stack


def whole_rows(tensor: Tensor, multiple: int, dim: int) -> Tensor:
    """The tensor with zeros behind dimension `dim` up to a multiple."""
    size = tensor.shape[dim]
    whole = -(-size // multiple) * multiple
    if whole == size:
        return tensor
    octets = tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)  # float8 has few operators
    padded = octets.new_zeros(*tensor.shape[:dim], whole, *tensor.shape[dim + 1 :])
    padded.narrow(dim, 0, size).copy_(octets)
    return padded.view(tensor.dtype)


def whole_halves(tensor: Tensor, multiple: int) -> Tensor:
    """Rows of gate above rows of up, [2 * inner, ...], each with zeros below up to a multiple."""
    return whole_rows(tensor.unflatten(0, (2, -1)), multiple, 1).flatten(0, 1)


def whole_quantized_halves(weight: Quantized, multiple: int) -> Quantized:
    """`whole_halves` of a quantized weight: all that has a row for each output is padded."""
    return replace(
        weight,
        weight=whole_halves(weight.weight, multiple),
        scale=whole_halves(weight.scale, multiple),
        zeros=None if weight.zeros is None else whole_halves(weight.zeros, multiple),
    )


class ExpertsCall:
    """What experts do for rows that were routed, one layer after another in memory that they share."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.functions = threads.functions
        self.handle: int = self.functions.kernels_experts_call()
        weakref.finalize(self, self.functions.kernels_free_experts_call, self.handle).atexit = False

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, stack: ExpertStack) -> Tensor:
        """See Experts.apply. Raises torch.OutOfMemoryError."""
        rows, out = x.float().contiguous(), torch.empty(x.shape, dtype=torch.float32)
        own = ids.clamp(-1, len(stack.gate_up)).to(torch.int32).contiguous()
        shares = weights.float().contiguous()
        step = Step(num_tokens=len(rows), input=rows.data_ptr(), output=out.data_ptr())
        arguments = (own.shape[1], own.data_ptr(), shares.data_ptr(), ctypes.addressof(step))
        handles = (self.threads.handle, self.handle, stack.handle)
        if len(rows) and self.functions.kernels_apply_experts(*handles, *arguments):
            raise torch.OutOfMemoryError(f"no memory for the experts of {len(rows)} tokens")
        return out.to(x.dtype)


class CpuExperts:
    """Experts (devices/base.py): products by the kernels where they are built, all else in plain torch."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops
        self.call = None if ops.threads is None else ExpertsCall(ops.threads)

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """See Experts.route."""
        return route(logits, bias, routing)

    def pack(self, gate_up: Tensor, down: Tensor) -> list[ExpertWeights] | ExpertStack:
        """The kernels' layout; without kernels a pair of packed weights for each expert."""
        threads = self.ops.threads
        if threads is not None and gate_up.dtype in NUMBERS and len(gate_up):
            multiple = threads.library.outputs
            firsts = [pack(threads, whole_halves(weight, multiple)) for weight in gate_up]
            return stack_experts(threads, firsts, [pack(threads, weight) for weight in down])
        return [
            (self.ops.pack_linear(first), self.ops.pack_linear(second))
            for first, second in zip(gate_up, down, strict=True)
        ]

    def pack_clamped(
        self, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor]
    ) -> ExpertStack | None:
        """See ClampedExperts.pack_clamped. None without kernels."""
        threads = self.ops.threads
        if threads is None or gate_up.dtype not in NUMBERS or not len(gate_up):
            return None
        multiple = threads.library.outputs
        firsts = [pack(threads, whole_halves(weight, multiple)) for weight in gate_up]
        seconds = [pack(threads, weight) for weight in down]
        wide = torch.stack([whole_halves(bias, multiple) for bias in biases[0].float()]), biases[1].float()
        return stack_experts(threads, firsts, seconds, Act.CLAMPED, wide)

    @property
    def packs_mxfp4(self) -> bool:
        """With kernels, and unless activations are float32: products of MXFP4 round them to bfloat16."""
        return self.ops.threads is not None and self.ops.dtype != torch.float32

    def pack_clamped_mxfp4(
        self, gate_up: CodedStack, down: CodedStack, biases: tuple[Tensor, Tensor]
    ) -> ExpertStack:
        """See ClampedExperts.pack_clamped_mxfp4."""
        threads = self.ops.threads
        assert threads is not None, "MXFP4 without kernels"
        multiple = threads.library.outputs
        firsts = [
            pack_mxfp4(threads, *(whole_halves(part, multiple) for part in expert))
            for expert in zip(*gate_up, strict=True)
        ]
        seconds = [pack_mxfp4(threads, *expert) for expert in zip(*down, strict=True)]
        wide = torch.stack([whole_halves(bias, multiple) for bias in biases[0].float()]), biases[1].float()
        return stack_experts(threads, firsts, seconds, Act.CLAMPED, wide)

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> list[ExpertWeights] | ExpertStack:
        """The kernels' layout where they compute both schemes, else a pair of weights for each expert."""
        count, threads, dtype = len(gate_up.weight), self.ops.threads, self.ops.dtype
        pairs = [(entry(gate_up, i), entry(down, i)) for i in range(count)]
        if threads is None or not all(can_pack(weight, dtype) for pair in pairs[:1] for weight in pair):
            return [
                (self.ops.pack_quantized(first), self.ops.pack_quantized(second)) for first, second in pairs
            ]
        multiple = threads.library.outputs
        firsts = [pack_quantized(threads, whole_quantized_halves(first, multiple)) for first, _ in pairs]
        return stack_experts(threads, firsts, [pack_quantized(threads, second) for _, second in pairs])

    def rearranged(
        self,
        packed: list[ExpertWeights] | ExpertStack,
        added: list[ExpertWeights] | ExpertStack | None,
        order: Sequence[int],
    ) -> list[ExpertWeights] | ExpertStack:
        """See Experts.rearranged. Matrices stay where they are."""
        if isinstance(packed, list):
            assert added is None or isinstance(added, list), "both are packed alike"
            both = packed + (added or [])
            return [both[i] for i in order]
        assert added is None or isinstance(added, ExpertStack), "both are packed alike"
        assert self.ops.threads is not None and packed.biases is None, "experts with biases are on all ranks"
        gate_up, down = packed.gate_up, packed.down
        if added is not None:
            gate_up, down = gate_up + added.gate_up, down + added.down
        return stack_experts(self.ops.threads, [gate_up[i] for i in order], [down[i] for i in order])

    def apply(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        packed: list[ExpertWeights] | ExpertStack,
        first: int | None = None,
    ) -> Tensor:
        """See Experts.apply."""
        expert_ids = expert_ids - first if first else expert_ids
        if isinstance(packed, ExpertStack):
            assert self.call is not None, "packed experts without kernels"
            return self.call.apply(x, expert_ids, weights, packed)
        return apply(self.ops, x, expert_ids, weights, packed)


def apply(ops: CpuOps, x: Tensor, ids: Tensor, weights: Tensor, experts: list[ExpertWeights]) -> Tensor:
    """Sums in float32 and in the order of the experts, so that a token's sum does not depend on the other
    tokens."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    tokens, shares = order // ids.shape[1], weights.flatten().index_select(0, order).unsqueeze(1)
    counts = torch.bincount(flat.clamp(-1, len(experts)) + 1, minlength=len(experts) + 2).tolist()
    at = counts[0]  # skips experts of other ranks, whose ids are below 0 or too large
    for (gate_up, down), count in zip(experts, counts[1:-1], strict=True):
        if count:
            end = at + count
            rows = tokens[at:end]
            inner = ops.act_and_mul(ops.linear(x.index_select(0, rows), gate_up, None), "silu")
            out.index_add_(0, rows, ops.linear(inner, down, None) * shares[at:end])
            at = end
    return out.to(x.dtype)
