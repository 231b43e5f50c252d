"""What some of a device's functions take beside plain tensors, and functions that it may have. Torch-free at
run time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runtime.models.quantization_schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight W [out, in] in few bits, whatever the checkpoint looked like; a stack of experts has one
    dimension more in front.

    Fp8, Int8: W = weight * scale; Codes: W = (weight - zeros) * scale. A group of inputs has a column of
    scale and zeros: input i is in group i // scheme.group_size, or order[i]; with scheme.group_size 0 there is one
    column. Activations that are quantised become round(x / s + input_offset), saturated, of float8_e4m3 or
    int8, and the result is multiplied by s again. s is `input_scale`; or, of each token (and each group of
    inputs, for Fp8 with groups), the largest absolute value by 448 or 127. With Int8("tensor") s and offset
    are settled beforehand: y = (integers' product + sums) * scale.
    """

    scheme: Scheme
    # [out, in] float8_e4m3fn or int8; Codes: uint8 [out, in * bits / 8], input 2i in the lower half of byte i
    weight: "Tensor"
    scale: "Tensor"  # float32 [out, groups]
    zeros: "Tensor | None" = None  # uint8 [out, groups]; None: 2 ** (bits - 1)
    order: "Tensor | None" = None  # int32 [in]
    input_scale: "Tensor | None" = None  # float32 [1]; this and the next where scheme.activations is "tensor"
    input_offset: "Tensor | None" = None  # float32 [1], Int8 only
    sums: "Tensor | None" = None  # int32 [out]: Int8 only; a bias may be in it


@dataclass(frozen=True, slots=True)
class Seen:
    """Which tokens sequences have seen, a row for each of S, and what that costs: logits of all seen tokens
    are divided by the repetition penalty where they are positive, else multiplied; then those of generated
    tokens fall by frequency * count + presence."""

    generated: "Tensor"  # int32 [S, V]
    in_prompt: "Tensor"  # bool [S, V]
    penalties: "Tensor"  # float32 [S, 3]: frequency, presence, repetition


class Fused(Protocol):
    """What a device may do at once where others do several of Ops."""

    def prepare_heads(
        self,
        qkv: "Tensor",
        norm: "tuple[Tensor, float] | None",
        cos: "Tensor",
        sin: "Tensor",
        k_cache: "Tensor",
        v_cache: "Tensor",
        locations: "Tensor",
    ) -> "Tensor":
        """From the projection to attention: qkv [T, (H + 2 K) * D] -> queries [T, H, D], and keys and values
        to their places.

        Queries and keys go through rms_norm with `norm` (weight [H + K, D] and eps), then rotary; then keys
        and values through store_kv.
        """
        ...

    def penalise(self, logits: "Tensor", rows: "Tensor", seen: Seen, at: "Tensor") -> None:
        """Penalises, in place, `rows` (int64 [M], none twice) of float32 logits [N, V] by the rows `at`
        (int64 [M]) of `seen`."""
        ...
