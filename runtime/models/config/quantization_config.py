"""How each module of a checkpoint is quantized: `quantization_config` of config.json, or the description of
modelslim. Torch-free.

Names of modules are the checkpoint's, without "model." in front. A module that should be quantized, but has a
plain weight in the files, is plain: lists of exceptions are written in many ways, and the files are right.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config.online_quantization import EXPERTS, PREFIX, SCHEMES, online_scheme
from runtime.models.config.quantization_exports import (
    read_auto_round,
    read_bitsandbytes,
    read_modelopt,
    read_quark,
    read_torchao,
)
from runtime.models.config.quantization_readers import (
    read_awq,
    read_compressed,
    read_fbgemm,
    read_fp8,
    read_gptq,
    read_marlin,
    read_mxfp8,
    read_qoq,
    read_w4afp8,
    read_w8a8,
)
from runtime.models.config.quantization_rules import ROUTED_EXPERTS, Rule, all_but, matches, need
from runtime.models.config.quantization_schemes import Fp8, Full, Ggml, Int8, PackedInt, Scheme, WeightFormat
from runtime.regular_file import read_regular

MODELOPT_FILE = "hf_quant_config.json"
DESCRIPTION = "quant_model_description*.json"
# where QoQ says what it did, which config.json does not name
QOQ_FILES = ("quant_config.json", "quantize_config.json")
# other names of a checkpoint's method
METHODS = {
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
}
# values of --quantization that fit a checkpoint's method, besides its own name
NAMES: dict[str, tuple[str, ...]] = {
    "awq": ("awq_marlin", "moe_wna16"),
    "gptq": ("gptq_marlin", "marlin", "moe_wna16"),
    "auto-round": ("gptq", "awq", "gptq_marlin", "awq_marlin", "moe_wna16"),
    "modelopt": ("modelopt_fp8", "modelopt_fp4", "petit_nvfp4"),
    "fbgemm_fp8": ("fp8", "w8a8_fp8"),
}
# values that also fit compressed-tensors checkpoints whose weights all have this scheme
LAYERWISE = {"w8a8_int8": Int8, "w8a8_fp8": Fp8}
MODELSLIM: dict[str, Callable[[int], Scheme | None]] = {
    "FLOAT": lambda group: None,
    "W8A8": lambda group: Int8("tensor"),
    "W8A8_DYNAMIC": lambda group: Int8("token"),
    "W4A8_DYNAMIC": lambda group: PackedInt(4, group, activations="token"),
}


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
        return next((rule.format for rule in self.rules if matches(rule.pattern, module)), None)

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
        return tuple(
            sorted({one.scheme.name for one in self.formats if not isinstance(one.scheme, Ggml | Full)})
        )

    @property
    def formats(self) -> list[WeightFormat]:
        """All formats that a module may have."""
        found = [*self.modules.values(), *(rule.format for rule in self.rules)]
        return [one for one in found if one is not None]

    def on_device(self, schemes: tuple[str, ...]) -> "Quantization":
        """What becomes of the modules on a device that computes `schemes`: 8-bit floats that it lacks are
        dequantized while they are loaded. What is quantized while it is loaded stays."""
        if self.is_online:
            return self

        def held(one: WeightFormat | None) -> WeightFormat | None:
            is_lacking = one is not None and isinstance(one.scheme, Fp8) and one.scheme.name not in schemes
            return one.in_full() if one is not None and is_lacking else one

        return structs.replace(
            self,
            rules=tuple(Rule(rule.pattern, held(rule.format)) for rule in self.rules),
            modules={name: held(one) for name, one in self.modules.items()},
        )


def read_quantization(folder: Path, hf: Fields | None, requested: str | None) -> Quantization | None:
    """`hf`: config.json's quantization_config; `requested`: --quantization. -> None: weights are not
    quantized. Raises ModelError for a quantization that is not supported, or another one than requested."""
    result = _read(folder, _qoq_fields(folder) if requested == "qoq" and hf is None else hf)
    if requested is None:
        return result
    if result is None:
        return _online(requested)
    if requested.startswith(PREFIX):
        raise ModelError(
            f"--torchao-config {requested.removeprefix(PREFIX)}, but the checkpoint is quantised by "
            f"{result.method} already; leave the flag out"
        )
    kind = LAYERWISE.get(requested)
    is_all = kind is not None and all(
        isinstance(rule.format.scheme, kind) for rule in result.rules if rule.format
    )
    fitting = (result.method, *NAMES.get(result.method, ()))
    if requested not in fitting and not (is_all and result.method == "compressed-tensors"):
        raise ModelError(
            f"--quantization {requested}, but the checkpoint says {result.method}; leave the flag out"
        )
    return result


def _online(requested: str) -> Quantization:
    """Raises ModelError for a request that says how a checkpoint is quantized, and not how to quantize it."""
    scheme = online_scheme(requested)
    if scheme is None:
        raise ModelError(
            f"--quantization {requested}, but the checkpoint is not quantised; leave the flag out, or choose "
            f"{', '.join(SCHEMES)}, which quantise while loading"
        )
    method = requested.replace(PREFIX, "torchao ")
    rules = all_but(WeightFormat(scheme, "online"), ["lm_head"])
    if (of_experts := EXPERTS.get(requested)) is not None:
        rules = (Rule(ROUTED_EXPERTS, WeightFormat(of_experts, "online")), *rules)
    return Quantization(method=method, rules=rules, is_online=True)


def _read(folder: Path, hf: Fields | None) -> Quantization | None:
    descriptions = sorted(folder.glob(DESCRIPTION))
    hf = _modelopt_fields(folder) if hf is None else hf
    if descriptions and (hf is None or hf.get("quant_method") in (None, "modelslim", "ascend")):
        return _modelslim(descriptions[0])
    if hf is None:
        return None
    method = str(hf.get("quant_method", "unknown"))
    method = METHODS.get(method, method)
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
    return Quantization(method=method, rules=rules)


def _qoq_fields(folder: Path) -> Fields | None:
    """What QoQ says in a file of its own; None: there is none."""
    found = [_json(folder / name) for name in QOQ_FILES if (folder / name).exists()]
    return found[0] | {"quant_method": "qoq"} if found else None


def _modelopt_fields(folder: Path) -> Fields | None:
    """What ModelOpt says in a file of its own, where config.json says nothing."""
    path = folder / MODELOPT_FILE
    if not path.exists():
        return None
    fields = _json(path).get("quantization") or {}
    return fields | {"quant_method": "modelopt"} if fields.get("quant_algo") else None


def _json(path: Path) -> Fields:
    try:
        return msgspec.json.decode(read_regular(path), type=Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelError(
            f"{path.name} cannot be read: {error}; restore the file from the model's source"
        ) from None


def _modelslim(path: Path) -> Quantization:
    description = _json(path)
    group = int(description.get("group_size") or 0)
    modules: dict[str, WeightFormat | None] = {}
    for name, kind in description.items():
        if not (name.endswith(".weight") and isinstance(kind, str)):
            continue
        need(kind in MODELSLIM, "modelslim", f"{name} in {kind}")
        scheme = MODELSLIM[kind](group)
        modules[name.removeprefix("model.").removesuffix(".weight")] = (
            None if scheme is None else WeightFormat(scheme, "modelslim")
        )
    return Quantization(method="modelslim", modules=modules)


READERS: dict[str, Callable[[Fields], tuple[Rule, ...]]] = {
    "fp8": read_fp8,
    "mxfp8": read_mxfp8,
    "fbgemm_fp8": read_fbgemm,
    "w4afp8": read_w4afp8,
    "w8a8_fp8": partial(read_w8a8, Fp8),
    "w8a8_int8": partial(read_w8a8, Int8),
    "awq": read_awq,
    "gptq": read_gptq,
    "marlin": read_marlin,
    "qoq": read_qoq,
    "compressed-tensors": read_compressed,
    "auto-round": read_auto_round,
    "bitsandbytes": read_bitsandbytes,
    "modelopt": read_modelopt,
    "quark": read_quark,
    "torchao": read_torchao,
    "mxfp4": lambda hf: (),  # of the experts of gpt-oss, which know their tensors themselves
}
