"""Layouts whose codes lie in the order in which a kernel of one GPU reads them: Marlin's and QServe's.

    layout      weight                      scales                      other tensors
    marlin      B, int32 [in/16, 2 * out]   s [groups, out], shuffled   workspace
    qoq         qweight, int8 [out, in/2]   s1_scales [out]             s1_szeros [out]
    qoq_groups  the same                    s1_scales [out]             s2_scales, s2_zeros [groups, out]

Marlin (Frantar et al., 2024) has codes around 8 in tiles of 16 inputs and 64 outputs. QServe's QoQ (Lin et
al., 2024) has codes of 0 to 15 in tiles of 32 x 32, each byte with two outputs that are 16 apart. What its
codes mean are integers of 8 bits times a scale for each output, and so they are held: code - zero, or with
groups code * s2_scales + s2_zeros.
"""

from functools import partial
from threading import Lock

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.quantization.module_shard import (
    INTS,
    ModuleShard,
    ModuleTensors,
    load_scale,
    pack_codes,
    read_all,
    shard_of,
    skip,
)
from runtime.layers.weight import TensorReader
from runtime.models.config.quantization_readers import QOQ_GROUP
from runtime.models.config.quantization_schemes import PackedInt

TILE, MARLIN_OUTPUTS = 16, 64  # inputs, and outputs, of a tile of marlin
QOQ_ROWS = 32  # outputs of a tile of qoq
MAX_FRACTION = 0.1  # distance of a zero point from a whole number that rounding of its tensor explains
INT8_RANGE = (-128, 127)


def _marlin_order() -> Tensor:
    """int64 [1024]: for each code of a tile of 16 inputs and 64 outputs, in the order of its words, its place
    in the tile as [4 of 16 outputs, 16 inputs, 16 outputs]."""
    places = []
    for lane in range(32):  # of a warp, which multiplies 16 x 16 numbers at once
        column, row = lane // 4, 2 * (lane % 4)
        of_lane = [16 * (row + i) + column + 8 * half for half in (0, 1) for i in (0, 1, 8, 9)]
        places += [place + 256 * step for step in range(4) for place in of_lane]
    eights = torch.tensor(places).view(-1, 8)
    return eights[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def _inverse(order: Tensor) -> Tensor:
    return torch.argsort(order)


FROM_MARLIN = _inverse(_marlin_order())
# order of the scales of 64 outputs in groups, and of 32 outputs with one group
FROM_MARLIN_SCALES = _inverse(torch.arange(64).view(8, 8).T.flatten())
FROM_MARLIN_SCALES_OF_ONE = _inverse(
    torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
)


def marlin_codes(words: Tensor) -> Tensor:
    """Words of marlin, int32 [in/16, 2 * out], as codes uint8 [out, in]."""
    octets = words.contiguous().view(torch.uint8)
    codes = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
    tiles = codes.view(len(codes), -1, TILE * MARLIN_OUTPUTS)[..., FROM_MARLIN]
    return tiles.view(len(codes), -1, TILE, TILE).permute(1, 3, 0, 2).flatten(2).flatten(0, 1)


def _whole(begin: int, size: int, tile: int) -> tuple[int, int]:
    """The tiles that hold a range: the first, and the one behind the last."""
    return begin // tile, -(-(begin + size) // tile)


def load_marlin(module: ModuleShard, reader: TensorReader) -> None:
    """Reads the tiles that have this rank's part."""
    outputs, inputs = module.outputs, module.inputs
    row, end_row = _whole(inputs.start, inputs.size, TILE)
    column, end_column = _whole(outputs.start, outputs.size, MARLIN_OUTPUTS)
    per_tile = TILE * MARLIN_OUTPUTS // 8
    codes = marlin_codes(reader[row:end_row, column * per_tile : end_column * per_tile])
    first, second = outputs.start - column * MARLIN_OUTPUTS, inputs.start - row * TILE
    own = codes[first : first + outputs.size, second : second + inputs.size]
    module.tensors["weight"].copy_(pack_codes(own.contiguous(), 4))


def load_marlin_scales(module: ModuleShard, reader: TensorReader) -> None:
    """Reads shuffled scales [groups, outputs]."""
    scales = read_all(reader).float()
    order = FROM_MARLIN_SCALES_OF_ONE if len(scales) == 1 else FROM_MARLIN_SCALES
    scales = scales.view(len(scales), -1, len(order))[..., order].flatten(1)
    module.tensors["scale"].copy_(shard_of(module, scales.T))


def marlin(module: ModuleShard) -> ModuleTensors:
    """AutoGPTQ's checkpoint_format marlin. Raises ModelError for sizes that it does not have."""
    scheme, outputs, inputs = module.format.scheme, module.outputs.full, module.inputs.full
    assert isinstance(scheme, PackedInt)
    _check_tiles("marlin", outputs, inputs, MARLIN_OUTPUTS, TILE)
    groups = -(-inputs // scheme.group_size) if scheme.group_size else 1
    workspace = module.source([(outputs // MARLIN_OUTPUTS * 16,)], skip, INTS)
    return ModuleTensors(
        {
            "B": module.source([(inputs // TILE, 2 * outputs)], load_marlin, ("I32",)),
            "s": module.source([(groups, outputs)], load_marlin_scales, dummy_kind="scale"),
            "workspace": workspace,
        },
        {"workspace"},
    )


def _check_tiles(name: str, outputs: int, inputs: int, rows: int, columns: int) -> None:
    if outputs % rows or inputs % columns:
        raise ModelError(
            f"{name} has weights in tiles of {rows} outputs and {columns} inputs, and one of {outputs} "
            f"outputs and {inputs} inputs does not divide so; restore config.json from the model's source"
        )


def qoq_codes(octets: Tensor) -> Tensor:
    """Bytes of qoq, [out, in/2], as codes uint8 [out, in]."""
    tiles = octets.view(torch.uint8).view(len(octets) // QOQ_ROWS, -1, 8, 4, 2, 2, 4)
    halves = torch.stack((tiles & 15, tiles >> 4), 1)  # outputs 0..15, 16..31 of a tile
    return halves.permute(0, 1, 6, 3, 2, 5, 4, 7).reshape(len(octets), -1)


def qoq_rows(values: Tensor) -> Tensor:
    """Values of groups as qoq has them, [groups, out] with outputs of a tile in another order, as [out,
    groups]."""
    tiles = values.view(len(values), -1, 8, 4)
    return tiles.transpose(2, 3).reshape(len(values), -1).T


class _Parts:
    """The tensors of a module that make its integers together; these are made with the last one."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.read: dict[str, Tensor] = {}
        self.lock = Lock()

    def load(self, name: str, module: ModuleShard, reader: TensorReader) -> None:
        """Reads one of the tensors. Raises ModelError for what is no integer of 8 bits."""
        with self.lock:
            self.read[name] = read_all(reader)
            if len(self.read) == len(self.names):
                self._finish(module)
                self.read.clear()

    def _finish(self, module: ModuleShard) -> None:
        codes = qoq_codes(self.read["qweight"]).to(torch.int16)
        if "s2_scales" in self.read:
            scales, zeros = (qoq_rows(self.read[one]) for one in ("s2_scales", "s2_zeros"))
            grouped = codes.unflatten(1, (scales.shape[1], -1))
            values = (grouped * scales.short().unsqueeze(2) + zeros.short().unsqueeze(2)).flatten(1)
        else:
            values = codes - self._zeros().unsqueeze(1)
        low, high = INT8_RANGE
        if int(values.min()) < low or int(values.max()) > high:
            raise ModelError("weights of qoq are no integers of 8 bits; download the model again")
        module.tensors["weight"].copy_(values[module.rows, module.columns])

    def _zeros(self) -> Tensor:
        """The zero point of each output, int16 [out]; the checkpoint has them times the scale."""
        scales = self.read["s1_scales"].float()
        zeros = self.read["s1_szeros"].float() / torch.where(scales == 0, 1, scales)
        whole = zeros.round()
        if float((zeros - whole).abs().max()) > MAX_FRACTION:
            raise ModelError("zero points of qoq lie between codes (s1_szeros), which is not supported")
        return whole.to(torch.int16)


def qoq(module: ModuleShard) -> ModuleTensors:
    """QoQ with a scale and a zero point for each output, or in groups of 128 inputs. Raises ModelError for
    sizes that it does not have."""
    outputs, inputs = module.outputs.full, module.inputs.full
    has_groups = module.format.layout == "qoq_groups"
    _check_tiles("qoq", outputs, inputs, QOQ_ROWS, QOQ_GROUP if has_groups else QOQ_ROWS)
    groups, packed = [(inputs // QOQ_GROUP, outputs)], [(outputs, inputs // 2)]
    names = ("qweight", "s2_scales", "s2_zeros") if has_groups else ("qweight", "s1_scales", "s1_szeros")
    parts = _Parts(names)

    def load_scales(module: ModuleShard, reader: TensorReader) -> None:
        load_scale(module, reader)
        if not has_groups:
            parts.load("s1_scales", module, reader)

    sources = {
        "qweight": module.source(packed, partial(parts.load, "qweight"), ("I8",)),
        "s1_scales": module.source([(outputs,)], load_scales, dummy_kind="scale"),
    }
    others = ("s2_scales", "s2_zeros") if has_groups else ("s1_szeros",)
    for name in others:
        load, dtypes = partial(parts.load, name), ("I8",) if has_groups else ("F16", "BF16", "F32")
        kind = "one" if name == "s2_scales" else "zero"
        sources[name] = module.source(groups if has_groups else [(outputs,)], load, dtypes, dummy_kind=kind)
    return ModuleTensors(sources)
