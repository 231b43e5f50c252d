"""PageCopier between an NPU's pages and host memory, on a stream of their own.

Both ways go through page-locked staging memory, as the mapping that both processes have is not page-locked: a
save gathers pages on the device and the host scatters them, a load gathers on the host and scatters on the
device. A save has ended when it returns, so rank 0's result says that it has; a load ends layer by layer, and
the main stream waits for the layer's event, not the host.
"""

import numpy as np
import torch
from torch import Tensor

from runtime.devices.host_memory import HostPages


class LayersArriving:
    """Loads of one step on their way: an event for each layer."""

    def __init__(self, events: list[torch.npu.Event]) -> None:
        self._events = events

    def wait(self, layer: int) -> None:
        torch.npu.current_stream().wait_event(self._events[layer])


class AscendPageCopier:
    """See devices/base.py."""

    def __init__(self, kv: list[tuple[Tensor, Tensor]], host: HostPages, page_size: int) -> None:
        self._layers = [
            [(cache.view(len(cache) // page_size, -1), host.part(2 * i + j)) for j, cache in enumerate(pair)]
            for i, pair in enumerate(kv)
        ]
        self._limits = len(kv[0][0]) // page_size, host.num_pages
        self._stream = torch.npu.Stream()

    def save(self, pages: np.ndarray, hosts: np.ndarray) -> None:
        self._check(pages, hosts)
        staged = []
        with self._beside():
            index = torch.from_numpy(pages.astype(np.int64)).to(self._layers[0][0][0].device)
            for layer in self._layers:
                for cache, memory in layer:
                    locked = torch.empty(len(pages), cache.shape[1], dtype=cache.dtype, pin_memory=True)
                    locked.copy_(cache.index_select(0, index), non_blocking=True)
                    staged.append((locked, memory))
        self._stream.synchronize()
        for locked, memory in staged:
            memory[hosts] = locked.view(torch.uint8).numpy()

    def load(self, hosts: np.ndarray, pages: np.ndarray) -> LayersArriving:
        self._check(pages, hosts)
        events = []
        with self._beside():
            torch_device = self._layers[0][0][0].device
            index = torch.from_numpy(pages.astype(np.int64)).to(torch_device)
            for layer in self._layers:
                for cache, memory in layer:
                    locked = torch.from_numpy(memory[hosts]).pin_memory().view(cache.dtype)
                    cache.index_copy_(0, index, locked.to(torch_device, non_blocking=True))
                events.append(self._stream.record_event())
        return LayersArriving(events)

    def finish(self) -> None:
        torch.npu.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        self._stream.synchronize()

    def _beside(self) -> torch.npu.StreamContext:
        """What follows runs on the stream of copies, after all that the main stream has been given."""
        self._stream.wait_stream(torch.npu.current_stream())
        return torch.npu.stream(self._stream)

    def _check(self, pages: np.ndarray, hosts: np.ndarray) -> None:
        """Raises IndexError: an index beyond the end is nothing that a device checks."""
        for what, places, limit in zip(("page", "host page"), (pages, hosts), self._limits, strict=True):
            if not 0 <= int(places.min()) <= int(places.max()) < limit:
                raise IndexError(
                    f"there is no {what} {places.min()} or {places.max()}, only 0 to {limit - 1}"
                )
