"""What a device makes of weights. Only the device looks inside. Torch-free at run time."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


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
