"""Weights in the layouts of ModelOpt, Quark, bitsandbytes, AutoRound, torchao, and in floats of 4 bits.

Compared once with what their own libraries write: torchao 0.18 (Int8WeightOnlyConfig, IntxWeightOnlyConfig),
bitsandbytes 0.50 (nf4, fp4, double quantisation, int8), compressed-tensors 0.20 (nvfp4, mxfp4, mxfp8).
"""

import json
from typing import Any

import torch
from torch import Tensor

from tests.models.quantisers import (
    GROUP,
    SQUARE,
    Round,
    Written,
    block_fp8,
    config,
    fp8,
    grouped,
    inputs,
    token_fp8,
    token_int8,
    write_awq,
    write_channel,
    write_fp8,
    write_packed,
)

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
FP4 = torch.tensor([0, 0.0625 / 12, 8 / 12, 1, 4 / 12, 6 / 12, 2 / 12, 3 / 12])
FP4 = torch.cat((FP4, -FP4))


def same(x: Tensor) -> Tensor:
    return x


def nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values.unsqueeze(-1) - table).abs().argmin(-1)


def float4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of E2M1, and what they mean."""
    codes = nearest(values.abs(), E2M1)
    return codes | (values < 0).long() << 3, E2M1[codes] * values.sign()


def pairs(codes: Tensor) -> Tensor:
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def stream(codes: Tensor, bits: int) -> Tensor:
    """int [..., n] -> int32 words of codes without gaps between them."""
    found = (codes.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2).unflatten(-1, (-1, 32))
    total = (found.long() << torch.arange(32)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def in_groups(weight: Tensor, size: int) -> Tensor:
    return weight.unflatten(1, (-1, size))


def power(largest: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Exponents for E8M0, with which `largest` is below 2 ** (most + 1), and the scales."""
    exponent = largest.log2().floor() - most
    return (exponent + 127).to(torch.uint8), 2.0**exponent


def write_nvfp4(weight: Tensor, is_packed: bool) -> Written:
    parts = in_groups(weight, 16)
    total = weight.abs().max() / (448 * 6)
    scale = fp8(parts.abs().amax(2) / 6 / total)
    full = scale.float().unsqueeze(2) * total
    codes, means = float4(parts / full)
    means = (means * full).flatten(1)
    packed = pairs(codes.flatten(1))
    if is_packed:
        tensors = {"weight_packed": packed, "weight_global_scale": (1 / total).reshape(1)}
        more = {"input_global_scale": torch.tensor([7.0])}
    else:
        tensors = {"weight": packed, "weight_scale_2": total}
        more = {"input_scale": torch.tensor(0.5)}
    return Written(tensors | more | {"weight_scale": scale}, means)


def write_mxfp4(weight: Tensor, name: str) -> Written:
    parts = in_groups(weight, 32)
    exponent, scale = power(parts.abs().amax(2), 2)
    codes, means = float4(parts / scale.unsqueeze(2))
    means = (means * scale.unsqueeze(2)).flatten(1)
    return Written({name: pairs(codes.flatten(1)), "weight_scale": exponent}, means)


def write_mxfp8(weight: Tensor, scale_name: str) -> Written:
    parts = in_groups(weight, 32)
    exponent, scale = power(parts.abs().amax(2), 8)
    codes = fp8(parts / scale.unsqueeze(2))
    means = (codes.float() * scale.unsqueeze(2)).flatten(1)
    return Written({"weight": codes.flatten(1), scale_name: exponent}, means, block_fp8)


def write_gptq_bits(weight: Tensor, bits: int, less: int) -> Written:
    codes, scales, zeros, means = grouped(weight, bits, GROUP, False)
    tensors = {
        "qweight": stream(codes, bits).T.contiguous(),
        "qzeros": stream(zeros.T.contiguous() - less, bits),
        "scales": scales.T.half().contiguous(),
    }
    return Written(tensors, means)


def write_bitsandbytes(weight: Tensor, kind: str, is_double: bool) -> Written:
    table, size = NF4 if kind == "nf4" else FP4, 64
    blocks = weight.reshape(-1, size)
    absmax = blocks.abs().amax(1)
    codes = nearest(blocks / absmax.unsqueeze(1), table)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "float32"}
    state["shape"] = list(weight.shape)
    tensors = {"weight.quant_map": table.clone()}
    if is_double:  # of 256 factors each; their table is any 256 numbers of -1 to 1
        offset, table_of_256 = absmax.mean(), torch.linspace(-1, 1, 256)
        rest = absmax - offset
        nested = torch.stack([part.abs().max() for part in rest.split(256)])
        spread = nested.repeat_interleave(256)[: len(rest)]
        codes_of_256 = nearest(rest / spread, table_of_256)
        absmax = table_of_256[codes_of_256] * spread + offset
        tensors |= {
            "weight.absmax": codes_of_256.to(torch.uint8),
            "weight.nested_absmax": nested,
            "weight.nested_quant_map": table_of_256,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        tensors["weight.absmax"] = absmax
    flat = codes.flatten()
    tensors["weight"] = (flat[::2] << 4 | flat[1::2]).to(torch.uint8).unsqueeze(1)
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return Written(tensors, (table[codes] * absmax.unsqueeze(1)).view(weight.shape))


def write_int8(weight: Tensor, names: tuple[str, str], rounds: Round, factor: float = 1) -> Written:
    """A scale for each output, which is stored times `factor`."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    stored = scale if factor == 1 else scale[:, 0] * factor
    return Written({names[0]: codes, names[1]: stored}, codes.float() * scale, rounds)


def write_torchao_fp8(weight: Tensor, rounds: Round) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = fp8(weight / scale)
    return Written({"_weight_qdata": codes, "_weight_scale": scale}, codes.float() * scale, rounds)


def write_intx(weight: Tensor, symmetric: bool, rounds: Round) -> Written:
    """torchao's codes of 4 bits in a byte each, from -8."""
    codes, scales, zeros, means = grouped(weight, 4, SQUARE, symmetric)
    tensors = {
        "_weight_qdata": (codes - 8).to(torch.int8),
        "_weight_scale": scales,
        "_weight_zero_point": (zeros - 8).to(torch.int8),
    }
    return Written(tensors, means, rounds)


def write_w4afp8(weight: Tensor) -> Written:
    codes, scales, _, means = grouped(weight, 4, SQUARE, True)
    tensors = {
        "weight": pairs(codes - 8 & 15).view(torch.int8),
        "weight_scale_inv": scales.bfloat16(),
        "input_scale": torch.tensor(1.0),
    }
    return Written(
        tensors,
        (means / scales.repeat_interleave(SQUARE, 1))
        * scales.bfloat16().float().repeat_interleave(SQUARE, 1),
    )


def write_w4a8(weight: Tensor) -> Written:
    written = write_packed(weight, 4, True, False)
    return Written(written.tensors, written.means, token_int8)


def quark(kind: str, by: str, activations: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    weight = {"dtype": kind, "qscheme": by, "is_dynamic": False} | more
    return {
        "quant_method": "quark",
        "exclude": ["lm_head", "*mlp.gate"],
        "layer_quant_config": {},
        "global_quant_config": {"weight": weight, "input_tensors": activations},
    }


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.mlp.gate"]}


def bnb(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", "gate"]} | fields


def nf4(kind: str = "nf4") -> dict[str, Any]:
    return bnb(load_in_4bit=True, bnb_4bit_quant_type=kind)


def auto_round(packing: str, bits: int = 4, **fields: Any) -> dict[str, Any]:
    base = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "data_type": "int"}
    return base | {"packing_format": packing, "extra_config": {".*mlp.gate$": {"bits": 16}}} | fields


def torchao(name: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": data}}}


def int4_groups(mapping: str, prefix: str = "") -> dict[str, Any]:
    return {
        "weight_dtype": {"_type": "torch.dtype", "_data": "int4"},
        prefix + "granularity": {"_type": "PerGroup", "_data": {"group_size": SQUARE}},
        prefix + "mapping_type": {"_type": "MappingType", "_data": mapping},
    }


def gptq(bits: int, version: str) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}


DYNAMIC = {"is_dynamic": True, "qscheme": "per_token"}
QDATA = ("_weight_qdata", "_weight_scale")
EXPORTS: dict[str, Any] = {
    "gptq 2": (lambda w, b: write_gptq_bits(w, 2, 1), gptq(2, "gptq")),
    "gptq 3": (lambda w, b: write_gptq_bits(w, 3, 0), gptq(3, "gptq_v2")),
    "mxfp8": (lambda w, b: write_mxfp8(w, "weight_scale_inv"), {"quant_method": "mxfp8"}),
    "ct mxfp8": (
        lambda w, b: write_mxfp8(w, "weight_scale"),
        config("mxfp8-quantized", "float", 8, "group", inputs("float", True), group_size=32),
    ),
    "ct nvfp4": (
        lambda w, b: write_nvfp4(w, True),
        config("nvfp4-pack-quantized", "float", 4, "tensor_group", None, group_size=16),
    ),
    "ct mxfp4": (
        lambda w, b: write_mxfp4(w, "weight_packed"),
        config("mxfp4-pack-quantized", "float", 4, "group", None, group_size=32),
    ),
    "ct w4a8": (
        lambda w, b: write_w4a8(w),
        config("pack-quantized", "int", 4, "group", inputs("int", True), group_size=GROUP),
    ),
    "ct int8 weights": (
        lambda w, b: write_int8(w, ("weight", "weight_scale"), same),
        config("int-quantized", "int", 8, "channel", None),
    ),
    "modelopt fp8": (lambda w, b: write_fp8(w, "static"), modelopt("FP8")),
    "modelopt nvfp4": (lambda w, b: write_nvfp4(w, False), modelopt("NVFP4")),
    "quark fp8": (
        lambda w, b: write_fp8(w, "dynamic"),
        quark("fp8_e4m3", "per_tensor", DYNAMIC | {"dtype": "fp8_e4m3"}),
    ),
    "quark int8": (
        lambda w, b: write_channel(w, "int", "dynamic"),
        quark("int8", "per_channel", DYNAMIC | {"dtype": "int8"}),
    ),
    "quark mxfp4": (
        lambda w, b: write_mxfp4(w, "weight"),
        quark("fp4", "per_group", None, group_size=32, scale_format="e8m0"),
    ),
    "nf4": (lambda w, b: write_bitsandbytes(w, "nf4", False), nf4()),
    "nf4 double": (lambda w, b: write_bitsandbytes(w, "nf4", True), nf4()),
    "bnb fp4": (lambda w, b: write_bitsandbytes(w, "fp4", False), nf4("fp4")),
    "bnb int8": (lambda w, b: write_int8(w, ("weight", "SCB"), same, 127), bnb(load_in_8bit=True)),
    "auto-round": (lambda w, b: write_gptq_bits(w, 4, 1), auto_round("auto_round:auto_gptq")),
    "auto-round own": (lambda w, b: write_gptq_bits(w, 2, 0), auto_round("auto_round", 2, sym=False)),
    "auto-round awq": (lambda w, b: write_awq(w), auto_round("auto_round:auto_awq")),
    "torchao int8wo": (lambda w, b: write_int8(w, QDATA, same), torchao("Int8WeightOnlyConfig")),
    "torchao int8dq": (
        lambda w, b: write_int8(w, QDATA, token_int8),
        torchao("Int8DynamicActivationInt8WeightConfig"),
    ),
    "torchao fp8wo": (lambda w, b: write_torchao_fp8(w, same), torchao("Float8WeightOnlyConfig")),
    "torchao fp8dq": (
        lambda w, b: write_torchao_fp8(w, token_fp8),
        torchao("Float8DynamicActivationFloat8WeightConfig"),
    ),
    "torchao int4": (
        lambda w, b: write_intx(w, False, same),
        torchao("IntxWeightOnlyConfig", **int4_groups("ASYMMETRIC")),
    ),
    "torchao 8da4w": (
        lambda w, b: write_intx(w, True, token_int8),
        torchao("Int8DynamicActivationIntxWeightConfig", **int4_groups("SYMMETRIC", "weight_")),
    ),
    "w4afp8": (
        lambda w, b: write_w4afp8(w),
        {"quant_method": "w4afp8", "group_size": SQUARE, "weight_block_size": [SQUARE, SQUARE]},
    ),
    "w8a8_int8": (lambda w, b: write_channel(w, "int", "dynamic"), {"quant_method": "w8a8_int8"}),
    "fbgemm": (lambda w, b: write_channel(w, "float", "dynamic"), {"quant_method": "fbgemm_fp8"}),
}
