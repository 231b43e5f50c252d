"""Copies between a GPU's pages and host memory, on a stream of their own.

The host memory that both processes map is page-locked and registered with the GPU, so a kernel reads and
writes its pages in place: no staging, and one launch for each cache of a layer, however many pages are
copied. The main stream and the stream of copies wait for each other by events; the host waits for neither.

Saved pages are complete ones, so steps go on while they are saved. The main stream waits for a save where a
step is given one of its pages to write to, and, with several ranks, at the end of the step: a result of rank
0 speaks for all of them. Alone, the stream that brings results to the host waits in its place. A thread waits
for saves of layers, to say when they are done.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch
import triton
from torch import Tensor

from runtime.devices.cuda.kernels.pages import copy_rows_kernel
from runtime.devices.host_memory import HostPages
from runtime.devices.streams import Event, Stream, Streams
from runtime.errors import StartError
from runtime.layers.upload import upload

BLOCK = 1024  # words that a program copies


@dataclass(frozen=True, slots=True)
class CachePages:
    """One cache of a layer: its pages on the GPU and in host memory, as rows of parts of the same words."""

    gpu: Tensor
    host: Tensor


class LayerLoads:
    """Loads of one step that are under way: an event for each layer."""

    def __init__(self, events: list[Event], streams: Streams) -> None:
        self._events = events
        self._streams = streams

    def wait(self, layer: int) -> None:
        """Lets the current stream wait for the loads of this layer."""
        self._streams.current_stream().wait_event(self._events[layer])


@dataclass(frozen=True, slots=True)
class Saving:
    """A save under way."""

    pages: np.ndarray  # on the device, sorted
    done: Event

    def tell(self, reported: Callable[[], None]) -> None:
        """Calls `reported` when it is done."""
        self.done.synchronize()
        reported()


class CudaPageCopier:
    """PageCopier (devices/page_copies.py) of one GPU. `streams`: torch's module of the device."""

    def __init__(
        self, kv: list[tuple[Tensor, ...]], host: HostPages, page_size: int, streams: Streams
    ) -> None:
        """`host` is page-locked already; see `lock`."""
        self._host = host  # the mapping must live as long as the views of it
        parts = count()
        self._layers = [
            [cache_pages(cache, host.part(next(parts)), page_size) for cache in caches] for caches in kv
        ]
        self._limits = len(kv[0][0]) // page_size, host.num_pages
        self._torch_device = kv[0][0].device
        self._streams = streams
        self._stream = streams.Stream()
        self._saving: list[Saving] = []
        self._waiting = ThreadPoolExecutor(
            1, "saves", initializer=partial(streams.set_device, streams.current_device())
        )

    def save(self, pages: np.ndarray, hosts: np.ndarray) -> None:
        """Begins to copy device pages to host pages."""
        self.save_layers(range(len(self._layers)), pages, hosts, None)

    def save_layers(
        self, layers: range, pages: np.ndarray, hosts: np.ndarray, done: Callable[[], None] | None
    ) -> None:
        """Begins to copy some layers; see PageCopier.save_layers."""
        index = self._begin(pages, hosts)
        with self._streams.stream(self._stream):
            for layer in layers:
                for cache in self._layers[layer]:
                    copy_pages(cache.gpu, cache.host, index[0], index[1])
        saving = Saving(np.unique(pages), self._stream.record_event())
        self._saving.append(saving)
        if done is not None:
            self._waiting.submit(saving.tell, done)

    def overwrite(self, pages: np.ndarray) -> None:
        """Lets the main stream wait for the saves under way that have one of these pages."""
        self._saving = [saving for saving in self._saving if not saving.done.query()]
        waited = [saving for saving in self._saving if np.isin(pages, saving.pages).any()]
        if waited:  # the last one is behind the others
            self._streams.current_stream().wait_event(waited[-1].done)

    def load(self, hosts: np.ndarray, pages: np.ndarray) -> LayerLoads:
        """Begins to copy host pages to device pages, layer by layer."""
        index, events = self._begin(pages, hosts), []
        with self._streams.stream(self._stream):
            for layer in self._layers:
                for cache in layer:
                    copy_pages(cache.host, cache.gpu, index[1], index[0])
                events.append(self._stream.record_event())
        return LayerLoads(events, self._streams)

    def finish(self, *, is_alone: bool) -> Stream | None:
        """The stream that the step's result must follow; None, where there are several ranks: the main stream
        waits for all copies."""
        if is_alone:
            return self._stream
        self._streams.current_stream().wait_stream(self._stream)
        return None

    def close(self) -> None:
        """Waits for all copies and unlocks the host memory."""
        self._stream.synchronize()
        self._waiting.shutdown()
        unlock(self._host)

    def _begin(self, pages: np.ndarray, hosts: np.ndarray) -> Tensor:
        """Device and host page ids on the device, int32 [2, N]. Lets the stream of copies wait for the main
        stream."""
        for what, indices, limit in zip(("page", "host page"), (pages, hosts), self._limits, strict=True):
            if not 0 <= int(indices.min()) <= int(indices.max()) < limit:
                raise IndexError(
                    f"there is no {what} {indices.min()} or {indices.max()}, only 0 to {limit - 1}"
                )
        index = upload(np.stack((pages, hosts)).astype(np.int32), self._torch_device)
        if self._torch_device.type != "cpu":
            index.record_stream(self._stream)
        self._stream.wait_stream(self._streams.current_stream())
        return index


def cache_pages(cache: Tensor, part: np.ndarray, page_size: int) -> CachePages:
    """One cache and `part`, uint8 [host pages, bytes of a page], as rows of parts of the widest words that
    fit both: one part where a page is contiguous, else one for each token."""
    is_whole = cache.is_contiguous()
    pages = (cache.flatten(1) if not is_whole else cache.view(len(cache) // page_size, -1)).view(torch.uint8)
    pages = pages.unflatten(0, (len(cache) // page_size, -1))
    host = torch.from_numpy(part).unflatten(1, pages.shape[1:])
    numbers = (pages.shape[2], *pages.stride()[:2], pages.data_ptr(), host.stride(0), host.data_ptr())
    if not any(number % 8 for number in numbers):
        return CachePages(pages.view(torch.int64), host.view(torch.int64))
    return CachePages(pages, host)


def copy_pages(source: Tensor, target: Tensor, source_rows: Tensor, target_rows: Tensor) -> None:
    """Copies rows of `source` to rows of `target`, [.., parts, words] both. The rows: int32 [N] each."""
    parts, part = source.shape[1:]
    copy_rows_kernel[(len(source_rows), triton.cdiv(parts * part, BLOCK))](
        source,
        target,
        source_rows,
        target_rows,
        source.stride(0),
        target.stride(0),
        parts * part,
        part,
        source.stride(1),
        target.stride(1),
        BLOCK=BLOCK,
    )


def lock(host: HostPages) -> None:
    """Page-locks host memory and registers it with the GPU. Raises StartError."""
    failed = int(torch.cuda.cudart().cudaHostRegister(host.address, host.num_bytes, 0))
    if failed:
        raise StartError(
            f"{host.num_bytes / 1e9:.1f} GB of host pages cannot be page-locked (CUDA error {failed}); "
            "lower --hicache-size or --hicache-ratio, or raise the limit of locked memory (ulimit -l)"
        )


def unlock(host: HostPages) -> None:
    """Undoes `lock`."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(host.address)
