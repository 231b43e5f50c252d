"""Decode steps as CUDA graphs. What a body is, and when it is captured, is ranks/decode_graphs.py's.

All graphs share one pool of memory: they are replayed one after the other on one stream, and what outlives a
replay lies outside. Captures have a stream of their own, and are `thread_local`: another thread waits for the
events of earlier steps meanwhile.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.devices.cuda.attention import plan_decodes
from runtime.devices.cuda.attention_backends import HybridAttentionBackend, PhasePlan


@dataclass(frozen=True, slots=True)
class Graph:
    """A capture, and the attention in it that wants to know lengths."""

    recorded: Any
    parts: tuple[PhasePlan, ...]


class CudaGraphs:
    """See devices/base.py."""

    def __init__(
        self,
        torch_device: torch.device,
        *,
        collects: bool = False,
        attention_backend: HybridAttentionBackend | None = None,
    ) -> None:
        """`collects`: Python's garbage collector may run during a capture; `attention_backend`: attention by other
        kernels than ours."""
        self.torch_device = torch_device
        self.attention_backend = attention_backend
        self.parts: tuple[PhasePlan, ...] = ()  # that the latest body has planned
        self.collects = collects
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(torch_device)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> Any:
        if self.attention_backend is None:
            return plan_decodes(slots, lengths, page_tables, page_size)
        self.parts = self.attention_backend.plan_decodes(slots, lengths, page_tables, page_size, windows)
        return self.parts

    def capture(self, body: Callable[[], None]) -> Any:
        """Where the memory that steps have left lying about is in the way, it is given back, and the capture
        tried again."""
        try:
            return self._capture(body)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return self._capture(body)

    def forget(self) -> None:
        """A pool that no graph is in is gone with its memory, and takes no new ones."""
        self.pool = torch.cuda.graph_pool_handle()

    def replay(self, graph: "Graph", lengths: Any) -> None:
        for part in graph.parts:
            part.backend.replan(part.metadata, lengths)
        graph.recorded.replay()

    def _capture(self, body: Callable[[], None]) -> "Graph":
        self.parts = ()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.torch_device)
        with _still(self.collects), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                self._give_up(graph)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._leave_pool()
                raise
        return Graph(graph, self.parts)

    def _give_up(self, graph: Any) -> None:
        """Ends the capture of a body that raised: of one that did what a capture forbids, this raises as
        well."""
        try:
            graph.capture_end()
        except RuntimeError:  # the body's own error says more
            self._leave_pool()

    def _leave_pool(self) -> None:
        """After an invalid capture torch's allocator still believes in it, and would never again reuse what
        other streams have read."""
        torch._C._cuda_endAllocateToPool(self.torch_device.index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.torch_device)


@contextmanager
def _still(collects: bool) -> Iterator[None]:
    """Without garbage collection, which may free what a capture must not see freed."""
    if collects or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
