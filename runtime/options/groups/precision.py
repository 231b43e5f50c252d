"""Number formats of weights, activations and the cache."""

from typing import Annotated as A
from typing import Literal

from runtime.devices.facts import DeviceFacts
from runtime.models.config.online_quantization import PREFIX
from runtime.options.declare import Derived, Group, on_device, option
from runtime.options.facts import ModelFacts

Quantization = Literal[
    "awq",
    "fp8",
    "mxfp8",
    "gptq",
    "marlin",
    "gptq_marlin",
    "awq_marlin",
    "bitsandbytes",
    "gguf",
    "modelopt",
    "modelopt_fp8",
    "modelopt_fp4",
    "petit_nvfp4",
    "w8a8_int8",
    "w8a8_fp8",
    "int8",
    "int4",
    "moe_wna16",
    "qoq",
    "w4afp8",
    "mxfp4",
    "auto-round",
    "compressed-tensors",
    "modelslim",
    "quark",
    "torchao",
    "fbgemm_fp8",
    "quark_int4fp8_moe",
]


class Precision(Group, frozen=True, kw_only=True):
    """Quantization and data type"""

    dtype: A[
        Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
        option(
            "Type of weights and activations; auto keeps the checkpoint's, half is float16, float is float32."
        ),
    ] = "auto"
    quantization: A[
        Quantization | None,
        option(
            "Format of quantized weights; none of it reads what the checkpoint says.",
            note="fp8, w8a8_fp8, int8 (w8a8_int8), int4 and quark_int4fp8_moe quantise a plain checkpoint "
            "while it is loaded; the others, and these with a quantised one, "
            "only check that the checkpoint is what they say; see quantization.md",
        ),
    ] = None
    quantization_param_path: A[
        str | None,
        option(
            "JSON file with the scales of an fp8_e4m3 or int8 cache, by rank and layer.",
            note="they take the place of those in the checkpoint",
        ),
    ] = None
    kv_cache_dtype: A[
        Literal["auto", "fp8_e5m2", "fp8_e4m3", "int8", "bf16", "bfloat16", "fp4_e2m1"],
        option(
            "Type of keys and values in the cache; auto is that of the activations.",
            later=("fp4_e2m1",),
            note="fp8 halves the pages of a bfloat16 model; numbers are stored unscaled and saturate. int8: "
            "npu, with the scales of --quantization-param-path",
        ),
    ] = "auto"
    enable_fp32_lm_head: A[
        bool,
        option(
            "Compute logits in float32 whatever the dtype; the head takes twice the memory, and a tied one "
            "has a copy of its own."
        ),
    ] = False
    modelopt_quant: A[
        str | None,
        option(
            "ModelOpt quantization to apply while loading.",
            note="with --quantize-and-serve: fp8, as --quantization fp8; no calibration is made",
        ),
    ] = None
    modelopt_checkpoint_restore_path: A[
        str | None, on_device("cuda", "ModelOpt checkpoint to restore instead of quantizing anew.")
    ] = None
    modelopt_checkpoint_save_path: A[
        str | None, on_device("cuda", "Where to save a checkpoint that ModelOpt has quantized.")
    ] = None
    modelopt_export_path: A[
        str | None, on_device("cuda", "Where to export a ModelOpt model in Hugging Face layout.")
    ] = None
    quantize_and_serve: A[
        bool,
        option(
            "Quantize a plain checkpoint while it is loaded, as --modelopt-quant or --quantization says.",
            note="fp8 and modelopt_fp8; weights of 4 bits: --quantization int4",
        ),
    ] = False
    rl_quant_profile: A[
        str | None, on_device("cuda", "Quantization profile of the weights that a trainer sends.")
    ] = None
    torchao_config: A[
        str,
        option(
            "Quantize a plain checkpoint while loading, in torchao's words: int8wo, int8dq, "
            "int4wo-<group>, fp8wo, fp8dq-per_row.",
            note="fp8dq-per_tensor is refused: an answer would depend on its company",
        ),
    ] = ""


SERVED = ("fp8", "modelopt", "modelopt_fp8")  # what --quantize-and-serve quantizes to fp8


def requested_quantization(given: Precision) -> str | None:
    """What the quantization of a checkpoint shall be (models/config/quantization_config.py); None: whatever
    it is."""
    if given.torchao_config:
        return PREFIX + given.torchao_config
    return "fp8" if given.quantize_and_serve else given.quantization


class PrecisionPlan(Precision, frozen=True, kw_only=True):
    """Number formats in force."""

    dtype: str  # float32, bfloat16 or float16; auto: that of the weights, where config.json names none
    kv_cache_dtype: str  # bfloat16, fp8_e4m3, fp8_e5m2 or int8; otherwise the dtype of the activations


# words that stand for other values
DTYPE_ALIASES = {
    "half": Derived("float16", "half is float16"),
    "float": Derived("float32", "float is float32"),
}
KV_DTYPE_ALIASES = {"bf16": Derived("bfloat16", "bf16 is bfloat16")}


def dtype(model: ModelFacts, device: DeviceFacts) -> Derived:
    """The checkpoint's dtype, where the device has it; "auto" lets each rank take the dtype of the
    weights."""
    if model.dtype is None:
        return Derived("auto", "config.json names none; each rank takes the type of the weights")
    if model.dtype in device.dtypes:
        return Derived(model.dtype, "the checkpoint is in it")
    return Derived(device.dtypes[0], f"{device.name} has no {model.dtype}")


def kv_cache_dtype(dtype: str) -> Derived:
    """Keys and values have the dtype of the activations."""
    return Derived(dtype, "that of the activations")
