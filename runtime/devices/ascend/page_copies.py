"""PageCopier between an NPU's pages and host memory, on a stream of their own. There are two ways:

    Staged    through page-locked staging memory, because the host memory that both processes map is not
              page-locked: a save gathers pages on the device and scatters them on the host, a load gathers on
              the host and scatters on the device
    Batched   (--hicache-io-backend kernel_ascend) each page from where it is to where it belongs, many by one
              call, in host memory that is registered with the driver. torch_npu's torch._foreach_copy_ is one
              aclrtMemcpyBatchAsync where CANN has it, and a copy for each page where not

A load completes layer by layer, and the main stream, not the host, waits for the event of a layer.

A save is begun before the step is launched, and its pages are written to host memory when the step has been
launched, while the device computes it: `finish` waits for the copies. What the step writes to pages that are
saved follows their gathering, for which the main stream waits. Layers of pages that the step computes, whose
readers wait for them, are written by a thread as soon as they are staged.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from runtime.devices.host_memory import HostPages
from runtime.errors import StartError

Parts = list[tuple[Tensor, np.ndarray]]  # caches as [pages, numbers], and their parts of host memory
Locked = list[tuple[Tensor, np.ndarray]]  # page-locked copies of pages, and the part that they belong to
MAX_COPIES = 1024  # of one call; torch_npu keeps their addresses on the stack
REGISTERED = 0x2 | 0x10000000  # ACL_HOST_REG_MAPPED and ACL_HOST_REG_PINNED: for the device, and page-locked


class Staged:
    """Copies of some pages through page-locked staging memory. Made on the stream of copies."""

    def __init__(self, pages: np.ndarray, hosts: np.ndarray, torch_device: torch.device) -> None:
        self._hosts, self._torch_device = hosts, torch_device
        self._index = torch.from_numpy(pages.astype(np.int64)).to(torch_device)

    def save(self, parts: Parts, stream: torch.npu.Stream) -> tuple[torch.npu.Event, Locked]:
        """Begins to copy pages to staging memory; the event says that they were read."""
        gathered = [(cache.index_select(0, self._index), memory) for cache, memory in parts]
        is_read, staged = stream.record_event(), []
        for rows, memory in gathered:
            locked = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            locked.copy_(rows, non_blocking=True)
            staged.append((locked, memory))
        return is_read, staged

    def load(self, parts: Parts) -> None:
        """Begins to copy host pages to the device."""
        for cache, memory in parts:
            locked = torch.from_numpy(memory[self._hosts]).pin_memory().view(cache.dtype)
            cache.index_copy_(0, self._index, locked.to(self._torch_device, non_blocking=True))


class Batched:
    """Copies of some pages from where they are to where they belong, in host memory that is registered."""

    def __init__(self, pages: np.ndarray, hosts: np.ndarray, torch_device: torch.device) -> None:
        self._pairs = list(zip(pages.tolist(), hosts.tolist(), strict=True))

    def save(self, parts: Parts, stream: torch.npu.Stream) -> tuple[torch.npu.Event, Locked]:
        """Begins to copy pages to host memory; the event says that they are there."""
        device, host = self._rows(parts)
        copy_all(host, device)
        return stream.record_event(), []

    def load(self, parts: Parts) -> None:
        """Begins to copy host pages to the device."""
        device, host = self._rows(parts)
        copy_all(device, host)

    def _rows(self, parts: Parts) -> tuple[list[Tensor], list[Tensor]]:
        """The bytes of each page on the device, and of its host page."""
        device, host = [], []
        for cache, memory in parts:
            own, theirs = cache.view(torch.uint8), torch.from_numpy(memory)
            device += [own[page] for page, _ in self._pairs]
            host += [theirs[page] for _, page in self._pairs]
        return device, host


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Begins to copy each source to its target, contiguous bytes between host and device."""
    for at in range(0, len(targets), MAX_COPIES):
        few = slice(at, at + MAX_COPIES)
        torch._foreach_copy_(targets[few], sources[few], non_blocking=True)


def register(host: HostPages) -> None:
    """Lets the driver lock the pages of host memory. Raises StartError."""
    code = torch.npu.npurt().npuHostRegister(host.address, host.num_bytes, REGISTERED)
    if code:
        raise StartError(
            f"the driver does not register the host memory of --hicache-io-backend kernel_ascend (error "
            f"{code}); take --hicache-io-backend kernel, or lower --hicache-size"
        )


class LayerLoads:
    """Loads of one step that are under way: an event for each layer."""

    def __init__(self, events: list[torch.npu.Event]) -> None:
        self._events = events

    def wait(self, layer: int) -> None:
        """Lets the current stream wait for the loads of this layer."""
        torch.npu.current_stream().wait_event(self._events[layer])


@dataclass(frozen=True, slots=True)
class Saving:
    """A save under way."""

    pages: np.ndarray  # on the device
    hosts: np.ndarray
    staged: Locked  # what is still to be written to host pages
    is_read: torch.npu.Event  # the pages may be overwritten
    is_staged: torch.npu.Event

    def write(self) -> None:
        """Waits for the page-locked memory, and writes it to the host pages."""
        self.is_staged.synchronize()
        for locked, memory in self.staged:
            memory[self.hosts] = locked.view(torch.uint8).numpy()


class AscendPageCopier:
    """PageCopier (devices/page_copies.py) of one NPU."""

    def __init__(
        self, kv: list[tuple[Tensor, ...]], host: HostPages, page_size: int, *, is_batched: bool = False
    ) -> None:
        """`is_batched`: pages are copied by Batched. Raises StartError where the driver refuses that."""
        if is_batched:
            register(host)
        self._way = Batched if is_batched else Staged
        self._registered = host if is_batched else None
        parts = count()
        self._layers = [
            [(cache.view(len(cache) // page_size, -1), host.part(next(parts))) for cache in caches]
            for caches in kv
        ]
        self._limits = len(kv[0][0]) // page_size, host.num_pages
        self._stream = torch.npu.Stream()
        self._saving: list[Saving] = []  # of the step that is being launched
        self._thread = ThreadPoolExecutor(
            1, "saves", initializer=partial(torch.npu.set_device, torch.npu.current_device())
        )
        self._reported: list[Future[None]] = []  # saves of layers that the thread writes

    def save(self, pages: np.ndarray, hosts: np.ndarray) -> None:
        """Begins to copy device pages to host pages."""
        self._saving.append(self._begin(range(len(self._layers)), pages, hosts))

    def save_layers(
        self, layers: range, pages: np.ndarray, hosts: np.ndarray, done: Callable[[], None] | None
    ) -> None:
        """Begins to copy some layers; where `done` is given, a thread calls it when they are written."""
        saving = self._begin(layers, pages, hosts)
        if done is None:
            self._saving.append(saving)
        else:
            self._reported.append(self._thread.submit(_write, saving, done))

    def _begin(self, layers: range, pages: np.ndarray, hosts: np.ndarray) -> Saving:
        self._check(pages, hosts)
        parts = [part for layer in layers for part in self._layers[layer]]
        with self._on_copy_stream():
            is_read, staged = self._way(pages, hosts, parts[0][0].device).save(parts, self._stream)
            return Saving(pages, hosts, staged, is_read, self._stream.record_event())

    def load(self, hosts: np.ndarray, pages: np.ndarray) -> LayerLoads:
        """Begins to copy host pages to device pages, layer by layer. Waits for saves that write these host
        pages."""
        self._check(pages, hosts)
        if any(np.isin(hosts, saving.hosts).any() for saving in self._saving):
            self._complete()
        events = []
        with self._on_copy_stream():
            way = self._way(pages, hosts, self._layers[0][0][0].device)
            for layer in self._layers:
                way.load(layer)
                events.append(self._stream.record_event())
        return LayerLoads(events)

    def overwrite(self, pages: np.ndarray) -> None:
        """Lets the main stream wait until saves under way have read these pages."""
        for saving in self._saving:
            if np.isin(pages, saving.pages).any():
                torch.npu.current_stream().wait_event(saving.is_read)

    def finish(self, *, is_alone: bool) -> None:
        """Writes what the step has saved to host memory, and lets the main stream wait for all copies."""
        self._complete()
        torch.npu.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """Waits for all copies."""
        self._complete()
        self._stream.synchronize()
        self._thread.shutdown()
        if self._registered is not None:
            torch.npu.npurt().npuHostUnregister(self._registered.address)
            self._registered = None

    def _complete(self) -> None:
        """Waits for the saves under way, and writes them to host memory."""
        saves, self._saving = self._saving, []
        for saving in saves:
            saving.write()
        reports, self._reported = self._reported, []
        for written in reports:
            written.result()

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


def _write(saving: Saving, done: Callable[[], None]) -> None:
    saving.write()
    done()
