"""quantization_config of tools that write several formats each: ModelOpt, Quark, bitsandbytes, AutoRound,
torchao. Torch-free."""

from typing import Literal

from runtime.json_value import Fields
from runtime.models.config.quantization_readers import gptq_format
from runtime.models.config.quantization_rules import Rule, all_but, glob, need
from runtime.models.config.quantization_schemes import Fp8, Full, Int8, PackedInt, WeightFormat

NVFP4, MXFP4 = Fp8(16, "none"), Fp8(32, "none")
AUTO_ROUND = {  # beginning of data_type -> format
    "nv": WeightFormat(NVFP4, "nvfp4_packed"),
    "mx": WeightFormat(MXFP4, "mxfp4_packed"),
}
MODELOPT: dict[str, WeightFormat] = {  # quant_algo -> format
    "FP8": WeightFormat(Fp8(activations="tensor"), "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat(Fp8(), "fp8"),
    "FP8_PB_WO": WeightFormat(Fp8(128, "none"), "fp8", block_rows=128),
    "MXFP8": WeightFormat(Fp8(32), "fp8", block_rows=1),
    "NVFP4": WeightFormat(NVFP4, "nvfp4"),
    "W4A16_NVFP4": WeightFormat(NVFP4, "nvfp4"),
}
Activations = Literal["none", "tensor", "token"]


def read_modelopt(hf: Fields) -> tuple[Rule, ...]:
    """NVIDIA ModelOpt: config.json's quantization_config, or `quantization` of hf_quant_config.json. Weights
    of NVFP4 keep their values, activations stay as they are."""
    algorithm = hf["quant_algo"]
    ignored = [glob(name) for name in hf.get("ignore") or hf.get("exclude_modules") or []]
    if algorithm == "MIXED_PRECISION":
        layers = hf["quantized_layers"].items()
        return tuple(Rule(name, _modelopt(str(layer["quant_algo"]))) for name, layer in layers)
    return all_but(_modelopt(str(algorithm)), ignored)


def _modelopt(algorithm: str) -> WeightFormat:
    need(algorithm in MODELOPT, "modelopt", f"quant_algo {algorithm}")
    return MODELOPT[algorithm]


def read_quark(hf: Fields) -> tuple[Rule, ...]:
    """AMD Quark: fp8, int8 and MXFP4. Activations of MXFP4 stay as they are."""
    rules = [Rule(glob(name), None) for name in hf.get("exclude") or []]
    rules += [Rule(glob(name), _quark(one)) for name, one in (hf.get("layer_quant_config") or {}).items()]
    return (*rules, *all_but(_quark(hf["global_quant_config"]), []))


def _quark(one: Fields) -> WeightFormat:
    weight, inputs = one["weight"], one.get("input_tensors")
    need(isinstance(weight, dict) and not isinstance(inputs, list), "quark", "weights in two stages")
    kind, by = weight["dtype"], weight["qscheme"]
    if kind == "fp4":
        is_mx = by == "per_group" and weight.get("group_size") == 32 and weight.get("scale_format") == "e8m0"
        need(is_mx, "quark", f"fp4 by {by}, groups of {weight.get('group_size')}")
        return WeightFormat(MXFP4, "mxfp4")
    need(kind in ("fp8_e4m3", "int8") and by in ("per_tensor", "per_channel"), "quark", f"{kind} by {by}")
    activations = _quark_activations(inputs, kind)
    if kind == "fp8_e4m3":
        return WeightFormat(Fp8(activations=activations), "fp8")
    if activations == "none":
        return WeightFormat(PackedInt(8, 0), "int8_bytes")
    return WeightFormat(Int8(activations), "compressed-tensors")


def _quark_activations(inputs: Fields | None, kind: str) -> Activations:
    if inputs is None:
        return "none"
    is_dynamic, by = bool(inputs.get("is_dynamic")), inputs.get("qscheme")
    fits = inputs.get("dtype") == kind and (is_dynamic or by == "per_tensor")
    need(fits, "quark", f"activations {inputs.get('dtype')} by {by}")
    return "token" if is_dynamic else "tensor"


def read_bitsandbytes(hf: Fields) -> tuple[Rule, ...]:
    """4 bits (nf4, fp4) are dequantized: their steps are uneven. 8 bits stay, with activations as they are,
    which rounds less than LLM.int8 does."""
    skipped = hf.get("llm_int8_skip_modules") or ["lm_head"]
    if hf.get("load_in_8bit") or hf.get("_load_in_8bit"):
        return all_but(WeightFormat(PackedInt(8, 0), "bitsandbytes_8"), skipped)
    kind = hf.get("bnb_4bit_quant_type", "fp4")
    need(bool(hf.get("load_in_4bit") or hf.get("_load_in_4bit")), "bitsandbytes", "neither 4 nor 8 bits")
    need(kind in ("nf4", "fp4"), "bitsandbytes", f"bnb_4bit_quant_type {kind}")
    need(hf.get("bnb_4bit_quant_storage", "uint8") == "uint8", "bitsandbytes", "bnb_4bit_quant_storage")
    return all_but(WeightFormat(Full(), "bitsandbytes_4"), skipped)


def read_auto_round(hf: Fields) -> tuple[Rule, ...]:
    """AutoRound, in its own packing and in those of GPTQ and AWQ. `extra_config` has what differs for some
    modules."""
    rules = []
    for name, changes in (hf.get("extra_config") or {}).items():
        pattern = "re:" + name if any(sign in name for sign in "*\\[(^$") else name
        rules.append(Rule(pattern, _auto_round(hf | changes)))
    return (*rules, *all_but(_auto_round(hf), ["lm_head"]))


def _auto_round(hf: Fields) -> WeightFormat | None:
    bits, kind = hf["bits"], str(hf.get("data_type", "int"))
    packing = str(hf.get("packing_format", "auto_round:auto_gptq"))
    if bits >= 16:
        return None
    if kind[:2] in AUTO_ROUND and bits == 4:
        return AUTO_ROUND[kind[:2]]
    need(kind in ("int", "int_sym", "int_asym"), "auto-round", f"data_type {kind}")
    need((hf.get("act_bits") or 16) >= 16, "auto-round", "quantised activations")
    if "awq" in packing:
        need(bits == 4, "auto-round", f"{bits} bits in the packing of AWQ")
        return WeightFormat(PackedInt(4, max(hf["group_size"], 0), has_zero_points=True), "awq")
    is_less = "gptq" in packing and "gptqmodel" not in packing  # zero points are stored less by one
    return gptq_format(hf, "gptq" if is_less else "gptq_v2")


def read_torchao(hf: Fields) -> tuple[Rule, ...]:
    """torchao's tensors in safetensors, as transformers' TorchAoConfig writes them."""
    kind = hf["quant_type"]
    need(isinstance(kind, dict) and "default" in kind, "torchao", "a quant_type that names no default")
    default = kind["default"]
    skipped = hf.get("modules_to_not_convert") or []
    return all_but(_torchao(str(default["_type"]), default["_data"]), [*skipped, "lm_head"])


def _torchao(name: str, data: Fields) -> WeightFormat:
    group, bits = _torchao_group(data), _torchao_bits(data)
    if name == "Int8WeightOnlyConfig":
        return WeightFormat(PackedInt(8, group), "int8_bytes")
    if name == "Int8DynamicActivationInt8WeightConfig":
        need(group == 0, "torchao", f"{name} in groups")
        return WeightFormat(Int8(), "compressed-tensors")
    if name in ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"):
        return WeightFormat(Fp8(activations="none" if "WeightOnly" in name else "token"), "fp8")
    need(name in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"), "torchao", name)
    need(
        bits is not None and data.get("intx_packing_format", UNPACKED) == UNPACKED,
        "torchao",
        f"{name}, packed",
    )
    mapping = data.get("mapping_type") or data.get("weight_mapping_type") or {}
    is_token = name.startswith("Int8")
    need(bits is not None and (bits <= 4 or not is_token), "torchao", f"{name} of {bits} bits")
    codes = PackedInt(
        4 if bits is not None and bits <= 4 else 8,
        group,
        has_zero_points=mapping.get("_data") == "ASYMMETRIC",
        activations="token" if is_token else "none",
    )
    return WeightFormat(codes, "int8_bytes")


UNPACKED = {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"}


def _torchao_group(data: Fields) -> int:
    by = data.get("granularity") or data.get("weight_granularity") or {}
    if isinstance(by, dict) and by.get("_type") == "PerGroup":
        return int(by["_data"]["group_size"])
    return int(data.get("group_size") or 0)


def _torchao_bits(data: Fields) -> int | None:
    kind = (data.get("weight_dtype") or {}).get("_data", "")
    digits = str(kind).removeprefix("int")
    return int(digits) if digits.isdigit() else None
