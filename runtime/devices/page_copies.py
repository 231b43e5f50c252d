"""Copies of pages between a rank's cache and its host memory, as a device provides them (devices/base.py,
Memory)."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Arrivals(Protocol):
    """The loads of one step, on their way while the forward runs."""

    def wait(self, layer: int) -> None:
        """Called where the attention of a layer begins: what follows on this device sees the loaded pages of
        that layer.

        The cpu waits here; a device with streams lets its stream wait, and the host goes on. Raises what went
        wrong in the copy.
        """
        ...


class Copies(Protocol):
    """Page copies between a rank's cache and its host memory. A step calls `save`, then `load`, each at most
    once, and `finish` last.

    All of it is ordered with the step's other work: a save reads what the steps before have computed, and a
    page that it has read may be overwritten by this step's loads and forward. A save is complete before this
    rank's part in any later collective is: so rank 0's result says that every rank has saved. On a device
    with streams: copies run on a stream of their own, which first waits for the main one; the main one waits
    for the saves before the forward, and for each layer's loads in `Arrivals.wait`. The host memory is the
    mapping that both processes have; a device that wants it pinned registers that.
    """

    def save(self, pages: "np.ndarray", hosts: "np.ndarray") -> None:
        """Device pages to host pages, in all layers; int32 [N] each."""
        ...

    def load(self, hosts: "np.ndarray", pages: "np.ndarray") -> Arrivals:
        """Host pages to device pages, layer by layer; may return before any of them is there."""
        ...

    def finish(self) -> None:
        """Called behind the step's other work: what is launched later, the way of the step's result to the
        host included, follows every copy of the step. The cpu waits here and raises what went wrong in one; a
        device with streams lets its main stream wait."""
        ...

    def close(self) -> None: ...
