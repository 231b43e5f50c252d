"""Weights of ggml's types for the kernels (kernels/ggml.h): packed from the rows of a mapped GGUF file."""

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.devices.cpu.matrices import Form, Kind, Matrix, Threads, packed
from runtime.devices.cpu.moe import ExpertStack, stack_experts, whole_rows
from runtime.devices.packed import GgmlPart

GROUP = 32  # inputs that share a scale
ROWS_AT_ONCE = 4096  # that are quantized, in float32
KINDS = {kind.name: kind for kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)}


class CpuGgml:
    """See GgmlWeights. In float32 results shall be exact, and the kernels round inputs to 8 bits."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads

    def computes(self, parts: Sequence[tuple[str, int]], dtype: torch.dtype) -> bool:
        """See GgmlWeights.computes. A part begins where a block of the kernels' outputs does."""
        are_whole = all(outputs % self.threads.library.outputs == 0 for _, outputs in parts[:-1])
        return dtype != torch.float32 and are_whole and all(name in KINDS for name, _ in parts)

    def quantized(self, weight: Tensor) -> Matrix:
        """See GgmlWeights.quantized."""
        outputs, inputs = weight.shape

        def fill(matrix: Matrix) -> None:
            rows, order = _to_q8_0(weight), torch.arange(outputs)
            self.threads.functions.kernels_pack_ggml(
                self.threads.handle, matrix.handle, rows.data_ptr(), rows.stride(0), order.data_ptr()
            )

        return packed(self.threads, Form(Kind.Q8_0, outputs, inputs), (weight,), fill)

    def pack(self, parts: Sequence[GgmlPart]) -> Matrix:
        """See GgmlWeights.pack."""
        matrices = tuple(pack_part(self.threads, part) for part in parts)
        return matrices[0] if len(matrices) == 1 else _joined(matrices)

    def pack_experts(self, gate_up: Sequence[Sequence[GgmlPart]], down: Sequence[GgmlPart]) -> ExpertStack:
        """See GgmlWeights.pack_experts."""
        multiple = self.threads.library.outputs
        firsts = [pack_part(self.threads, _whole_halves(parts, multiple)) for parts in gate_up]
        return stack_experts(self.threads, firsts, [pack_part(self.threads, part) for part in down])


def _whole_halves(parts: Sequence[GgmlPart], multiple: int) -> GgmlPart:
    """Rows of gate above rows of up, copied, each with zeros below up to a multiple: octets that are zero are
    numbers that are zero in every type."""
    rows = [whole_rows(part.rows.index_select(0, part.order), multiple, 0) for part in parts]
    whole = torch.cat(rows)
    return GgmlPart(parts[0].type, whole, torch.arange(len(whole)), parts[0].inputs)


def _to_q8_0(weight: Tensor) -> Tensor:
    """Rows of blocks: a float16 scale and 32 codes, uint8 [outputs, inputs / 32 * 34]."""
    outputs, inputs = weight.shape
    out = torch.empty(outputs, inputs // GROUP, 2 + GROUP, dtype=torch.uint8)
    for first in range(0, outputs, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        groups = weight[part].float().unflatten(1, (-1, GROUP))
        scale = (groups.abs().amax(2, keepdim=True) / 127).half()
        codes = groups / torch.where(scale == 0, 1, scale.float())
        out[part, :, :2] = scale.view(torch.uint8)
        out[part, :, 2:] = codes.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    return out.flatten(1)


def pack_part(threads: Threads, part: GgmlPart) -> Matrix:
    """Rows of one type as a matrix."""

    def fill(matrix: Matrix) -> None:
        order = part.order.contiguous()
        threads.functions.kernels_pack_ggml(
            threads.handle, matrix.handle, part.rows.data_ptr(), part.rows.stride(0), order.data_ptr()
        )

    form = Form(KINDS[part.type], len(part.order), part.inputs)
    return packed(threads, form, (part.rows,), fill)


def _joined(matrices: tuple[Matrix, ...]) -> Matrix:
    """One matrix of several, whose outputs follow each other."""
    first, functions = matrices[0], matrices[0].library.functions
    handles = (ctypes.c_void_p * len(matrices))(*(matrix.handle for matrix in matrices))
    handle = functions.kernels_join(ctypes.addressof(handles), len(matrices))
    outputs = sum(matrix.outputs for matrix in matrices)
    nothing: Tensor = torch.empty(0, dtype=torch.uint8)
    whole = Matrix(first.kind, outputs, first.inputs, first.library, handle, nothing, parts=matrices)
    weakref.finalize(whole, functions.kernels_free_matrix, handle).atexit = False
    return whole
