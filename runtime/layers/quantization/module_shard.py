"""One module of a checkpoint on one rank: which of its tensors there are, and how each is read into this
rank's shard of the weight."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from runtime.devices.base import RowQuantizer
from runtime.errors import ModelError
from runtime.layers.weight import FLOATS, Shard, SourceTensor, TensorReader
from runtime.models.config.quantization_schemes import WeightFormat

Shapes = list[tuple[int, ...]]
INTS = ("I64", "I32", "I16", "I8")
SCALES = (*FLOATS, "F8_E8M0", "U8", "F8_E4M3")  # U8: exponents, as F8_E8M0


@dataclass(frozen=True, slots=True)
class ModuleShard:
    """This rank's shard of a weight, which one module of a checkpoint fills."""

    format: WeightFormat  # of the checkpoint
    tensors: dict[str, Tensor]  # by the names of Quantized's fields; this module's rows of them
    outputs: Shard
    inputs: Shard
    group_ids: Tensor  # int64: for each column of this rank's scales, its column in the checkpoint
    loads_quant_bias: bool  # of the ranks that split the inputs, one adds the checkpoint's quant_bias
    seen: set[str]  # names of tensors that another part of the fused weight has filled; shared by its parts
    quantizer: RowQuantizer | None = None  # of plain weights; None: torch quantizes them

    @property
    def rows(self) -> slice:
        """The outputs of this rank."""
        return slice(self.outputs.start, self.outputs.start + self.outputs.size)

    @property
    def columns(self) -> slice:
        """The inputs of this rank."""
        return slice(self.inputs.start, self.inputs.start + self.inputs.size)

    def source(
        self, shapes: Shapes, load: "LoadTensor", dtypes: tuple[str, ...] = FLOATS, dummy_kind: str = ""
    ) -> SourceTensor:
        """A checkpoint tensor that may have any of `shapes`. Where the rank has a part of the weight, `load`
        is called with this shard and the tensor's reader. `dummy_kind`: see SourceTensor."""
        return SourceTensor(
            shapes[0],
            0,
            self.outputs,
            0,
            None if self.outputs.size == 0 else partial(load, self),
            dtypes,
            tuple(shapes[1:]),
            dummy_kind,
        )


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of a module in a checkpoint. Those in `optional` may be missing."""

    sources: dict[str, SourceTensor]
    optional: set[str] = field(default_factory=set)


LoadTensor = Callable[[ModuleShard, TensorReader], None]


def read_all(reader: TensorReader) -> Tensor:
    """The whole tensor."""
    tensor: Tensor = reader[...]
    return tensor


def load_weight(module: ModuleShard, reader: TensorReader) -> None:
    """Reads this rank's rows and columns of a plain weight."""
    module.tensors["weight"].copy_(reader[module.rows, module.columns])


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes as Quantized.weight has them, with 4 bits two in a byte: uint8 [..., columns] -> uint8 [...,
    bytes]."""
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4


def shard_of(module: ModuleShard, values: Tensor, block_rows: int = 1) -> Tensor:
    """This rank's part of per-group values [outputs / block_rows, groups of inputs]. A single value is for
    all outputs and groups, a column of values [outputs] for all groups."""
    values = (
        values.reshape(1, 1) if values.numel() == 1 else values.unsqueeze(1) if values.dim() == 1 else values
    )
    rows = torch.arange(module.outputs.start, module.outputs.start + module.outputs.size) // block_rows
    return values.index_select(0, rows.clamp_(max=len(values) - 1)).index_select(1, module.group_ids)


def to_scales(values: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents of two, plus 127 (E8M0)."""
    return (values.view(torch.float8_e8m0fnu) if values.dtype == torch.uint8 else values).float()


def load_scale(module: ModuleShard, reader: TensorReader) -> None:
    """Reads scales [outputs, groups], of any shape that `shard_of` takes."""
    scales = to_scales(read_all(reader))
    module.tensors["scale"].copy_(shard_of(module, scales, module.format.block_rows or 1))


def _factor(module: ModuleShard, reader: TensorReader) -> Tensor:
    values = read_all(reader).float()
    values = values.reshape(1, 1) if values.numel() == 1 else shard_of(module, values)
    return values.to(module.tensors["scale"].device)


def load_scale_factor(module: ModuleShard, reader: TensorReader) -> None:
    """Multiplies the scale by these factors, where a layout has several. It is 1 before the first."""
    module.tensors["scale"].mul_(_factor(module, reader))


def load_scale_divisor(module: ModuleShard, reader: TensorReader) -> None:
    """Divides the scale by these numbers."""
    module.tensors["scale"].div_(_factor(module, reader))


def load_scale_transposed(module: ModuleShard, reader: TensorReader) -> None:
    """Reads scales [groups, outputs]."""
    module.tensors["scale"].copy_(shard_of(module, read_all(reader).T.float()))


def load_largest(name: str, module: ModuleShard, reader: TensorReader) -> None:
    """Reads a scale of the input. The parts of a fused weight quantize their input once, so the largest scale
    counts."""
    target = module.tensors[name]
    target.copy_(torch.maximum(target, read_all(reader).float().reshape(1).to(target.device)))


def load_equal(name: str, module: ModuleShard, reader: TensorReader) -> None:
    """Reads a tensor that the parts of a fused weight must have in common. Raises ModelError where they
    differ."""
    target, value = module.tensors[name], read_all(reader).reshape(-1)
    value = (value[module.columns] if name == "order" else value).to(target)
    if name in module.seen and not torch.equal(target, value):
        raise ModelError(
            f"weights that are computed as one differ in their {name}, which is not supported; quantise them "
            "together"
        )
    module.seen.add(name)
    target.copy_(value)


def skip(module: ModuleShard, reader: TensorReader) -> None:
    """Reads nothing: the tensor follows from the others."""


def require_zeros(module: ModuleShard, reader: TensorReader) -> None:
    """Raises ModelError unless all offsets are 0: asymmetric quantization is not supported for this
    scheme."""
    if read_all(reader).any():
        raise ModelError("weights with offsets are not supported here; quantise them symmetrically")


def require_no_bias(module: ModuleShard, reader: TensorReader) -> None:
    """Raises ModelError unless the bias is 0: some tools write a bias of zeros for every module."""
    if read_all(reader).any():
        raise ModelError(
            "a quantised module has a bias that config.json does not know of; restore config.json"
        )
