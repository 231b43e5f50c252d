"""Interface of copies of pages between a rank's cache and its host memory. Torch-free at run time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from runtime.devices.streams import Stream


class PageLoads(Protocol):
    """The loads of one step, which may still run while the forward pass does."""

    def wait(self, layer: int) -> None:
        """Called where the attention of a layer begins: work that follows on the device sees the loaded pages
        of that layer.

        The host waits on the cpu device; on devices with streams the main stream does. Raises errors of the
        copy.
        """
        ...


class PageSaves(Protocol):
    """Saves of the pages that a step computes, layer by layer."""

    def wants(self, layer: int) -> bool:
        """Whether a save begins when this layer has been stored."""
        ...

    def stored(self, layer: int) -> None:
        """Called where the attention of a layer begins: the work launched so far has stored what the step
        computes of this layer and those before it."""
        ...


class PageCopier(Protocol):
    """Copies pages between a rank's cache and its host memory.

    A step calls `save`, then `load`, each at most once, then `overwrite`, `save_layers` any number of times,
    and `finish` last. Copies are
    ordered with the step's other work: a save reads what earlier steps have computed, and the pages that it
    read may be overwritten by this step's loads, and by the forward pass if `overwrite` named them. A save is
    complete before this rank takes part in a later step's collectives, so a result of rank 0 means that all
    ranks have saved.

    On devices with streams, copies run on their own stream, which first waits for the main stream. The main
    stream waits for saves where `overwrite` says so, and for each layer's loads in `PageLoads.wait`. The host
    memory is the mapping that the event-loop process has as well; a device that needs it page-locked
    registers that mapping.
    """

    def save(self, pages: "np.ndarray", hosts: "np.ndarray") -> None:
        """Copies device pages to host pages in all layers; int32 [N] each."""
        ...

    def load(self, hosts: "np.ndarray", pages: "np.ndarray") -> PageLoads:
        """Copies host pages to device pages, layer by layer; int32 [N] each. May return before the copies are
        done."""
        ...

    def overwrite(self, pages: "np.ndarray") -> None:
        """Called before the forward pass of every step, whether it copies or not, with the device pages,
        int32 [N], that it gives to sequences to write to: what is written there follows the saves of these
        pages, of this step and of earlier ones."""
        ...

    def save_layers(
        self, layers: range, pages: "np.ndarray", hosts: "np.ndarray", done: Callable[[], None] | None
    ) -> None:
        """Copies what the work launched so far has computed: device pages to host pages in some layers; int32
        [N] each. `done` is called, in any thread, when they are there. None: `finish` follows, and says so.
        """
        ...

    def finish(self, *, is_alone: bool) -> "Stream | None":
        """Called after the step's other work: the transfer of the step's result, and the collectives of later
        steps, follow all copies of the step. The host waits on the cpu device, and errors of copies are
        raised; on devices with streams the main stream waits. A device may return a stream in its place that
        the result shall follow, if `is_alone`: there is no other rank."""
        ...

    def close(self) -> None:
        """Frees threads, streams and registrations."""
        ...
