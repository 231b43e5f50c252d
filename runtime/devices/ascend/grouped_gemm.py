"""Products of rows grouped by expert, and experts whose weights are quantised."""

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.formats import in_tiles
from runtime.devices.ascend.grouped_scales import WORD, Coded, pack_coded, rounded
from runtime.devices.base import Quantized
from runtime.layers.quantization.quantized_weight import unpack_codes
from runtime.models.quantization_schemes import PackedInt

MOST_INPUTS = 20000  # of a product of int8 by int4, exclusive, as CANN documents it for the fused form
# inner sizes of npu_dequant_swiglu_quant with groups: multiples of it, so many at most
FUSED_INNER, MOST_FUSED_INNER = 64, 10496


def grouped(
    rows: Tensor, weights: Tensor, counts: Tensor, dtype: torch.dtype | None = None, **more: Tensor | None
) -> Tensor:
    """rows [N, in] times weights [E, in, out], the first counts[0] rows times the first, and so on; what is
    behind them is anything.

    `more`: scales and biases of the operator, one tensor of all experts each.
    """
    # counts; the operator wants ends of a single group, which is the same
    kind = 1 if len(weights) > 1 else 0
    given = {name: [tensor] for name, tensor in more.items() if tensor is not None}
    return torch_npu.npu_grouped_matmul(
        [rows],
        [weights],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=kind,
        output_dtype=dtype,
        **given,
    )[0]


@dataclass(frozen=True, slots=True)
class TokenInt8:
    """Experts whose activations have a scale for each token."""

    gate_up: Tensor  # int8 [E, hidden, 2 * inner]
    down: Tensor  # int8 [E, inner, hidden]
    gate_up_scale: Tensor  # [E, 2 * inner], float32 where the activation is fused
    down_scale: Tensor  # [E, hidden], as `scale_dtype` has it
    is_fused: bool  # npu_dequant_swiglu_quant between the products

    def __len__(self) -> int:
        return len(self.down)

    def prepared(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes, with their scales: a token's, however many experts it has."""
        return torch_npu.npu_dynamic_quant(x.contiguous())

    def products(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        if self.is_fused:
            total = grouped(rows, self.gate_up, counts, torch.int32)
            codes, scales = torch_npu.npu_dequant_swiglu_quant(
                total,
                weight_scale=self.gate_up_scale,
                activation_scale=scales,
                group_index=counts,
                activate_left=True,
                quant_mode=1,
            )
        else:
            gate_up = grouped(
                rows, self.gate_up, counts, dtype, scale=self.gate_up_scale, per_token_scale=scales
            )
            codes, scales = torch_npu.npu_dynamic_quant(torch_npu.npu_swiglu(gate_up, dim=-1))
        return grouped(codes, self.down, counts, dtype, scale=self.down_scale, per_token_scale=scales)


@dataclass(frozen=True, slots=True)
class Settled:
    """One of the two weights of experts whose activations have their scale and offset from the checkpoint."""

    weight: Tensor  # int8 [E, in, out]
    scale: Tensor  # [E, out]
    sums: Tensor  # int32 [E, out]
    reciprocal: Tensor  # float32 [E, 1], of the activations' scale
    offset: Tensor  # float32 [E, 1]

    def multiply(self, rows: Tensor, expert_of: Tensor, counts: Tensor) -> Tensor:
        reciprocal, offset = (
            self.reciprocal.index_select(0, expert_of),
            self.offset.index_select(0, expert_of),
        )
        codes = torch.addcmul(offset, rows.float(), reciprocal).round_().clamp_(-128, 127).to(torch.int8)
        return grouped(codes, self.weight, counts, rows.dtype, scale=self.scale, bias=self.sums)


@dataclass(frozen=True, slots=True)
class TensorInt8:
    """Experts of which each has scale and offset of its activations settled: no operator rounds by group, so
    torch's do."""

    gate_up: Settled
    down: Settled

    def __len__(self) -> int:
        return len(self.down.weight)

    def prepared(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def products(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        index = torch.arange(len(rows), device=rows.device)
        expert_of = torch.searchsorted(counts.cumsum(0), index, right=True).clamp_max_(len(counts) - 1)
        inner = torch_npu.npu_swiglu(self.gate_up.multiply(rows, expert_of, counts), dim=-1)
        return self.down.multiply(inner, expert_of, counts)


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """Experts whose weights have 4 or 8 bits, scales by group, and activations as they are, or rounded to
    int8 and back."""

    gate_up: Coded
    down: Coded

    def __len__(self) -> int:
        return len(self.down.weight)

    def prepared(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return (rounded(x) if self.gate_up.is_rounded else x), None

    def products(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        inner = torch_npu.npu_swiglu(_widened(rows, self.gate_up, counts), dim=-1)
        return _widened(rounded(inner) if self.down.is_rounded else inner, self.down, counts)


@dataclass(frozen=True, slots=True)
class Narrow:
    """One of the two weights of TokenInt4.

    The operator makes two int4 of each int8, x = 16 * floor(x / 16) + (x mod 16 - 8) + 8, and multiplies the
    weight by both; what the 8 adds does not depend on x and is given beforehand. It overwrites the int8.
    """

    weight: Tensor  # int32 [E, in, out / 8]
    scale: Tensor  # int64 [E, 1, out]: float32 in the lower halves
    eights: Tensor  # float32 [E, out]: 8 * scale * the weight's sum over its inputs

    def multiply(self, codes: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        return grouped(
            codes, self.weight, counts, dtype, scale=self.scale, bias=self.eights, per_token_scale=scales
        )


@dataclass(frozen=True, slots=True)
class TokenInt4:
    """Experts of 4 bits with a scale for each output, times activations of int8 with a scale for each
    token."""

    gate_up: Narrow
    down: Narrow

    def __len__(self) -> int:
        return len(self.down.weight)

    def prepared(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return torch_npu.npu_dynamic_quant(x.contiguous())

    def products(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        inner = torch_npu.npu_swiglu(self.gate_up.multiply(rows, scales, counts, dtype), dim=-1)
        return self.down.multiply(*torch_npu.npu_dynamic_quant(inner), counts, dtype)


def _widened(rows: Tensor, weight: Coded, counts: Tensor) -> Tensor:
    offset = torch.zeros_like(weight.scale) if weight.offset is None else weight.offset
    return grouped(rows, weight.weight, counts, antiquant_scale=weight.scale, antiquant_offset=offset)


Packed = TokenInt8 | TensorInt8 | TokenInt4 | CodedExperts


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scales, as the grouped product wants them for results of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def pack_quantized(gate_up: Quantized, down: Quantized, dtype: torch.dtype) -> Packed:
    """Raises ModelError for what the grouped product does not take."""
    if is_narrow(gate_up) and is_narrow(down):
        return TokenInt4(_narrow(gate_up), _narrow(down))
    if isinstance(gate_up.scheme, PackedInt):
        return CodedExperts(pack_coded(gate_up, dtype), pack_coded(down, dtype))
    if gate_up.input_scale is not None:
        return TensorInt8(_settled(gate_up, dtype), _settled(down, dtype))
    inner = down.weight.shape[2]
    is_fused = inner % FUSED_INNER == 0 and inner <= MOST_FUSED_INNER
    scales = gate_up.scale.squeeze(2), down.scale.squeeze(2).to(scale_dtype(dtype))
    return TokenInt8(
        _turned(gate_up),
        _turned(down),
        scales[0] if is_fused else scales[0].to(scale_dtype(dtype)),
        scales[1],
        is_fused,
    )


def is_narrow(weight: Quantized) -> bool:
    """Whether the product of int8 by int4 takes it: it counts rows of several experts, and its scales by
    group are not settled (docs/ascend.md)."""
    scheme, (experts, outs, ins) = weight.scheme, weight.weight.shape
    return (
        isinstance(scheme, PackedInt)
        and scheme.bits == 4
        and scheme.activations == "token"
        and weight.zeros is None
        and weight.scale.shape[-1] == 1
        and experts > 1
        and outs % WORD == 0
        and 2 * ins < MOST_INPUTS
    )


def _narrow(weight: Quantized) -> Narrow:
    centred = (
        unpack_codes(weight.weight, 4).transpose(1, 2).to(torch.int32) - 8
    ).contiguous()  # [E, in, out]
    packed = torch_npu.npu_convert_weight_to_int4pack(centred.flatten(0, 1)).unflatten(0, centred.shape[:2])
    scale = weight.scale.squeeze(2)
    words = scale.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return Narrow(packed, words.unsqueeze(1), 8 * scale * centred.sum(1, dtype=torch.float32))


def _turned(weight: Quantized) -> Tensor:
    return in_tiles(weight.weight.transpose(1, 2).contiguous())


def _settled(weight: Quantized, dtype: torch.dtype) -> Settled:
    assert weight.input_scale is not None and weight.input_offset is not None and weight.sums is not None
    return Settled(
        _turned(weight),
        weight.scale.squeeze(2).to(scale_dtype(dtype)),
        weight.sums,
        1 / weight.input_scale,
        weight.input_offset,
    )
