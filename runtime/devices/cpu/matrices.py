"""Weight matrices packed for the kernels (kernels/weights.h), and the threads that compute with them."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu.kernels.library import Library
from runtime.devices.cpu.matrix_memory import MatrixMemory
from runtime.devices.packed import KeptMismatch
from runtime.layers.quantization.dequantize import unpack_codes
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt

INPUT_MULTIPLE = 64  # inputs are padded to it
INPUT_GROUP = 32  # inputs of 4-bit weights that are quantized together


class Kind(IntEnum):
    """weights::Kind of weights.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    Q4_0 = 5
    Q8_0 = 6
    Q4_K = 7
    Q5_K = 8
    Q6_K = 9
    FLOAT8 = 10
    MXFP4 = 11
    INT4_ZEROS = 12
    Q5_0 = 13


NUMBERS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16, torch.float16: Kind.FLOAT16}


@dataclass(frozen=True, slots=True)
class Form:
    """What a packed matrix is but for its numbers: of one form, all matrices have as many bytes."""

    kind: Kind
    outputs: int
    inputs: int
    group: int = 0  # of 4-bit kinds and of 8-bit floats: inputs that share a scale


class KeptMatrices(Protocol):
    """Matrices that earlier starts have packed, in the order in which they were (kept_matrices.py)."""

    def take(self, form: Form) -> "Matrix | None":
        """The next one; None: it has to be packed. Raises KeptMismatch where the next one is of another
        form."""
        ...

    def add(self, form: Form, matrix: "Matrix", sources: Sequence[Tensor]) -> None:
        """A matrix was packed, and `sources` hold nothing that is not in it."""
        ...


class Threads:
    """The threads of a rank that run kernels, its caller's included. Used by one thread at a time."""

    kept: KeptMatrices | None = None  # while weights are loaded, where they are kept

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.functions = library.functions
        self.num_threads = num_threads
        self.memory = MatrixMemory()
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
    parts: "tuple[Matrix, ...]" = ()  # of a matrix that is several, which have the memory

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        if self.parts:
            return sum(part.num_bytes for part in self.parts)
        return sum(part.nbytes for part in (self.data, self.scales, self.sums) if part is not None)

    def moved(self) -> None:
        """To be called when the tensors are at other addresses (PackedTensors)."""
        addresses = (part.data_ptr() if part is not None else None for part in (self.scales, self.sums))
        self.library.functions.kernels_move_matrix(self.handle, self.data.data_ptr(), *addresses)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows (int64 [N]) of the matrix, float32 [N, inputs]; not of 4 bits or 8-bit floats."""
        places = indices.contiguous()
        out = torch.empty(len(places), self.inputs)
        self.library.functions.kernels_unpack(self.handle, places.data_ptr(), len(places), out.data_ptr())
        return out


def matrix_of(
    library: Library, form: Form, data: Tensor, scales: Tensor | None = None, sums: Tensor | None = None
) -> Matrix:
    """A matrix whose numbers are, or will be, in these tensors."""
    functions = library.functions
    handle = functions.kernels_matrix(
        form.kind,
        form.outputs,
        form.inputs,
        form.group,
        data.data_ptr(),
        *(part.data_ptr() if part is not None else None for part in (scales, sums)),
    )
    matrix = Matrix(form.kind, form.outputs, form.inputs, library, handle, data, scales, sums)
    weakref.finalize(matrix, functions.kernels_free_matrix, handle).atexit = False
    return matrix


def packed_bytes(library: Library, form: Form) -> int:
    """Bytes of a matrix's `data`."""
    return library.functions.kernels_packed_bytes(form.kind, form.outputs, form.inputs, form.group)


def num_scales(library: Library, form: Form) -> int:
    """Entries of a matrix's `scales`, and of its `sums`; 0: it has none."""
    return -(-form.outputs // library.outputs) * library.outputs if form.kind == Kind.INT8 else 0


def packed(threads: Threads, form: Form, sources: Sequence[Tensor], fill: Callable[[Matrix], None]) -> Matrix:
    """A matrix of this form: the one that an earlier start packed of the same weights, or one that `fill`
    packs. `sources`: the tensors of the weight. Raises KeptMismatch for a weight that was not loaded."""
    if threads.kept is not None and (matrix := threads.kept.take(form)) is not None:
        return matrix
    if any(source.is_meta for source in sources):
        raise KeptMismatch("a weight is packed that was not loaded")
    library = threads.library
    data = threads.memory.take(packed_bytes(library, form))
    count = num_scales(library, form)
    scales, sums = (torch.zeros(count), torch.zeros(count, dtype=torch.int32)) if count else (None, None)
    matrix = matrix_of(library, form, data, scales, sums)
    fill(matrix)
    if threads.kept is not None:
        threads.kept.add(form, matrix, sources)
    return matrix


def pack(threads: Threads, weight: Tensor) -> Matrix:
    """A float32, bfloat16 or float16 weight [outputs, inputs]."""

    def fill(matrix: Matrix) -> None:
        source = weight.contiguous()
        threads.functions.kernels_pack(threads.handle, matrix.handle, source.data_ptr())

    return packed(threads, Form(NUMBERS[weight.dtype], *weight.shape), (weight,), fill)


def can_pack(weight: Quantized, dtype: torch.dtype) -> bool:
    """Whether the kernels compute what the scheme of this weight says, or with inputs of more digits. In
    float32, where results shall be exact, they do not compute 4-bit weights, whose inputs are quantized to 8
    bits in groups of 32, nor 8-bit floats, whose inputs may be rounded to bfloat16."""
    scheme = weight.scheme
    if isinstance(scheme, Int8):
        return weight.input_scale is None
    if dtype == torch.float32:
        return False
    if isinstance(scheme, Fp8):
        return not scheme.group_size or _group_of_floats(scheme.group_size, weight.weight.shape[1]) > 0
    if scheme.bits != 4 or scheme.activations != "none" or weight.order is not None:
        return False
    inputs = weight.weight.shape[1] * 2
    group = scheme.group_size or inputs
    fits = group in (INPUT_GROUP, INPUT_MULTIPLE) or (group % INPUT_MULTIPLE == 0 and inputs % group == 0)
    return fits and -(-inputs // group) == weight.scale.shape[1]


def _group_of_floats(group: int, inputs: int) -> int:
    """The group of inputs, of one scale each, in which 8-bit floats with these groups are packed; 0: there is
    none."""
    if group in (16, INPUT_GROUP, INPUT_MULTIPLE) or (group % INPUT_MULTIPLE == 0 and inputs % group == 0):
        return group
    return INPUT_MULTIPLE if group % INPUT_MULTIPLE == 0 else 0


def pack_quantized(threads: Threads, weight: Quantized) -> Matrix:
    """A weight for which `can_pack` holds."""
    tensors = [
        tensor for field in fields(weight) if isinstance(tensor := getattr(weight, field.name), Tensor)
    ]
    outputs, columns = weight.weight.shape
    if isinstance(weight.scheme, Int8):
        form, fill = Form(Kind.INT8, outputs, columns), partial(_fill_int8, threads, weight)
    elif isinstance(weight.scheme, Fp8):
        whole = -(-columns // INPUT_MULTIPLE) * INPUT_MULTIPLE
        group = weight.scheme.group_size
        group = whole if not group else _group_of_floats(group, columns)
        form = Form(Kind.FLOAT8, outputs, columns, group)
        fill = partial(_fill_float8, threads, weight, group)
    else:
        assert isinstance(weight.scheme, PackedInt)
        is_plain = weight.scheme.has_half_scales and not weight.scheme.has_zero_points
        kind = Kind.INT4 if is_plain else Kind.INT4_ZEROS
        form = Form(kind, outputs, columns * 2, weight.scheme.group_size or columns * 2)
        fill = partial(_fill_int4, threads, weight)
    return packed(threads, form, tensors, fill)


def _fill_int8(threads: Threads, weight: Quantized, matrix: Matrix) -> None:
    assert matrix.scales is not None
    matrix.scales[: matrix.outputs] = weight.scale[:, 0]
    source = weight.weight.contiguous()
    threads.functions.kernels_pack(threads.handle, matrix.handle, source.data_ptr())


def _fill_int4(threads: Threads, weight: Quantized, matrix: Matrix) -> None:
    codes = unpack_codes(weight.weight, 4).contiguous()
    scale = weight.scale.float().contiguous()
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    threads.functions.kernels_pack_int4(
        threads.handle,
        matrix.handle,
        codes.data_ptr(),
        scale.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
    )


def _fill_float8(threads: Threads, weight: Quantized, group: int, matrix: Matrix) -> None:
    assert isinstance(weight.scheme, Fp8)
    codes, scale = weight.weight.contiguous(), weight.scale
    if weight.scheme.group_size:
        scale = scale.repeat_interleave(weight.scheme.group_size // group, 1)
    count = -(-matrix.inputs // group)
    scale = scale[:, :count].float().contiguous()
    threads.functions.kernels_pack_float8(threads.handle, matrix.handle, codes.data_ptr(), scale.data_ptr())


def pack_mxfp4(threads: Threads, codes: Tensor, exponents: Tensor) -> Matrix:
    """A weight in the microscaling format of 4 bits: codes uint8 [outputs, inputs / 2], the first of two in
    the lower half, and uint8 [outputs, inputs / 32]: the exponent of the scale of 32 inputs, and 127."""

    def fill(matrix: Matrix) -> None:
        given = codes.contiguous(), exponents.contiguous()
        addresses = (tensor.data_ptr() for tensor in given)
        threads.functions.kernels_pack_float8(threads.handle, matrix.handle, *addresses)

    form = Form(Kind.MXFP4, len(codes), codes.shape[1] * 2, INPUT_GROUP)
    return packed(threads, form, (codes, exponents), fill)
