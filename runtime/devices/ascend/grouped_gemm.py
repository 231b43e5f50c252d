"""Grouped matrix products (rows sorted by expert), and experts with quantized weights.

All kinds of experts have the same methods: `quantize(x)` prepares activations and their scales, and
`forward(rows, scales, counts, dtype)` computes the feed-forward of rows sorted by expert.
"""

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.formats import takes_nz, to_nz
from runtime.devices.ascend.grouped_scales import WORD, GroupQuantWeight, fake_quantize, pack_group_quant
from runtime.devices.ascend.quantized import swiglu_quant
from runtime.devices.base import Quantized
from runtime.layers.quantization.dequantize import unpack_codes
from runtime.models.config.quantization_schemes import PackedInt

# inputs of a product of int8 by int4: a multiple of the first, at most the second. CANN's documents of the
# fused form have "below 20000"; the tiling of the operator itself (grouped_matmul_tiling.cpp) has these
INPUT_TILE, MAX_INPUTS = 64, 18432
# outputs of the first product of npu_grouped_matmul_swiglu_quant_v2 are at most so many
MAX_FUSED_OUTPUTS = 10240


def grouped_matmul(
    rows: Tensor, weights: Tensor, counts: Tensor, dtype: torch.dtype | None = None, **more: Tensor | None
) -> Tensor:
    """rows [N, in] times weights [E, in, out]: the first counts[0] rows times the first weight, and so on.
    Rows behind the last expert's are undefined.

    `more`: scales and biases of the operator, each a tensor of all experts.
    """
    given = {name: [tensor] for name, tensor in more.items() if tensor is not None}
    return torch_npu.npu_grouped_matmul(
        [rows],
        [weights],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=list_type(weights),
        output_dtype=dtype,
        **given,
    )[0]


def list_type(weights: Tensor) -> int:
    """group_list_type for numbers of rows: counts; for a single group the operators want its end, which is
    the same number."""
    return 1 if len(weights) > 1 else 0


@dataclass(frozen=True, slots=True)
class TokenInt8:
    """Int8 experts whose activations have a scale for each token."""

    gate_up: Tensor  # int8 [E, hidden, 2 * inner]
    down: Tensor  # int8 [E, inner, hidden]
    gate_up_scale: Tensor  # [E, 2 * inner], float32 where `is_fused`
    down_scale: Tensor  # [E, hidden], as `scale_dtype` has it
    is_fused: bool  # the first product, activation and quantization are one operator

    def __len__(self) -> int:
        return len(self.down)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden] as int8, and scales [T]."""
        return torch_npu.npu_dynamic_quant(x.contiguous())

    def forward(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Feed-forward of rows [N, hidden], counts[e] of them for expert e -> [N, hidden]."""
        if self.is_fused:
            codes, scales = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                rows,
                [self.gate_up],
                [self.gate_up_scale],
                scales,
                counts,
                group_list_type=list_type(self.gate_up),
            )
        else:
            gate_up = grouped_matmul(
                rows, self.gate_up, counts, dtype, scale=self.gate_up_scale, per_token_scale=scales
            )
            codes, scales = swiglu_quant(gate_up)
        return grouped_matmul(codes, self.down, counts, dtype, scale=self.down_scale, per_token_scale=scales)


@dataclass(frozen=True, slots=True)
class StaticInt8:
    """One of the two weights of experts whose activations have a static scale and offset, from the
    checkpoint."""

    weight: Tensor  # int8 [E, in, out]
    scale: Tensor  # [E, out]
    sums: Tensor  # int32 [E, out]
    reciprocal: Tensor  # float32 [E, 1], of the activations' scale
    offset: Tensor  # float32 [E, 1]

    def multiply(self, rows: Tensor, expert_of: Tensor, counts: Tensor) -> Tensor:
        """Quantizes rows [N, in] and multiplies them -> [N, out]. `expert_of`: int64 [N]."""
        reciprocal, offset = (
            self.reciprocal.index_select(0, expert_of),
            self.offset.index_select(0, expert_of),
        )
        codes = torch.addcmul(offset, rows.float(), reciprocal).round_().clamp_(-128, 127).to(torch.int8)
        return grouped_matmul(codes, self.weight, counts, rows.dtype, scale=self.scale, bias=self.sums)


@dataclass(frozen=True, slots=True)
class TensorInt8:
    """Int8 experts with a static scale and offset of activations each. No operator of CANN quantizes by
    group, so torch's operators do."""

    gate_up: StaticInt8
    down: StaticInt8

    def __len__(self) -> int:
        return len(self.down.weight)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x as it is; `forward` quantizes it."""
        return x, None

    def forward(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Feed-forward of rows [N, hidden], counts[e] of them for expert e -> [N, hidden]."""
        index = torch.arange(len(rows), device=rows.device)
        expert_of = torch.searchsorted(counts.cumsum(0), index, right=True).clamp_max_(len(counts) - 1)
        inner = torch_npu.npu_swiglu(self.gate_up.multiply(rows, expert_of, counts), dim=-1)
        return self.down.multiply(inner, expert_of, counts)


@dataclass(frozen=True, slots=True)
class GroupQuantExperts:
    """Experts with weights of 4 or 8 bits and scales by group; activations are in full, or rounded to
    int8."""

    gate_up: GroupQuantWeight
    down: GroupQuantWeight

    def __len__(self) -> int:
        return len(self.down.weight)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x, rounded to int8 and back where the scheme has int8 activations."""
        return (fake_quantize(x) if self.gate_up.quantizes_inputs else x), None

    def forward(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Feed-forward of rows [N, hidden], counts[e] of them for expert e -> [N, hidden]."""
        inner = torch_npu.npu_swiglu(_matmul_group_quant(rows, self.gate_up, counts), dim=-1)
        return _matmul_group_quant(
            fake_quantize(inner) if self.down.quantizes_inputs else inner, self.down, counts
        )


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """One of the two weights of TokenInt4.

    The operator splits each int8 into two int4, x = 16 * floor(x / 16) + (x mod 16 - 8) + 8, and multiplies
    the weight by both; what the 8 adds does not depend on x and is a bias. It overwrites the int8.
    """

    weight: Tensor  # int32 [E, in, out / 8]
    scale: Tensor  # int64 [E, 1, out]: float32 in the lower halves
    eights: Tensor  # float32 [E, out]: 8 * scale * the weight's sum over its inputs

    def multiply(self, codes: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """int8 rows [N, in] times the weights -> [N, out]; overwrites `codes`."""
        return grouped_matmul(
            codes, self.weight, counts, dtype, scale=self.scale, bias=self.eights, per_token_scale=scales
        )


@dataclass(frozen=True, slots=True)
class TokenInt4:
    """Experts with 4-bit weights that have a scale for each output, and int8 activations with a scale for
    each token."""

    gate_up: Int4Weight
    down: Int4Weight

    def __len__(self) -> int:
        return len(self.down.weight)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden] as int8, and scales [T]."""
        return torch_npu.npu_dynamic_quant(x.contiguous())

    def forward(self, rows: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Feed-forward of rows [N, hidden], counts[e] of them for expert e -> [N, hidden]."""
        inner = swiglu_quant(self.gate_up.multiply(rows, scales, counts, dtype))
        return self.down.multiply(*inner, counts, dtype)


def _matmul_group_quant(rows: Tensor, weight: GroupQuantWeight, counts: Tensor) -> Tensor:
    offset = torch.zeros_like(weight.scale) if weight.offset is None else weight.offset
    return grouped_matmul(rows, weight.weight, counts, antiquant_scale=weight.scale, antiquant_offset=offset)


QuantizedExperts = TokenInt8 | TensorInt8 | TokenInt4 | GroupQuantExperts


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales that the grouped product takes for results of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def pack_quantized(gate_up: Quantized, down: Quantized, dtype: torch.dtype) -> QuantizedExperts:
    """Quantized experts in the form that the grouped product takes. Raises ModelError for what it does not
    support."""
    if takes_int4(gate_up) and takes_int4(down):
        return TokenInt4(_pack_int4(gate_up), _pack_int4(down))
    if isinstance(gate_up.scheme, PackedInt):
        return GroupQuantExperts(pack_group_quant(gate_up, dtype), pack_group_quant(down, dtype))
    if gate_up.input_scale is not None:
        return TensorInt8(_pack_static(gate_up, dtype), _pack_static(down, dtype))
    first = _transposed(gate_up)
    # the operator takes weights in FRACTAL_NZ alone
    is_fused = takes_nz(first) and first.shape[2] <= MAX_FUSED_OUTPUTS
    scales = gate_up.scale.squeeze(2), down.scale.squeeze(2).to(scale_dtype(dtype))
    return TokenInt8(
        first,
        _transposed(down),
        scales[0] if is_fused else scales[0].to(scale_dtype(dtype)),
        scales[1],
        is_fused,
    )


def takes_int4(weight: Quantized) -> bool:
    """Whether the product of int8 by int4 takes this weight. It needs several experts, and how it takes
    scales by group is not documented clearly (docs/ascend.md)."""
    scheme, (experts, outs, ins) = weight.scheme, weight.weight.shape
    return (
        isinstance(scheme, PackedInt)
        and scheme.bits == 4
        and scheme.activations == "token"
        and weight.zeros is None
        and weight.scale.shape[-1] == 1
        and experts > 1
        and outs % WORD == 0
        and 2 * ins % INPUT_TILE == 0
        and 2 * ins <= MAX_INPUTS
    )


def _pack_int4(weight: Quantized) -> Int4Weight:
    centred = (
        unpack_codes(weight.weight, 4).transpose(1, 2).to(torch.int32) - 8
    ).contiguous()  # [E, in, out]
    packed = torch_npu.npu_convert_weight_to_int4pack(centred.flatten(0, 1)).unflatten(0, centred.shape[:2])
    scale = weight.scale.squeeze(2)
    words = scale.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return Int4Weight(packed, words.unsqueeze(1), 8 * scale * centred.sum(1, dtype=torch.float32))


def _transposed(weight: Quantized) -> Tensor:
    return to_nz(weight.weight.transpose(1, 2).contiguous())


def _pack_static(weight: Quantized, dtype: torch.dtype) -> StaticInt8:
    assert weight.input_scale is not None and weight.input_offset is not None and weight.sums is not None
    return StaticInt8(
        _transposed(weight),
        weight.scale.squeeze(2).to(scale_dtype(dtype)),
        weight.sums,
        1 / weight.input_scale,
        weight.input_offset,
    )
