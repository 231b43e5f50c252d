"""PageCopier between an NPU's pages and host memory, on a stream of their own.

Both directions go through page-locked staging memory, because the host memory that both processes map is not
page-locked: a save gathers pages on the device and scatters them on the host, a load gathers on the host and
scatters on the device. A save is complete when it returns, and one of layers when a thread has scattered it;
a load completes layer by layer, and the main stream, not the host, waits for the event of a layer.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from runtime.devices.host_memory import HostPages


class LayerLoads:
    """Loads of one step that are under way: an event for each layer."""

    def __init__(self, events: list[torch.npu.Event]) -> None:
        self._events = events

    def wait(self, layer: int) -> None:
        """Lets the current stream wait for the loads of this layer."""
        torch.npu.current_stream().wait_event(self._events[layer])


class AscendPageCopier:
    """PageCopier (devices/page_copies.py) of one NPU."""

    def __init__(self, kv: list[tuple[Tensor, ...]], host: HostPages, page_size: int) -> None:
        parts = count()
        self._layers = [
            [(cache.view(len(cache) // page_size, -1), host.part(next(parts))) for cache in caches]
            for caches in kv
        ]
        self._limits = len(kv[0][0]) // page_size, host.num_pages
        self._stream = torch.npu.Stream()
        self._thread = ThreadPoolExecutor(
            1, "saves", initializer=partial(torch.npu.set_device, torch.npu.current_device())
        )
        self._saving: list[Future[None]] = []

    def save(self, pages: np.ndarray, hosts: np.ndarray) -> None:
        """Copies device pages to host pages; waits for the copies."""
        self.save_layers(range(len(self._layers)), pages, hosts, None)

    def save_layers(
        self, layers: range, pages: np.ndarray, hosts: np.ndarray, done: Callable[[], None] | None
    ) -> None:
        """Copies some layers; waits for the copies where `done` is None."""
        self._check(pages, hosts)
        staged = []
        with self._on_copy_stream():
            index = torch.from_numpy(pages.astype(np.int64)).to(self._layers[0][0][0].device)
            for cache, memory in (pair for layer in layers for pair in self._layers[layer]):
                locked = torch.empty(len(pages), cache.shape[1], dtype=cache.dtype, pin_memory=True)
                locked.copy_(cache.index_select(0, index), non_blocking=True)
                staged.append((locked, memory))
            copied = self._stream.record_event()
        if done is None:
            return _scatter(staged, hosts, copied, None)
        self._saving.append(self._thread.submit(_scatter, staged, hosts, copied, done))

    def load(self, hosts: np.ndarray, pages: np.ndarray) -> LayerLoads:
        """Begins to copy host pages to device pages, layer by layer."""
        self._check(pages, hosts)
        events = []
        with self._on_copy_stream():
            torch_device = self._layers[0][0][0].device
            index = torch.from_numpy(pages.astype(np.int64)).to(torch_device)
            for layer in self._layers:
                for cache, memory in layer:
                    locked = torch.from_numpy(memory[hosts]).pin_memory().view(cache.dtype)
                    cache.index_copy_(0, index, locked.to(torch_device, non_blocking=True))
                events.append(self._stream.record_event())
        return LayerLoads(events)

    def overwrite(self, pages: np.ndarray) -> None:
        """Nothing to do: saves are complete when `save` returns."""

    def finish(self, *, is_alone: bool) -> None:
        """Lets the main stream wait for all copies, and the host for saves of layers."""
        for save in self._saving:
            save.result()
        self._saving = []
        torch.npu.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """Waits for all copies."""
        self._stream.synchronize()
        self._thread.shutdown()

    def _on_copy_stream(self) -> torch.npu.StreamContext:
        """Runs what follows on the stream of copies, after the work that the main stream has so far."""
        self._stream.wait_stream(torch.npu.current_stream())
        return torch.npu.stream(self._stream)

    def _check(self, pages: np.ndarray, hosts: np.ndarray) -> None:
        """Raises IndexError for ids that do not exist, which devices do not check."""
        for what, indices, limit in zip(("page", "host page"), (pages, hosts), self._limits, strict=True):
            if not 0 <= int(indices.min()) <= int(indices.max()) < limit:
                raise IndexError(
                    f"there is no {what} {indices.min()} or {indices.max()}, only 0 to {limit - 1}"
                )


def _scatter(
    staged: list[tuple[Tensor, np.ndarray]],
    hosts: np.ndarray,
    copied: torch.npu.Event,
    done: Callable[[], None] | None,
) -> None:
    """Waits for what is on its way to page-locked memory, and writes it to host pages."""
    copied.synchronize()
    for locked, memory in staged:
        memory[hosts] = locked.view(torch.uint8).numpy()
    if done is not None:
        done()
