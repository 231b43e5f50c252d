"""Quantization schemes: how a weight's numbers are represented, and what is done with the activations that it
multiplies. Torch-free.

A scheme does not depend on how a checkpoint writes it: `WeightFormat` adds that. A weight W [out, in] has a
float32 scale for each output, or for each output and group of contiguous inputs; a scale that a checkpoint
has for the whole tensor or for a square block is repeated. devices/cpu/quantized.py defines what each scheme
computes.
"""

from typing import Literal

from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.gguf.types import BY_NAME


class Fp8(Struct, frozen=True, tag="fp8"):
    """float8_e4m3 weights. Activations are quantized to float8 as well, unless `activations` is "none"."""

    # inputs that share a scale; 0: all. With groups, activations have a scale for each token and group as
    # well
    group_size: int = 0
    # scale of the activations: none: not quantized; tensor: from the checkpoint; token: one for each token
    activations: Literal["none", "tensor", "token"] = "token"

    @property
    def name(self) -> str:
        """The scheme's name in SCHEMES."""
        if self.group_size:
            return "fp8_block"
        return {"none": "fp8_weight", "tensor": "fp8_static", "token": "fp8"}[self.activations]

    @property
    def number_bytes(self) -> float:
        """Bytes of memory for each weight, with its share of a group's scale."""
        return 1 + (4 / self.group_size if self.group_size else 0)


class Int8(Struct, frozen=True, tag="int8"):
    """int8 weights with a scale for each output, and int8 activations: sums are exact integers."""

    activations: Literal["tensor", "token"] = "token"

    @property
    def name(self) -> str:
        """The scheme's name in SCHEMES."""
        return "int8" if self.activations == "token" else "int8_static"

    @property
    def number_bytes(self) -> float:
        """Bytes of memory for each weight."""
        return 1


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

    @property
    def number_bytes(self) -> float:
        """Bytes of memory for each weight, with its share of a group's scale and zero point."""
        return self.bits / 8 + ((4 + self.has_zero_points) / self.group_size if self.group_size else 0)


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


Scheme = Fp8 | Int8 | PackedInt | Ggml
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
    "fp8", "compressed-tensors", "packed", "awq", "gptq", "gptq_v2", "modelslim", "online", "gguf"
]


class WeightFormat(Struct, frozen=True):
    """A quantization scheme, and the layout in which a checkpoint has it."""

    scheme: Scheme
    layout: Layout
    block_rows: int = 0  # fp8: outputs of a square block that shares a scale; 0: none


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
