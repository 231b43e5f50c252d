"""How each module of a checkpoint is quantized: `quantization_config` of config.json, or the description of
modelslim. Torch-free.

Names of modules are the checkpoint's, without "model." in front. A module that should be quantized, but has a
plain weight in the files, is plain: lists of exceptions are written in many ways, and the files are right.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config.quantization_schemes import (
    Fp8,
    Ggml,
    Int8,
    Layout,
    PackedInt,
    Scheme,
    WeightFormat,
)
from runtime.regular_file import read_regular

DESCRIPTION = "quant_model_description*.json"
# schemes that a plain checkpoint can be quantized to while it is loaded, by --quantization
ONLINE: dict[str, Scheme] = {
    "fp8": Fp8(),
    "w8a8_fp8": Fp8(),
    "w8a8_int8": Int8(),
    "int8": Int8(),
    "int4": PackedInt(bits=4, group_size=32, has_half_scales=True),
}
NAMES: dict[str, tuple[str, ...]] = {  # values of --quantization that fit a checkpoint's method
    "fp8": ("fp8",),
    "compressed-tensors": ("compressed-tensors",),
    "awq": ("awq", "awq_marlin", "moe_wna16"),
    "gptq": ("gptq", "gptq_marlin", "moe_wna16"),
    "modelslim": ("modelslim",),
    "gguf": ("gguf",),
    "mxfp4": ("mxfp4",),
}
# values that also fit compressed-tensors checkpoints whose weights all have this scheme
LAYERWISE = {"w8a8_int8": Int8, "w8a8_fp8": Fp8}
MODELSLIM: dict[str, Callable[[int], Scheme | None]] = {
    "FLOAT": lambda group: None,
    "W8A8": lambda group: Int8("tensor"),
    "W8A8_DYNAMIC": lambda group: Int8("token"),
    "W4A8_DYNAMIC": lambda group: PackedInt(4, group, activations="token"),
}


class Rule(Struct, frozen=True):
    """The format of all modules that a pattern matches."""

    pattern: str  # a name, the end of one, or "re:" and a regular expression; "Linear": every module
    format: WeightFormat | None  # None: plain


class Quantization(Struct, frozen=True, kw_only=True):
    """The quantization of a whole checkpoint."""

    method: str  # by its name in --quantization
    rules: tuple[Rule, ...] = ()  # the first one that matches counts
    modules: dict[str, WeightFormat | None] = {}  # modelslim: each by its name
    is_online: bool = False  # the checkpoint is plain, and quantized while it is loaded

    def format_of(self, module: str) -> WeightFormat | None:
        """The format of a module's weight; None: it is not quantized."""
        if self.modules:
            return self.modules.get(module)
        return next((rule.format for rule in self.rules if _matches(rule.pattern, module)), None)

    @property
    def rounds_head(self) -> bool:
        """Whether the head may be rounded to 8 bits (scales of 32 inputs): the checkpoint is plain,
        and its other weights are rounded to integers of as many bits or fewer."""
        schemes = [rule.format.scheme for rule in self.rules if rule.format is not None]
        return self.is_online and all(isinstance(scheme, Int8 | PackedInt) for scheme in schemes)

    @property
    def schemes(self) -> tuple[str, ...]:
        """Names of all schemes that a device must compute. GGUF's types are none: where no kernel has them
        they are dequantized."""
        format = [*self.modules.values(), *(rule.format for rule in self.rules)]
        return tuple(
            sorted(
                {one.scheme.name for one in format if one is not None and not isinstance(one.scheme, Ggml)}
            )
        )


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in (module, "model." + module))
    name = pattern.removeprefix("model.").removesuffix(".")
    return (
        pattern == "Linear"
        or module == name
        or module.startswith(name + ".")
        or module.endswith("." + name)
        or f".{name}." in module
    )


def read_quantization(folder: Path, hf: Fields | None, requested: str | None) -> Quantization | None:
    """`hf`: config.json's quantization_config; `requested`: --quantization. -> None: weights are not
    quantized. Raises ModelError for a quantization that is not supported, or another one than requested."""
    result = _read(folder, hf)
    if requested is None:
        return result
    if result is None:
        if requested not in ONLINE:
            raise ModelError(
                f"--quantization {requested}, but the checkpoint is not quantised; leave the flag out, or "
                "choose "
                f"{', '.join(ONLINE)}, which quantise while loading"
            )
        return Quantization(
            method=requested,
            rules=_rules(WeightFormat(ONLINE[requested], "online"), ["lm_head"]),
            is_online=True,
        )
    kind = LAYERWISE.get(requested)
    is_all = kind is not None and all(
        isinstance(rule.format.scheme, kind) for rule in result.rules if rule.format
    )
    if requested not in NAMES[result.method] and not (is_all and result.method == "compressed-tensors"):
        raise ModelError(
            f"--quantization {requested}, but the checkpoint says {result.method}; leave the flag out"
        )
    return result


def _read(folder: Path, hf: Fields | None) -> Quantization | None:
    descriptions = sorted(folder.glob(DESCRIPTION))
    if descriptions and (hf is None or hf.get("quant_method") in (None, "modelslim", "ascend")):
        return _modelslim(descriptions[0])
    if hf is None:
        return None
    method = str(hf.get("quant_method", "unknown"))
    if method not in READERS:
        raise ModelError(
            f"the checkpoint is quantised by {method}, which is not supported; take the unquantised version "
            "of the model, or "
            f"one by {', '.join(READERS)} or modelslim"
        )
    try:
        rules = READERS[method](hf)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"config.json: quantization_config of {method} cannot be read ({error!r}); "
            "restore the file from the model's source"
        ) from None
    return Quantization(method="gptq" if method == "gptq_marlin" else method, rules=rules)


def _rules(format: WeightFormat, ignored: list[str]) -> tuple[Rule, ...]:
    return (*(Rule(pattern, None) for pattern in ignored), Rule("Linear", format))


def _need(condition: bool, method: str, what: str) -> None:
    if not condition:
        raise ModelError(
            f"the checkpoint is quantised by {method} with {what}, which is not supported; "
            "docs/quantization.md lists what is"
        )


def _fp8(hf: Fields) -> tuple[Rule, ...]:
    size, scheme = hf.get("weight_block_size"), hf.get("activation_scheme", "dynamic")
    _need(hf.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"), "fp8", f"fmt {hf.get('fmt')}")
    _need(scheme in ("dynamic", "static"), "fp8", f"activation_scheme {scheme}")
    ignored = hf.get("modules_to_not_convert") or hf.get("ignored_layers") or []
    if size is None:
        return _rules(
            WeightFormat(Fp8(activations="token" if scheme == "dynamic" else "tensor"), "fp8"), ignored
        )
    _need(
        len(size) == 2 and size[0] == size[1] and scheme == "dynamic",
        "fp8",
        f"blocks of {size} and {scheme} activations",
    )
    return _rules(WeightFormat(Fp8(group_size=size[1]), "fp8", block_rows=size[0]), ignored)


def _awq(hf: Fields) -> tuple[Rule, ...]:
    bits, version = hf.get("bits", hf.get("w_bit", 4)), str(hf.get("version", "gemm")).lower()
    _need(
        bits == 4 and version == "gemm" and hf.get("zero_point", True),
        "awq",
        f"{bits} bits, version {version}, or no zero points",
    )
    group: int = hf["group_size"] if "group_size" in hf else hf.get("q_group_size", 128)
    return _rules(
        WeightFormat(PackedInt(4, max(group, 0), has_zero_points=True), "awq"),
        hf.get("modules_to_not_convert") or [],
    )


def _gptq(hf: Fields) -> tuple[Rule, ...]:
    bits, group, version = (
        hf["bits"],
        hf["group_size"],
        hf.get("checkpoint_format", hf.get("format", "gptq")),
    )
    _need(bits in (4, 8), "gptq", f"{bits} bits")
    _need(version in ("gptq", "gptq_v2"), "gptq", f"checkpoint_format {version}")
    _need(not hf.get("lm_head"), "gptq", "a quantised lm_head")
    special = hf.get("dynamic") or {}
    _need(
        all(name.startswith("-:") for name in special), "gptq", "other parameters for some modules (dynamic)"
    )
    layout: Layout = "gptq_v2" if version == "gptq_v2" else "gptq"
    format = WeightFormat(
        PackedInt(bits, max(group, 0), has_zero_points=True, has_g_idx=bool(hf.get("desc_act"))), layout
    )
    return _rules(format, ["re:" + name[2:] for name in special])


def _compressed(hf: Fields) -> tuple[Rule, ...]:
    rules = [Rule(pattern, None) for pattern in hf.get("ignore") or []]
    groups = hf["config_groups"].values()
    # groups that name modules come before groups that mean all of them
    by_name = [group for group in groups if "Linear" not in group["targets"]]
    for group in [*by_name, *(group for group in groups if group not in by_name)]:
        form = group.get("format") or hf.get("format", "")
        rules += [Rule(target, _compressed_group(group, form)) for target in group["targets"]]
    return tuple(rules)


def _compressed_group(group: Fields, form: str) -> WeightFormat:
    method, weights = "compressed-tensors", group["weights"]
    inputs: Fields | None = group.get("input_activations")
    bits, kind, strategy = (
        weights["num_bits"],
        weights.get("type", "int"),
        weights.get("strategy") or "tensor",
    )
    _need(group.get("output_activations") is None, method, "quantised outputs")
    if form == "pack-quantized":
        _need(
            kind == "int" and bits in (4, 8) and inputs is None,
            method,
            f"format {form}, {bits} bits of type {kind}, quantised inputs",
        )
        _need(strategy in ("group", "channel"), method, f"strategy {strategy} of packed weights")
        order = weights.get("actorder") not in (None, False, "weight", "static")
        codes = PackedInt(
            bits,
            weights.get("group_size") or 0 if strategy == "group" else 0,
            has_zero_points=not weights.get("symmetric", True),
            has_g_idx=order,
        )
        return WeightFormat(codes, "packed")
    _need(
        bits == 8 and weights.get("symmetric", True), method, f"{bits} bits in format {form}, or zero points"
    )
    _need(form in ("int-quantized", "float-quantized", "naive-quantized"), method, f"format {form}")
    if kind == "int":
        _need(strategy in ("tensor", "channel") and inputs is not None, method, f"int8 weights by {strategy}")
        assert inputs is not None
        return WeightFormat(Int8(_activations(inputs, "int")), "compressed-tensors")
    if strategy == "block":
        size = weights.get("block_structure") or []
        _need(
            len(size) == 2 and size[0] == size[1] and inputs is not None and inputs.get("dynamic") is True,
            method,
            f"blocks of {size}",
        )
        return WeightFormat(Fp8(group_size=int(size[1])), "compressed-tensors", block_rows=int(size[0]))
    _need(strategy in ("tensor", "channel"), method, f"float8 weights by {strategy}")
    return WeightFormat(
        Fp8(activations="none" if inputs is None else _activations(inputs, "float")), "compressed-tensors"
    )


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
    _need(
        is_fit and (not dynamic or inputs.get("symmetric", True)),
        "compressed-tensors",
        f"activations of {inputs['num_bits']} bits by {strategy}, dynamic {dynamic}",
    )
    return "token" if dynamic else "tensor"


def _modelslim(path: Path) -> Quantization:
    try:
        description = msgspec.json.decode(read_regular(path), type=Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelError(
            f"{path.name} cannot be read: {error}; restore the file from the model's source"
        ) from None
    group = int(description.get("group_size") or 0)
    modules: dict[str, WeightFormat | None] = {}
    for name, kind in description.items():
        if not (name.endswith(".weight") and isinstance(kind, str)):
            continue
        _need(kind in MODELSLIM, "modelslim", f"{name} in {kind}")
        scheme = MODELSLIM[kind](group)
        modules[name.removeprefix("model.").removesuffix(".weight")] = (
            None if scheme is None else WeightFormat(scheme, "modelslim")
        )
    return Quantization(method="modelslim", modules=modules)


READERS: dict[str, Callable[[Fields], tuple[Rule, ...]]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "gptq_marlin": _gptq,
    "compressed-tensors": _compressed,
    "mxfp4": lambda hf: (),  # of the experts of gpt-oss, which know their tensors themselves
}
