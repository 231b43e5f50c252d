"""Captured steps as CUDA graphs. ranks/decode_graphs.py decides what is captured, and when.

All graphs share one pool of memory: they are replayed one after the other on one stream, and what outlives a
replay is not in the pool. Captures run on a stream of their own and are `thread_local`, because another
thread waits for the events of earlier steps meanwhile.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.devices.cuda.attention import AttentionPlan, plan_decodes
from runtime.devices.cuda.attention_backends import HybridAttentionBackend, PhasePlans
from runtime.devices.streams import Stream


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step, with the attention plans in it whose backends want the lengths of each replay."""

    cuda_graph: torch.cuda.CUDAGraph
    phases: PhasePlans


class CudaGraphs:
    """Graphs (devices/base.py) of one GPU."""

    def __init__(
        self,
        torch_device: torch.device,
        *,
        allows_gc: bool = False,
        attention_backend: HybridAttentionBackend | None = None,
    ) -> None:
        """`allows_gc`: Python's garbage collector may run during a capture. `attention_backend`: None for the
        Triton kernels."""
        self.torch_device = torch_device
        self.attention_backend = attention_backend
        self.reads_lengths = attention_backend is not None  # our own kernels read them on the device
        self.phases: PhasePlans = ()  # the attention plans of the latest body
        self.allows_gc = allows_gc
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(torch_device)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan | PhasePlans:
        """The attention plan of captured decode rows; see Graphs.plan_decodes."""
        if self.attention_backend is None:
            return plan_decodes(slots, lengths, page_tables, page_size)
        self.phases = self.attention_backend.plan_decodes(slots, lengths, page_tables, page_size, windows)
        return self.phases

    def capture(self, body: Callable[[], None], stream: Stream | None = None) -> Graph:
        """Captures what `body` launches, on a stream (see Graphs.capture); where memory is short, once more
        after the allocator has freed what it caches."""
        try:
            return self._capture(body, stream)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return self._capture(body, stream)

    def forget(self) -> None:
        """Takes a new pool: the old one is freed with the last of its graphs."""
        self.pool = torch.cuda.graph_pool_handle()

    def replay(self, graph: Graph, lengths: np.ndarray | tuple[()]) -> None:
        """Launches a captured step again. `lengths`: int32 [rows], this step's token included."""
        for phase in graph.phases:
            phase.backend.replan(phase.metadata, lengths)
        graph.cuda_graph.replay()

    def _capture(self, body: Callable[[], None], stream: Stream | None) -> Graph:
        self.phases = ()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.torch_device)
        with _without_gc(self.allows_gc), torch.cuda.stream(stream or self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                self._end_failed_capture(graph)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._leave_pool()
                raise
        return Graph(graph, self.phases)

    def _end_failed_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends the capture of a body that raised; ending it raises as well where the body did what a capture
        forbids."""
        try:
            graph.capture_end()
        except RuntimeError:  # the body's own error says more
            self._leave_pool()

    def _leave_pool(self) -> None:
        """Ends an invalid capture in torch's allocator, which would otherwise never again reuse memory that
        other streams have read."""
        torch._C._cuda_endAllocateToPool(self.torch_device.index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.torch_device)


@contextmanager
def _without_gc(allows_gc: bool) -> Iterator[None]:
    """Disables garbage collection, which may free what must not be freed during a capture."""
    if allows_gc or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
