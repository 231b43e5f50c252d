"""What a device makes of weights. Only the device looks inside. Torch-free at run time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor

    from runtime.devices.all_to_all import PackedExperts


class PackedWeight(Protocol):
    """A weight matrix in the form that a device's `Ops.linear` reads."""


@runtime_checkable
class PackedRows(Protocol):
    """A packed weight whose rows can be read one by one: an embedding needs no copy of it."""

    def rows(self, indices: "Tensor") -> "Tensor":
        """Rows (int64 [N]) of the weight, [N, in]: the numbers that were packed, in any dtype that holds
        them."""
        ...


class PackedLatent(Protocol):
    """The up-projection of latent attention in the form that a device reads."""


@runtime_checkable
class PackedTensors(Protocol):
    """A packed weight that knows the addresses of its tensors (fields of a dataclass)."""

    def moved(self) -> None:
        """To be called when the tensors are at other addresses."""
        ...


class KeptMismatch(Exception):
    """What was kept is not what the model's layers ask for."""


class KeptWeights(Protocol):
    """What a device packed of weights, kept on disk from one start to the next."""

    def keeps(self, num_bytes: int) -> bool:
        """Whether weights of a checkpoint of so many bytes may be kept: few are packed as fast as found."""
        ...

    def open(self, key: str, *, writes: bool) -> frozenset[str]:
        """The weights that are loaded next are those of `key`. -> names of the weights that need not be
        loaded, because all that is made of them is kept. `writes`: what is packed will be kept for the next
        start, if nothing is."""
        ...

    @property
    def packed_storages(self) -> frozenset[int]:
        """Addresses of the memory of all weights that were packed since `open`, and would be kept."""
        ...

    def close(self, names: "Iterable[str] | None") -> None:
        """All weights are loaded, or loading has failed. `names`: those of which nothing but what was packed
        is left, to be kept; None: nothing is."""
        ...

    def discard(self) -> None:
        """What was kept for the latest key is of no use."""
        ...


@dataclass(frozen=True, slots=True)
class GgmlPart:
    """Rows of a weight in blocks of one of ggml's types, as a GGUF file has them. Row i is rows[order[i]]."""

    type: str  # its name in models/config/gguf/types.py
    rows: "Tensor"  # uint8 [rows, bytes], of which each row is one line
    order: "Tensor"  # int64 [outputs]
    inputs: int  # numbers of a row


class RowQuantizer(Protocol):
    """A device's way of rounding plain weights while they are loaded."""

    def quantize(self, values: "Tensor", group: int, codes: "Tensor", scales: "Tensor") -> bool:
        """Fills `codes` and `scales` (float32 [rows, groups]) from plain rows [rows, inputs], to the bit as
        layers/quantization/layouts.py does: int8 [rows, inputs] with a scale for each row (`group` 0), or
        4-bit codes uint8 [rows, inputs / 2] with a scale for each group of inputs. -> False, and nothing is
        filled, for what it does not do."""
        ...


class GgmlWeights(Protocol):
    """A device's packing of ggml's types without loss."""

    def computes(self, parts: "Sequence[tuple[str, int]]", dtype: "torch.dtype") -> bool:
        """Whether products of such a weight are computed, with activations in `dtype`. `parts`: type and
        outputs of each part."""
        ...

    def quantized(self, weight: "Tensor") -> PackedWeight:
        """A float weight [outputs, inputs], rounded to Q8_0: to 8 bits and a scale for each 32 inputs."""
        ...

    def pack(self, parts: "Sequence[GgmlPart]") -> PackedWeight:
        """One weight of all parts, whose outputs follow each other."""
        ...

    def pack_experts(
        self, gate_up: "Sequence[Sequence[GgmlPart]]", down: "Sequence[GgmlPart]"
    ) -> "PackedExperts":
        """The experts of a layer as Experts.apply takes them: gate and up of each, of one type for all, and
        down, of one type for all."""
        ...
