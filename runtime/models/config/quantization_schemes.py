"""Quantization schemes: how a weight's numbers are represented, and what is done with the activations that it
multiplies. Torch-free.

A scheme does not depend on how a checkpoint writes it: `WeightFormat` adds that. A weight W [out, in] has a
float32 scale for each output, or for each output and group of contiguous inputs; a scale that a checkpoint
has for the whole tensor or for a square block is repeated. devices/cpu/quantized.py defines what each scheme
computes.
"""

from math import gcd
from typing import Literal

from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.models.config.gguf.types import BY_NAME


class Fp8(Struct, frozen=True, tag="fp8"):
    """float8_e4m3 weights. Activations are quantized to float8 as well, unless `activations` is "none"."""

    # inputs that share a scale; 0: all. With groups, activations that are quantized have a scale for each
    # token and group as well
    group_size: int = 0
    # scale of the activations: none: not quantized; tensor: from the checkpoint; token: one for each token
    activations: Literal["none", "tensor", "token"] = "token"

    @property
    def name(self) -> str:
        """The scheme's name in SCHEMES."""
        if self.group_size and self.activations != "none":
            return "fp8_block"
        return {"none": "fp8_weight", "tensor": "fp8_static", "token": "fp8"}[self.activations]


class Int8(Struct, frozen=True, tag="int8"):
    """int8 weights with a scale for each output, and int8 activations: sums are exact integers."""

    activations: Literal["tensor", "token"] = "token"

    @property
    def name(self) -> str:
        """The scheme's name in SCHEMES."""
        return "int8" if self.activations == "token" else "int8_static"


class PackedInt(Struct, frozen=True, tag="codes"):
    """Unsigned integer codes with a zero point and a scale: (code - zero) * scale. Activations are quantized
    to int8, unless `activations` is "none"."""

    bits: Literal[4, 8]
    group_size: int  # inputs that share a scale and zero point; 0: all
    has_zero_points: bool = False  # False: the zero point is 2 ** (bits - 1)
    # the checkpoint has the group of each input (act order); False: groups are contiguous
    has_g_idx: bool = False
    activations: Literal["none", "token"] = "none"
    has_half_scales: bool = False  # every scale is a number that float16 has

    @property
    def name(self) -> str:
        """The scheme's name in SCHEMES."""
        return f"int{self.bits}_weight" if self.activations == "none" else f"int{self.bits}_int8"


class Ggml(Struct, frozen=True, tag="ggml"):
    """Blocks of codes as a GGUF file has them, each part of a fused weight in a type of its own. Kernels may
    compute with them; elsewhere they are dequantized while they are loaded. layers/quantization/ggml.py
    defines what they mean."""

    types: tuple[tuple[str, str], ...]  # (part, name of its type)
    activations: Literal["none"] = "none"

    @property
    def name(self) -> str:
        """What messages call it."""
        return ", ".join(sorted({name for _, name in self.types}))

    @property
    def number_bytes(self) -> float:
        """Bytes of memory for each weight in its type; of a fused weight the largest of its parts."""
        return max(BY_NAME[name].num_bytes / BY_NAME[name].block for _, name in self.types)


class Full(Struct, frozen=True, tag="full"):
    """Numbers in the dtype of the model: what a checkpoint has in few bits is dequantized while it is loaded,
    because no kernel computes with it."""

    activations: Literal["none"] = "none"

    @property
    def name(self) -> str:
        """What messages call it."""
        return "full"


Scheme = Fp8 | Int8 | PackedInt | Ggml | Full
SCHEMES = (
    "fp8",
    "fp8_static",
    "fp8_weight",
    "fp8_block",
    "int8",
    "int8_static",
    "int4_weight",
    "int8_weight",
    "int4_int8",
)
Layout = Literal[
    "fp8",
    "compressed-tensors",
    "packed",
    "awq",
    "gptq",
    "gptq_v2",
    "modelslim",
    "online",
    "gguf",
    "nvfp4",
    "nvfp4_packed",
    "mxfp4",
    "mxfp4_packed",
    "int4_bytes",
    "int8_bytes",
    "bitsandbytes_4",
    "bitsandbytes_8",
    "marlin",
    "qoq",
    "qoq_groups",
]


class WeightFormat(Struct, frozen=True):
    """A quantization scheme, and the layout in which a checkpoint has it."""

    scheme: Scheme
    layout: Layout
    block_rows: int = 0  # fp8: outputs of a block that shares a scale; 0: each has its own
    code_bits: int = 0  # of the checkpoint's codes, where the scheme has more; 0: those of the scheme
    # what the checkpoint has, where the scheme is Full; None: the layout alone says it
    stored: Scheme | None = None

    def in_full(self) -> "WeightFormat":
        """The format of these weights on a device where they are dequantized while they are loaded."""
        return (
            self
            if isinstance(self.scheme, Full)
            else structs.replace(self, scheme=Full(), stored=self.scheme)
        )


def held_bytes(scheme: Scheme, outputs: int, inputs: int, full_inputs: int, item: int) -> int:
    """Bytes of one rank's weight [outputs, inputs]; `full_inputs`: before a split over ranks, `item`: bytes
    of a number of the model's dtype. layers/quantization/allocate.py allocates them."""
    if isinstance(scheme, Full):
        return outputs * inputs * item
    if isinstance(scheme, Ggml):
        return int(outputs * inputs * scheme.number_bytes)
    group = 0 if isinstance(scheme, Int8) else scheme.group_size
    if group and isinstance(scheme, PackedInt) and scheme.has_g_idx:
        inputs_of_groups, width = full_inputs, group
    else:  # a split in the middle of a group makes smaller groups of it
        inputs_of_groups = inputs
        width = group if inputs == full_inputs or not group or inputs % group == 0 else gcd(group, inputs)
    scales = outputs * (-(-inputs_of_groups // width) if group else 1)
    if isinstance(scheme, PackedInt):
        order = 4 * inputs * scheme.has_g_idx
        return outputs * inputs * scheme.bits // 8 + scales * (4 + scheme.has_zero_points) + order
    static = 0
    if scheme.activations == "tensor":  # scale, and for int8 offset and a sum for each output
        static = 4 if isinstance(scheme, Fp8) else 8 + 4 * outputs
    return outputs * inputs + 4 * scales + static


def check_supported(names: tuple[str, ...], supported: tuple[str, ...], device: str) -> str | None:
    """One sentence, where a device lacks one of the schemes `names`; None: it has them all."""
    lacking = [name for name in names if name not in supported]
    if not lacking:
        return None
    able = f"it computes {', '.join(supported)}" if supported else "it computes none"
    return (
        f"the model's weights are quantised as {', '.join(lacking)} (docs/quantization.md), which --device "
        f"{device} does not compute; "
        f"{able}: take such a version of the model, or the unquantised one"
    )


def require_supported(names: tuple[str, ...], supported: tuple[str, ...], device: str) -> None:
    """Raises ModelError with the sentence of `check_supported`."""
    if (sentence := check_supported(names, supported, device)) is not None:
        raise ModelError(sentence)
