"""Weight matrices packed for the kernels (kernels/weights.h), and the threads that compute with them."""

import weakref
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu.kernels.library import Library
from runtime.layers.quantization.quantized_weight import unpack_codes
from runtime.models.config.quantization_schemes import Int8, PackedInt

INPUT_MULTIPLE = 64  # inputs are padded to it
INPUT_GROUP = 32  # inputs of 4-bit weights that are quantized together


class Kind(IntEnum):
    """weights::Kind of weights.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4


NUMBERS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16, torch.float16: Kind.FLOAT16}


class Threads:
    """The threads of a rank that run kernels, its caller's included. Used by one thread at a time."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.functions = library.functions
        self.num_threads = num_threads
        self.handle: int = self.functions.kernels_start(num_threads)
        # at exit threads end by themselves, and a forked process has none of its parent's
        weakref.finalize(self, self.functions.kernels_stop, self.handle).atexit = False


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Matrix:
    """A packed matrix [outputs, inputs]. Its memory is `data`, and for INT8 `scales` and `sums`."""

    kind: Kind
    outputs: int
    inputs: int
    library: Library
    handle: int  # weights::Matrix*
    data: Tensor  # uint8
    scales: Tensor | None = None  # float32 [outputs, padded to whole blocks]
    sums: Tensor | None = None  # int32, the same

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return sum(part.nbytes for part in (self.data, self.scales, self.sums) if part is not None)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows (int64 [N]) of the matrix, float32 [N, inputs]; not of INT4. See PackedRows."""
        places = indices.contiguous()
        out = torch.empty(len(places), self.inputs)
        self.library.functions.kernels_unpack(self.handle, places.data_ptr(), len(places), out.data_ptr())
        return out


def _allocate(
    threads: Threads, kind: Kind, outputs: int, inputs: int, group: int, scales: Tensor | None
) -> Matrix:
    functions = threads.functions
    data = torch.empty(functions.kernels_packed_bytes(kind, outputs, inputs, group), dtype=torch.uint8)
    sums = None if scales is None else torch.zeros(len(scales), dtype=torch.int32)
    handle = functions.kernels_matrix(
        kind,
        outputs,
        inputs,
        group,
        data.data_ptr(),
        *(part.data_ptr() if part is not None else None for part in (scales, sums)),
    )
    matrix = Matrix(kind, outputs, inputs, threads.library, handle, data, scales, sums)
    weakref.finalize(matrix, functions.kernels_free_matrix, handle).atexit = False
    return matrix


def pack(threads: Threads, weight: Tensor) -> Matrix:
    """A float32, bfloat16 or float16 weight [outputs, inputs]."""
    source = weight.contiguous()
    matrix = _allocate(threads, NUMBERS[weight.dtype], *weight.shape, 0, None)
    threads.functions.kernels_pack(threads.handle, matrix.handle, source.data_ptr())
    return matrix


def can_pack(weight: Quantized, dtype: torch.dtype) -> bool:
    """Whether the kernels compute what the scheme of this weight says. 4-bit weights meet inputs that are
    quantized to 8 bits in groups of 32: in float32 they do not, for there results shall be exact."""
    scheme = weight.scheme
    if isinstance(scheme, Int8):
        return weight.input_scale is None
    if (
        not isinstance(scheme, PackedInt)
        or scheme.bits != 4
        or scheme.activations != "none"
        or weight.order is not None
    ):
        return False
    inputs = weight.weight.shape[1] * 2
    group = scheme.group_size or inputs
    fits = group in (INPUT_GROUP, INPUT_MULTIPLE) or (group % INPUT_MULTIPLE == 0 and inputs % group == 0)
    return dtype != torch.float32 and fits and -(-inputs // group) == weight.scale.shape[1]


def pack_quantized(threads: Threads, weight: Quantized) -> Matrix:
    """A weight for which `can_pack` holds."""
    functions = threads.functions
    if isinstance(weight.scheme, Int8):
        outputs, inputs = weight.weight.shape
        blocks = -(-outputs // threads.library.outputs)
        scales = torch.zeros(blocks * threads.library.outputs)
        scales[:outputs] = weight.scale[:, 0]
        source = weight.weight.contiguous()
        matrix = _allocate(threads, Kind.INT8, outputs, inputs, 0, scales)
        functions.kernels_pack(threads.handle, matrix.handle, source.data_ptr())
        return matrix
    assert isinstance(weight.scheme, PackedInt)
    codes = unpack_codes(weight.weight, 4).contiguous()
    outputs, inputs = codes.shape
    scale = weight.scale.float().contiguous()
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    matrix = _allocate(threads, Kind.INT4, outputs, inputs, weight.scheme.group_size or inputs, None)
    functions.kernels_pack_int4(
        threads.handle,
        matrix.handle,
        codes.data_ptr(),
        scale.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
    )
    return matrix
