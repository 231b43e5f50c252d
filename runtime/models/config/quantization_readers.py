"""quantization_config of fp8, AWQ, GPTQ, Marlin, QoQ and compressed-tensors. Torch-free."""

from typing import Literal

from runtime.json_value import Fields
from runtime.models.config.quantization_rules import ROUTED_EXPERTS, Rule, all_but, need
from runtime.models.config.quantization_schemes import Fp8, Int8, Layout, PackedInt, WeightFormat

COMPRESSED = "compressed-tensors"
FLOAT4 = {
    "nvfp4-pack-quantized": WeightFormat(Fp8(16, "none"), "nvfp4_packed"),
    "mxfp4-pack-quantized": WeightFormat(Fp8(32, "none"), "mxfp4_packed"),
}
EIGHT_BITS = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
QOQ_GROUP = 128  # inputs of a group of QoQ
FP8_FIELDS = ("weight_block_size", "modules_to_not_convert", "ignored_layers", "fmt")


def read_fp8(hf: Fields) -> tuple[Rule, ...]:
    """DeepSeek, Qwen3-FP8, AutoFP8."""
    size, scheme = hf.get("weight_block_size"), hf.get("activation_scheme", "dynamic")
    need(hf.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"), "fp8", f"fmt {hf.get('fmt')}")
    need(scheme in ("dynamic", "static"), "fp8", f"activation_scheme {scheme}")
    ignored = hf.get("modules_to_not_convert") or hf.get("ignored_layers") or []
    if size is None:
        return all_but(
            WeightFormat(Fp8(activations="token" if scheme == "dynamic" else "tensor"), "fp8"), ignored
        )
    need(len(size) == 2 and scheme == "dynamic", "fp8", f"blocks of {size} and {scheme} activations")
    return all_but(WeightFormat(Fp8(group_size=size[1]), "fp8", block_rows=size[0]), ignored)


def read_mxfp8(hf: Fields) -> tuple[Rule, ...]:
    """Groups of 32 inputs, whose scales are powers of two (OCP Microscaling Formats 1.0)."""
    return read_fp8({"weight_block_size": [1, 32]} | hf)


def read_w8a8(kind: type[Fp8] | type[Int8], hf: Fields) -> tuple[Rule, ...]:
    """Scales of outputs and of tokens."""
    return all_but(
        WeightFormat(kind(), "compressed-tensors"), hf.get("ignored_layers") or hf.get("ignore") or []
    )


def read_fbgemm(hf: Fields) -> tuple[Rule, ...]:
    """fbgemm_fp8: scales of outputs and of tokens."""
    return all_but(WeightFormat(Fp8(), "fp8"), hf.get("modules_to_not_convert") or [])


def read_w4afp8(hf: Fields) -> tuple[Rule, ...]:
    """Experts of 4 bits with scales of groups; float8 in squares elsewhere. Activations of experts stay as
    they are, which rounds less than the format asks."""
    group = int(hf.get("group_size", 128))
    experts = WeightFormat(PackedInt(4, group), "int4_bytes")
    rest = read_fp8({"weight_block_size": [128, 128]} | {k: v for k, v in hf.items() if k in FP8_FIELDS})
    return (Rule(ROUTED_EXPERTS, experts), *rest)


def read_awq(hf: Fields) -> tuple[Rule, ...]:
    """AutoAWQ, version gemm."""
    bits, version = hf.get("bits", hf.get("w_bit", 4)), str(hf.get("version", "gemm")).lower()
    need(
        bits == 4 and version == "gemm" and hf.get("zero_point", True),
        "awq",
        f"{bits} bits, version {version}, or no zero points",
    )
    group: int = hf["group_size"] if "group_size" in hf else hf.get("q_group_size", 128)
    return all_but(
        WeightFormat(PackedInt(4, max(group, 0), has_zero_points=True), "awq"),
        hf.get("modules_to_not_convert") or [],
    )


def read_gptq(hf: Fields) -> tuple[Rule, ...]:
    """GPTQModel, AutoGPTQ. Codes of 2 and 3 bits are held in 4, which is exact. `dynamic` has other
    parameters for the modules that its expressions match."""
    if hf.get("checkpoint_format") == "marlin" or hf.get("is_marlin_format"):
        return read_marlin(hf)
    need(not hf.get("lm_head"), "gptq", "a quantised lm_head")
    rules = []
    for name, changes in (hf.get("dynamic") or {}).items():
        format = None if name.startswith("-:") else gptq_format(hf | changes)
        rules.append(Rule("re:" + name.removeprefix("-:").removeprefix("+:"), format))
    return (*rules, *all_but(gptq_format(hf), []))


def gptq_format(hf: Fields, version: str | None = None) -> WeightFormat:
    """The format of weights of gptq; `version`: gptq or gptq_v2, whose zero points are not less by one."""
    bits, group = hf["bits"], hf["group_size"]
    version = version or hf.get("checkpoint_format", hf.get("format", "gptq"))
    need(bits in (2, 3, 4, 8), "gptq", f"{bits} bits")
    need(version in ("gptq", "gptq_v2"), "gptq", f"checkpoint_format {version}")
    layout: Layout = "gptq_v2" if version == "gptq_v2" else "gptq"
    codes = PackedInt(
        8 if bits == 8 else 4, max(group, 0), has_zero_points=True, has_g_idx=bool(hf.get("desc_act"))
    )
    return WeightFormat(codes, layout, code_bits=bits)


def read_marlin(hf: Fields) -> tuple[Rule, ...]:
    """Codes of 4 bits around 8, in the order of Marlin's kernel."""
    bits, group = hf.get("bits", 4), hf["group_size"]
    need(bits == 4 and not hf.get("lm_head"), "marlin", f"{bits} bits, or a quantised lm_head")
    return all_but(WeightFormat(PackedInt(4, max(group, 0)), "marlin"), [])


def read_qoq(hf: Fields) -> tuple[Rule, ...]:
    """QoQ: what its 4 bits mean are integers of 8 bits, which meet activations of 8 bits."""
    bits, group = hf["wbits"], hf["group_size"]
    need(bits == 4 and group in (-1, QOQ_GROUP), "qoq", f"{bits} bits in groups of {group}")
    return all_but(WeightFormat(Int8(), "qoq" if group == -1 else "qoq_groups"), [])


def read_compressed(hf: Fields) -> tuple[Rule, ...]:
    """compressed-tensors, as llm-compressor writes it."""
    rules = [Rule(pattern, None) for pattern in hf.get("ignore") or []]
    groups = hf["config_groups"].values()
    # groups that name modules come before groups that mean all of them
    by_name = [group for group in groups if "Linear" not in group["targets"]]
    for group in [*by_name, *(group for group in groups if group not in by_name)]:
        form = group.get("format") or hf.get("format", "")
        rules += [Rule(target, _compressed_group(group, form)) for target in group["targets"]]
    return tuple(rules)


def _compressed_group(group: Fields, form: str) -> WeightFormat:
    weights, inputs = group["weights"], group.get("input_activations")
    kind = weights.get("type", "int")
    need(group.get("output_activations") is None, COMPRESSED, "quantised outputs")
    if form == "pack-quantized":
        return _packed(weights, inputs)
    if form in FLOAT4:
        return FLOAT4[form]
    need(
        weights["num_bits"] == 8 and weights.get("symmetric", True),
        COMPRESSED,
        f"{weights['num_bits']} bits in format {form}, or zero points",
    )
    need(form in EIGHT_BITS, COMPRESSED, f"format {form}")
    return _float8(weights, inputs) if kind == "float" else _int8(weights, inputs)


def _packed(weights: Fields, inputs: Fields | None) -> WeightFormat:
    bits, kind, strategy = weights["num_bits"], weights.get("type", "int"), weights.get("strategy")
    is_token = inputs is not None and inputs.get("type", "int") == "int"
    need(
        kind == "int" and bits in (2, 4, 8) and (bits == 4 or not is_token),
        COMPRESSED,
        f"pack-quantized, {bits} bits of type {kind}, quantised inputs",
    )
    need(strategy in ("group", "channel"), COMPRESSED, f"strategy {strategy} of packed weights")
    if is_token:
        assert inputs is not None
        need(_activations(inputs, "int") == "token", COMPRESSED, "static activations of packed weights")
    codes = PackedInt(
        8 if bits == 8 else 4,
        weights.get("group_size") or 0 if strategy == "group" else 0,
        has_zero_points=bits == 2 or not weights.get("symmetric", True),
        has_g_idx=weights.get("actorder") not in (None, False, "weight", "static"),
        activations="token" if is_token else "none",
    )
    return WeightFormat(codes, "packed", code_bits=bits)


def _int8(weights: Fields, inputs: Fields | None) -> WeightFormat:
    strategy = weights.get("strategy") or "tensor"
    need(strategy in ("tensor", "channel"), COMPRESSED, f"int8 weights by {strategy}")
    if inputs is None:
        return WeightFormat(PackedInt(8, 0), "int8_bytes")
    return WeightFormat(Int8(_activations(inputs, "int")), "compressed-tensors")


def _float8(weights: Fields, inputs: Fields | None) -> WeightFormat:
    strategy = weights.get("strategy") or "tensor"
    if strategy in ("block", "group"):
        size = weights.get("block_structure") or [1, weights.get("group_size")]
        need(
            len(size) == 2 and bool(size[1]) and (inputs is None or inputs.get("dynamic") is True),
            COMPRESSED,
            f"blocks of {size} and static activations",
        )
        scheme = Fp8(int(size[1]), "none" if inputs is None else "token")
        return WeightFormat(scheme, "compressed-tensors", block_rows=int(size[0]))
    need(strategy in ("tensor", "channel"), COMPRESSED, f"float8 weights by {strategy}")
    activations = "none" if inputs is None else _activations(inputs, "float")
    return WeightFormat(Fp8(activations=activations), "compressed-tensors")


def _activations(inputs: Fields, kind: str) -> Literal["token", "tensor"]:
    dynamic, strategy = (
        inputs.get("dynamic", False),
        inputs.get("strategy") or ("token" if inputs.get("dynamic") else "tensor"),
    )
    is_fit = (
        inputs["num_bits"] == 8
        and inputs.get("type", kind) == kind
        and (strategy == "token" if dynamic else strategy == "tensor")
    )
    need(
        is_fit and (not dynamic or inputs.get("symmetric", True)),
        COMPRESSED,
        f"activations of {inputs['num_bits']} bits by {strategy}, dynamic {dynamic}",
    )
    return "token" if dynamic else "tensor"
