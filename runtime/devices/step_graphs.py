"""Graphs of a step's kernels: how a device captures and replays them. Torch-free at run time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from runtime.devices.streams import Stream

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from runtime.devices.base import AttentionPlan


class Graph(Protocol):
    """A captured graph. Only the device looks inside."""


class Graphs(Protocol):
    """Capture and replay of what a function launches. ranks/decode_graphs.py describes what is captured.

    All graphs of a rank share one memory pool: they are replayed one after another, in the order of the
    device's other work, and results that outlive a replay are in tensors allocated outside. A tensor that a
    body allocates has the same address in every replay.
    """

    reads_lengths: bool  # whether `replay` needs lengths from the host

    def plan_decodes(
        self,
        slots: "Tensor",
        lengths: "Tensor",
        page_tables: "Tensor",
        page_size: int,
        windows: tuple[int, ...],
    ) -> "AttentionPlan":
        """What Ops.plan_attention makes, for decode rows whose slots and lengths (the step's token included)
        are on the device, int64 [R]. Called in captured bodies: it may not read their values on the host, and
        must hold for the lengths of all later replays."""
        ...

    def capture(self, body: Callable[[], None], stream: Stream | None = None) -> Graph:
        """The graph of what `body` launches. The body has run once before; it may be run, on rows of padding.
        `stream`: of a partition, on whose multiprocessors the graph then runs; None: on all.

        Raises RuntimeError if it cannot be captured or if there is no memory for it. The device must then
        continue as if nothing had been tried.
        """
        ...

    def forget(self) -> None:
        """Frees what the graphs shared. All graphs have been dropped; the next capture begins anew."""
        ...

    def replay(self, graph: Graph, lengths: "np.ndarray | tuple[()]") -> None:
        """Launches a graph. `lengths`, int32 [size]: the length of each row with this step's token, 1 for
        padding, for operators that take it from the host; empty if the graph has no attention."""
        ...
