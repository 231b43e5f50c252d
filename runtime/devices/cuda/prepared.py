"""Inputs of a product that the kernel before it has quantized: norms and gates write their result in the form
that the layer behind them takes, next to the result itself."""

import torch
from torch import Tensor

from runtime.devices.cuda.gemm import GemmInputs
from runtime.devices.cuda.kernels.activation_quantization import RowCodes
from runtime.devices.cuda.weights import PackedWeight

MOST_HELD = 16384  # numbers of a row that a program holds, where a row has one scale


class PreparedInputs:
    """The latest of them."""

    def __init__(self) -> None:
        self.latest: tuple[Tensor, PackedWeight, GemmInputs] | None = None

    def codes_for(self, rows: int, packed: object, like: Tensor) -> RowCodes | None:
        """Where a kernel writes `rows` rows in the form that products with `packed` take; None: it does not.
        Such a weight reads activations in their own order, with scales that are found in them."""
        if not isinstance(packed, PackedWeight) or not packed.inputs or len(packed.weight) != 1:
            return None
        is_found = packed.columns is None and packed.input_scale is None and packed.input_offset is None
        group = packed.group if packed.has_group_input_scales else 0
        is_whole = packed.padded == packed.ins and group in (0, packed.source_group)
        is_held = group.bit_count() == 1 and 1024 % group == 0 if group else packed.ins <= MOST_HELD
        if not (is_found and is_whole and is_held):
            return None
        groups = packed.ins // group if group else 1
        codes = torch.empty(rows, packed.ins, dtype=torch.uint8, device=like.device)
        scales = torch.empty(rows, groups, dtype=torch.float32, device=like.device)
        return RowCodes(codes, scales, packed.inputs, group)

    def put(self, x: Tensor, packed: PackedWeight, codes: RowCodes) -> None:
        """`codes` are what products with `packed` take of `x`."""
        values = codes.codes.view(torch.int8) if codes.kind == "int8" else codes.codes
        self.latest = x, packed, GemmInputs(values, None if packed.sums is not None else codes.scales, 1)

    def take(self, x: Tensor, packed: PackedWeight) -> GemmInputs | None:
        """What was put for this very tensor and weight; None: nothing was."""
        latest = self.latest
        return latest[2] if latest is not None and latest[0] is x and latest[1] is packed else None
