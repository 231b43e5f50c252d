"""Packed weights of real sizes without memory of their own, for launches that run nothing."""

from dataclasses import replace

import torch

from runtime.devices.cuda.fragments import BLOCK, PART
from runtime.devices.cuda.weights import PackedWeight
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme


def lacking(scheme: Scheme, experts: int, outs: int, ins: int) -> PackedWeight:
    """A packed weight without memory of its own."""
    group = 0 if isinstance(scheme, Int8) else scheme.group_size
    groups, bits = ins // group if group else 1, scheme.bits if isinstance(scheme, PackedInt) else 8
    kind, inputs = {8: "fp8" if isinstance(scheme, Fp8) else "int8", 4: "codes4"}[bits], ""
    if isinstance(scheme, PackedInt) and bits == 8:
        kind = "codes8"
    if scheme.activations != "none":
        inputs = "fp8" if isinstance(scheme, Fp8) else "int8"
    number = torch.int8 if kind == "int8" else torch.uint8
    weight = torch.empty(1, dtype=number).expand(experts, outs, ins * bits // 8)
    zeros = (
        torch.empty(experts, groups, outs, dtype=torch.uint8)
        if isinstance(scheme, PackedInt) and scheme.has_zero_points
        else None
    )
    return PackedWeight(
        scheme.name,
        kind,
        inputs,
        weight,
        outs,
        ins,
        ins,
        group,
        group,
        64 if kind == "codes4" else 128,
        torch.empty(experts, groups, outs),
        zeros,
    )


def fragments(kind: str, experts: int, outs: int, ins: int) -> PackedWeight:
    """A weight in fragments, or experts of gpt-oss in MXFP4, without memory of its own."""
    blocks, is_mxfp4 = -(-ins // BLOCK), kind == "mxfp4"
    words = torch.empty(1, dtype=torch.int32).expand(experts, outs, blocks * BLOCK // 8)
    scales = torch.empty(1, dtype=torch.int32).expand(experts, blocks, outs)
    group, gate = (PART, "clamped") if is_mxfp4 else (BLOCK, "silu")
    facts = outs, ins, blocks * BLOCK, group, group, BLOCK, scales
    biases = torch.empty(experts, outs, dtype=torch.bfloat16) if is_mxfp4 else None
    scheme = "" if is_mxfp4 else "int4_weight"
    return PackedWeight(scheme, kind, "", words, *facts, biases=biases, gate=gate)


def by_block(experts: int, outs: int, ins: int) -> PackedWeight:
    """8-bit floats whose scales are of blocks, without memory of their own."""
    packed = lacking(Fp8(128), experts, outs, ins)
    return replace(packed, blocks=torch.empty(1).expand(experts, outs // 128, -(-ins // 512) * 4))
