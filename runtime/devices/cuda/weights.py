"""Weights of all schemes as kernels/gemm.py reads them: a stack with one weight for each expert, or with
one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cuda.fragments import (
    BLOCK,
    FRAGMENTS,
    PART,
    exponent_words,
    scale_words,
    takes_group,
    to_words,
)
from runtime.devices.cuda.gemm_tiles import FRAGMENT_SCHEMES
from runtime.devices.operands import CodedStack
from runtime.layers.quantization.dequantize import unpack_codes
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt

K_BLOCKS = (128, 64, 32, 16)  # numbers of inputs that gemm_kernel may take at a time
# other groups are padded to a multiple of this, the fewest 8-bit numbers that tensor cores take
GROUP_ALIGNMENT = 32
SCALE_BLOCK = 128  # outputs and inputs of a block of 8-bit floats that shares a scale


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """E weights [outs, ins]. `padded`: ins, with padded groups."""

    scheme: str  # one of SCHEMES, or "" for weights in full
    kind: str  # format of the weights: plain, fp8, int8, codes4, codes8, or one of FRAGMENTS
    inputs: str  # format that activations are quantized to: fp8, int8, or "" where they are not
    # [E, outs, padded], 8-bit floats as bytes; codes4: [E, outs, padded / 2], see `interleave`; FRAGMENTS:
    # int32 [E, outs, padded / 8], see kernels/fragments.py
    weight: Tensor
    outs: int
    ins: int
    padded: int
    group: int = 0  # padded inputs that share a scale; 0: all
    source_group: int = 0  # inputs that share a scale; 0: all
    k_block: int = K_BLOCKS[0]  # the most inputs that a program takes at a time; for codes4, the exact number
    scales: Tensor | None = None  # float32 [E, groups, outs]; FRAGMENTS: words, int32 [E, groups, outs]
    zeros: Tensor | None = None  # uint8 [E, groups, outs]
    columns: Tensor | None = None  # int32 [E, padded]: the input of each column; -1: padding
    input_scale: Tensor | None = None  # float32 [E]: input_scale
    input_offset: Tensor | None = None  # float32 [E]: input_offset
    sums: Tensor | None = None  # int32 [E, outs]
    biases: Tensor | None = None  # of experts, [E, outs]
    # float32 [E, outs / 128, groups and up to three more], where groups are of 128 inputs, and blocks of as
    # many outputs share their scales
    blocks: Tensor | None = None
    gate: str = "silu"  # of experts that have a gate: silu, or clamped (models/gpt_oss.py)

    @property
    def has_group_input_scales(self) -> bool:
        """Whether activations have a scale for each group."""
        return self.inputs == "fp8" and self.group > 0 and self.input_scale is None

    @property
    def has_output_scales(self) -> bool:
        """Whether all inputs of an output share a scale, and sums are multiplied by it."""
        return self.scales is not None and self.group == 0 and self.kind not in FRAGMENTS

    @property
    def has_expert_inputs(self) -> bool:
        """Whether a token's activations differ between experts."""
        return self.columns is not None or self.input_scale is not None


def pack_dense(weight: Tensor, biases: Tensor | None = None, gate: str = "silu") -> PackedWeight:
    """Weights in full, [E, outs, ins], and what experts have besides."""
    shape = weight.shape
    return PackedWeight("", "plain", "", weight, *shape[1:], shape[2], biases=biases, gate=gate)


def pack_mxfp4(stack: CodedStack, biases: Tensor, gate: str) -> PackedWeight:
    """Experts in MXFP4, with exponents of at most fragments.MOST_EXPONENT, and their biases [E, outs]."""
    codes, exponents = stack
    words = torch.stack([to_words(unpack_codes(one, 4), "mxfp4") for one in codes])
    outs, ins = codes.shape[1], codes.shape[2] * 2
    padded, scales = words.shape[2] * 8, exponent_words(exponents)
    kinds = "", "mxfp4", ""
    return PackedWeight(
        *kinds, words, outs, ins, padded, PART, PART, BLOCK, scales.contiguous(), biases=biases, gate=gate
    )


def pack(weight: Quantized, fragments: frozenset[str] = FRAGMENT_SCHEMES) -> PackedWeight:
    """A quantized weight, or a stack of them. The bytes are the checkpoint's, except for 4-bit codes and for
    groups of other sizes than the kernel takes. `fragments`: as gemm_tiles.FRAGMENT_SCHEMES."""
    scheme = weight.scheme
    numbers, scale = (t if t.dim() == 3 else t.unsqueeze(0) for t in (weight.weight, weight.scale))
    has_groups = scale.shape[2] > 1
    scales = scale.transpose(1, 2).contiguous()
    inputs = "" if scheme.activations == "none" else "fp8" if isinstance(scheme, Fp8) else "int8"
    input_scale, input_offset = (
        None if t is None else t.reshape(-1) for t in (weight.input_scale, weight.input_offset)
    )
    sums = None if weight.sums is None else weight.sums.reshape(len(numbers), -1)
    outs, ins = numbers.shape[1:]
    if isinstance(scheme, PackedInt):
        found = _pack_fragments(weight, scheme, numbers, scales) if scheme.name in fragments else None
        return _pack_codes(weight, scheme, numbers, scales, inputs) if found is None else found
    if isinstance(scheme, Int8):
        return PackedWeight(
            scheme.name,
            "int8",
            inputs,
            numbers,
            outs,
            ins,
            ins,
            scales=scales,
            input_scale=input_scale,
            input_offset=input_offset,
            sums=sums,
        )
    numbers, group = numbers.view(torch.uint8), scheme.group_size if has_groups else 0
    width, columns = -(-group // GROUP_ALIGNMENT) * GROUP_ALIGNMENT, None
    if group and (width != group or ins % group):
        numbers = torch.nn.functional.pad(numbers, (0, -ins % group)).unflatten(2, (-1, group))
        numbers = torch.nn.functional.pad(numbers, (0, width - group)).flatten(2)
        if not inputs:  # activations that are not quantized are read in the order of padded groups
            order = (torch.arange(ins, device=numbers.device) // group).expand(len(numbers), ins)
            columns, _ = align_groups(order, scales.shape[1], width)
    return PackedWeight(
        scheme.name,
        "fp8",
        inputs,
        numbers,
        outs,
        ins,
        numbers.shape[2],
        width,
        group,
        k_block_of(width),
        scales,
        columns=columns,
        input_scale=input_scale,
        blocks=_scale_blocks(scale) if inputs and group == SCALE_BLOCK and ins % group == 0 else None,
    )


def _scale_blocks(scale: Tensor) -> Tensor | None:
    """Scales [E, outs, groups] of blocks of SCALE_BLOCK outputs, [E, blocks, groups and zeros up to a
    multiple of four], as cuBLAS takes them. None: outputs of a block have different ones."""
    if scale.shape[1] % SCALE_BLOCK:
        return None
    each = scale.unflatten(1, (-1, SCALE_BLOCK))
    blocks = each[:, :, 0]
    if not bool((each == blocks.unsqueeze(2)).all()):
        return None
    return torch.nn.functional.pad(blocks, (0, -blocks.shape[2] % 4)).contiguous()


def k_block_of(width: int) -> int:
    """The longest piece of whole groups of this width; 0: of no groups."""
    return next(k_block for k_block in K_BLOCKS if width % k_block == 0)


def _pack_fragments(
    weight: Quantized, scheme: PackedInt, numbers: Tensor, scales: Tensor
) -> PackedWeight | None:
    """4-bit codes in fragments. None: groups are of a size that they do not have."""
    outs, ins = numbers.shape[1], numbers.shape[2] * 8 // scheme.bits
    columns, width = None, scheme.group_size if scales.shape[1] > 1 else 0
    if weight.order is not None:
        order = weight.order.reshape(-1, ins).long().expand(len(numbers), ins)
        columns, width = align_groups(order, scales.shape[1], PART)
    if scheme.bits != 4 or scheme.activations != "none" or not takes_group(width):
        return None
    words = []
    for expert, octets in enumerate(numbers):
        values = unpack_codes(octets, 4)
        if columns is not None:
            values = values.index_select(1, columns[expert].clamp(min=0).long())
        words.append(to_words(values, "fragments4"))
    zeros = None if weight.zeros is None else weight.zeros.reshape(len(numbers), outs, -1).transpose(1, 2)
    made = torch.stack(words)
    padded = made.shape[2] * 8 if columns is None else columns.shape[1]
    facts = outs, ins, padded, width, scheme.group_size if width else 0, BLOCK
    scale = scale_words(scales, zeros)
    if width:  # also for the inputs that fill up the last block
        lacking = -(-made.shape[2] * 8 // width) - scale.shape[1]
        scale = torch.nn.functional.pad(scale, (0, 0, 0, lacking))
    return PackedWeight(scheme.name, "fragments4", "", made, *facts, scale, columns=columns)


def _pack_codes(
    weight: Quantized, scheme: PackedInt, numbers: Tensor, scales: Tensor, inputs: str
) -> PackedWeight:
    outs, ins = numbers.shape[1], numbers.shape[2] * 8 // scheme.bits
    group = scheme.group_size if scales.shape[1] > 1 else 0
    zeros = (
        None
        if weight.zeros is None
        else weight.zeros.reshape(len(numbers), outs, -1).transpose(1, 2).contiguous()
    )
    columns, width, padded = None, group, ins
    k_blocks = K_BLOCKS[scheme.bits == 4 :] if not inputs else K_BLOCKS[1:-1]
    if weight.order is not None or not _is_aligned(k_blocks, scheme.bits, group, ins):
        order = (
            torch.arange(ins, device=numbers.device) // (group or ins)
            if weight.order is None
            else weight.order
        )
        columns, width = align_groups(
            order.reshape(-1, ins).long().expand(len(numbers), ins),
            scales.shape[1],
            max(GROUP_ALIGNMENT, 2 * k_blocks[-1]),
        )
        padded, width = columns.shape[1], width if group else 0
    k_block = k_block_of(width)
    if scheme.bits == 4:
        k_block = next(p for p in k_blocks if (width or padded) % p == 0 and padded % (2 * p) == 0)
    if columns is not None or scheme.bits == 4:
        numbers = torch.stack(
            [
                _reorder(numbers[i], None if columns is None else columns[i], scheme.bits, k_block)
                for i in range(len(numbers))
            ]
        )
    return PackedWeight(
        scheme.name,
        f"codes{scheme.bits}",
        inputs,
        numbers,
        outs,
        ins,
        padded,
        width,
        group,
        k_block,
        scales,
        zeros,
        columns,
    )


def _is_aligned(k_blocks: tuple[int, ...], bits: int, group: int, ins: int) -> bool:
    """Whether gemm_kernel takes these groups without padding."""
    if bits == 4:
        return ins % (group or ins) == 0 and any(
            (group or ins) % p == 0 and ins % (2 * p) == 0 for p in k_blocks
        )
    return group == 0 or (group % k_blocks[-1] == 0 and ins % group == 0)


def align_groups(order: Tensor, num_groups: int, alignment: int) -> tuple[Tensor, int]:
    """Makes groups contiguous and equally wide: order int64 [E, ins], the group of each input -> int32 [E,
    groups * width], the input of each column (-1: padding), and the width, a multiple of `alignment`. Inputs
    of a group keep their order."""
    counts = torch.stack([torch.bincount(line, minlength=num_groups) for line in order])
    width = -(-max(1, int(counts.max())) // alignment) * alignment
    sorted_ids = order.argsort(dim=1, stable=True)
    group = order.gather(1, sorted_ids)
    rank = torch.arange(order.shape[1], device=order.device) - (counts.cumsum(1) - counts).gather(1, group)
    columns = torch.full((len(order), num_groups * width), -1, device=order.device)
    columns.scatter_(1, group * width + rank, sorted_ids)
    return columns.int(), width


def _reorder(octets: Tensor, columns: Tensor | None, bits: int, k_block: int) -> Tensor:
    """One weight's codes in the order of `columns`; 4-bit codes are interleaved."""
    values = unpack_codes(octets, bits)
    if columns is not None:
        values = values.index_select(1, columns.clamp(min=0).long())
    return values if bits == 8 else interleave(values, k_block)


def interleave(values: Tensor, k_block: int) -> Tensor:
    """uint8 [outs, ins] -> [outs, ins / 2]: of each 2 * k_block inputs, the first half is in the lower four
    bits and the second half in the upper."""
    low, high = values.unflatten(1, (-1, 2, k_block)).unbind(2)
    return (low | (high << 4)).flatten(1)
