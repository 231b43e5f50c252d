"""A list of kernel phases over shared buffers, which the threads of a rank compute in one call."""

import ctypes
import weakref
from enum import IntEnum

import torch
from torch import Tensor

from runtime.devices.cpu.kernels.library import AdapterWeights, Heads, Step
from runtime.devices.cpu.matrices import NUMBERS, Matrix, Threads
from runtime.devices.lora import LoraWeights

Buffer = int  # step::Buffer*, which lives as long as its program
MULTIPLE = 64  # numbers of a row are padded to


class Then(IntEnum):
    """layers::Linear::Then and layers::Prepare::Then: what happens to results."""

    STORE = 0
    ADD = 1
    SILU_AND_MUL = 2
    GELU_AND_MUL = 3


class Program:
    """Phases in order. Tensors that are given as weights stay referenced."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.functions = threads.functions
        self.handle: int = self.functions.kernels_program(threads.handle)
        self.kept: list[object] = []
        weakref.finalize(self, self.functions.kernels_free_program, self.handle).atexit = False

    def buffer(self, width: int, per_token: int = 1) -> Buffer:
        """Rows of float32 [tokens * per_token, width]."""
        return self.functions.program_pair_buffer(self.handle, width, -1, per_token)

    def buffer_for(self, matrix: Matrix, per_token: int = 1) -> Buffer:
        """Rows of inputs in the form in which `matrix` is multiplied."""
        form = self.functions.kernels_input_form(matrix.kind)
        return self.functions.program_pair_buffer(self.handle, matrix.inputs, form, per_token)

    def keep(self, tensor: Tensor | None, multiple: int = MULTIPLE) -> int | None:
        """The address of a vector as float32, with zeros behind it up to a multiple."""
        if tensor is None:
            return None
        padded = torch.zeros(-(-tensor.numel() // multiple) * multiple)
        padded[: tensor.numel()] = tensor.detach().flatten().float()
        self.kept.append(padded)
        return padded.data_ptr()

    def embed(self, table: Tensor | Matrix, scale: float, out: Buffer) -> None:
        """Rows of a table [vocabulary, width], by token, times `scale`; or what the step brings for a
        token."""
        self.kept.append(table)
        packed, address, kind = (
            (table.handle, None, 0)
            if isinstance(table, Matrix)
            else (None, table.data_ptr(), NUMBERS[table.dtype])
        )
        self.functions.program_embed(self.handle, packed, address, kind, scale, out)

    def output(self, source: Buffer) -> None:
        """The rows that the caller gets."""
        self.functions.program_output(self.handle, source)

    def prepare(self, source: Buffer, out: Buffer, norm: Tensor | None = None, eps: float = 0.0) -> None:
        """Rows of floats in the form of a product's inputs, behind RMSNorm if there is a norm."""
        self.functions.program_prepare(self.handle, source, self.keep(norm), eps, out, 0)

    def norm(self, source: Buffer, out: Buffer, norm: Tensor | None, eps: float = 0.0, *, adds: bool) -> None:
        """RMSNorm, or none, from floats to floats, which may be added to what is there."""
        self.functions.program_prepare(self.handle, source, self.keep(norm), eps, out, 2 if adds else 1)

    def linear(
        self, source: Buffer, matrix: Matrix, bias: Tensor | None, out: Buffer, then: Then, scale: float = 1.0
    ) -> None:
        """The product of rows with a weight, times `scale`, or with scaled gates."""
        self.kept.append(matrix)
        outputs = self.threads.library.outputs * 2
        address = self.keep(bias, outputs)
        self.functions.program_linear(self.handle, matrix.handle, address, source, out, then, scale)

    def head(self, source: Buffer, norm: Tensor, eps: float, matrix: Matrix) -> None:
        """Logits of the tokens that a step names as its samples."""
        self.kept.append(matrix)
        inputs = self.buffer_for(matrix)
        self.functions.program_head(self.handle, source, self.keep(norm), eps, inputs, matrix.handle)

    def act(self, source: Buffer, out: Buffer, act: Then, scale: float) -> None:
        """act(scale * gate) * up of rows [gate, up]."""
        self.functions.program_act(self.handle, source, out, act, scale)

    def lora(
        self, source: Buffer, norm: Tensor | None, eps: float, weights: LoraWeights, out: Buffer
    ) -> None:
        """Adds what the adapters of the step's tokens add to the product of `source`, behind RMSNorm if there
        is a norm. The weights' memory is read in every step, for adapters come and go."""
        self.kept.append(weights)
        _, num_parts, rank, inputs = weights.a.shape
        found = AdapterWeights(
            a=weights.a.data_ptr(),
            b=weights.b.data_ptr(),
            kind=NUMBERS[weights.a.dtype],
            num_parts=num_parts,
            rank=rank,
            inputs=inputs,
            columns=weights.b.shape[1],
        )
        for index, (offset, size) in enumerate(weights.parts):
            found.offsets[index], found.sizes[index] = offset, size
        self.functions.program_lora(self.handle, source, self.keep(norm), eps, ctypes.addressof(found), out)

    def rotary(self) -> int:
        """Tables of cosines and sines: layers::RotaryTables*, empty until `set_rotary`."""
        return self.functions.program_rotary(self.handle)

    def set_rotary(self, rotary: int, cos: Tensor, sin: Tensor) -> None:
        """float32 [positions, dim / 2] each, which the caller keeps."""
        self.functions.program_set_rotary(rotary, cos.data_ptr(), sin.data_ptr())

    def attention(self, qkv: Buffer, out: Buffer, heads: Heads) -> None:
        """From the output of the QKV projection to that of attention; keys and values go to the cache."""
        self.functions.program_attention(self.handle, qkv, out, ctypes.addressof(heads))

    def run(self, step: Step, first: int = 0, end: int | None = None) -> None:
        """Computes phases `first` to `end`, which is not one of them; None: to the last one. Those of a step
        may be computed by several calls, in order. Raises torch.OutOfMemoryError."""
        last = num_phases(self) if end is None else end
        if self.functions.program_run(self.handle, ctypes.addressof(step), first, last):
            raise torch.OutOfMemoryError(f"no memory for a step of {step.num_tokens} tokens")


def num_phases(program: Program) -> int:
    """Phases that a program has so far."""
    return int(program.functions.program_size(program.handle))
