"""Schemes: what the numbers of a weight are, and what is done with the activations that it multiplies.
Torch-free.

A scheme says nothing of how a checkpoint spells it: `WeightFormat` adds that. A weight W [out, in] has a float32
scale for each output, or for each output and group of neighbouring inputs; a scale that a checkpoint has for
the whole tensor or for a square is repeated. What each scheme computes is defined by
devices/cpu/quantized.py.
"""

from typing import Literal

from msgspec import Struct

from runtime.errors import ModelError


class Fp8(Struct, frozen=True, tag="fp8"):
    """float8_e4m3 weights. Activations are rounded to float8 as well, unless they are left as they are."""

    # inputs that share a scale; 0: all. With groups, activations have a scale for each token and group too
    group_size: int = 0
    # where their scale comes from: the checkpoint, or each token
    activations: Literal["none", "tensor", "token"] = "token"

    @property
    def name(self) -> str:
        if self.group_size:
            return "fp8_block"
        return {"none": "fp8_weight", "tensor": "fp8_static", "token": "fp8"}[self.activations]

    @property
    def number_bytes(self) -> float:
        """Of memory that a number takes, with its share of a group's scale."""
        return 1 + (4 / self.group_size if self.group_size else 0)


class Int8(Struct, frozen=True, tag="int8"):
    """int8 weights with a scale for each output, and int8 activations: sums are exact integers."""

    activations: Literal["tensor", "token"] = "token"

    @property
    def name(self) -> str:
        return "int8" if self.activations == "token" else "int8_static"

    @property
    def number_bytes(self) -> float:
        return 1


class PackedInt(Struct, frozen=True, tag="codes"):
    """Unsigned integers, less a zero point, times a scale: (code - zero) * scale. Where activations are not
    left alone, they are int8."""

    bits: Literal[4, 8]
    group_size: int  # inputs that share scale and zero point; 0: all
    has_zero_points: bool = False  # else 2 ** (bits - 1)
    has_g_idx: bool = False  # the checkpoint says which group an input is in; else groups are neighbours
    activations: Literal["none", "token"] = "none"

    @property
    def name(self) -> str:
        return f"int{self.bits}_weight" if self.activations == "none" else f"int{self.bits}_int8"

    @property
    def number_bytes(self) -> float:
        return self.bits / 8 + ((4 + self.has_zero_points) / self.group_size if self.group_size else 0)


Scheme = Fp8 | Int8 | PackedInt
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
Layout = Literal["fp8", "compressed-tensors", "packed", "awq", "gptq", "gptq_v2", "modelslim", "online"]


class WeightFormat(Struct, frozen=True):
    """A scheme, and how a checkpoint writes it down."""

    scheme: Scheme
    layout: Layout
    block_rows: int = 0  # fp8: outputs, and inputs, that share a scale


def check_supported(names: tuple[str, ...], supported: tuple[str, ...], device: str) -> str | None:
    """One sentence, when a device lacks a scheme."""
    lacking = [name for name in names if name not in supported]
    if not lacking:
        return None
    able = f"it computes {', '.join(supported)}" if supported else "it computes none"
    return (
        f"the model's weights are quantised as {', '.join(lacking)} (docs/quantization.md), which --device {device} does not compute; "
        f"{able}: take such a version of the model, or the unquantised one"
    )


def require_supported(names: tuple[str, ...], supported: tuple[str, ...], device: str) -> None:
    """Raises ModelError with that sentence."""
    if (sentence := check_supported(names, supported, device)) is not None:
        raise ModelError(sentence)
