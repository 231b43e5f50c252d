"""Page copies of the cpu device: one slice for each run of pages that are contiguous in the cache and in host
memory. The runs are found once for all layers. bench/tiers.py: at least as fast as calls of memcpy for the
same runs; one large memcpy is faster. torch's scatter of bytes measured several times slower.

Saves are done at once. Loads are done by a thread, layer by layer ahead of the forward pass, which waits for
each, and so are saves of layers while later ones are computed: a copy by numpy does not hold the
interpreter's lock.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import numpy as np
import torch
from torch import Tensor

from runtime.devices.host_memory import HostPages

Run = tuple[int, int, int]  # first page, first host page, how many


class LayersArriving:
    """Loads of one step, a future for each layer. See PageLoads."""

    def __init__(self, layers: list[Future[None]]) -> None:
        self._layers = layers

    def wait(self, layer: int) -> None:
        """See PageLoads.wait."""
        self._layers[layer].result()


class CpuPageCopier:
    """See PageCopier."""

    def __init__(self, kv: list[tuple[Tensor, ...]], host: HostPages, page_size: int) -> None:
        parts = count()
        self._layers = [
            [(_pages(cache, page_size), host.part(next(parts))) for cache in caches] for caches in kv
        ]
        self._limits = len(kv[0][0]) // page_size, host.num_pages
        self._thread = ThreadPoolExecutor(1, "copies")
        self._copying: list[Future[None]] = []

    def save(self, pages: np.ndarray, hosts: np.ndarray) -> None:
        """See PageCopier.save."""
        _save(self._layers, self._runs(pages, hosts), None)

    def save_layers(
        self, layers: range, pages: np.ndarray, hosts: np.ndarray, done: Callable[[], None] | None
    ) -> None:
        """See PageCopier.save_layers."""
        own, runs = self._layers[layers.start : layers.stop], self._runs(pages, hosts)
        if done is None:
            return _save(own, runs, None)
        self._copying.append(self._thread.submit(_save, own, runs, done))

    def load(self, hosts: np.ndarray, pages: np.ndarray) -> LayersArriving:
        """See PageCopier.load."""
        runs = self._runs(pages, hosts)
        loading = [self._thread.submit(_load, layer, runs) for layer in self._layers]
        self._copying += loading
        return LayersArriving(loading)

    def overwrite(self, pages: np.ndarray) -> None:
        """Nothing to do: saves are complete when `save` returns."""

    def finish(self, *, is_alone: bool) -> None:
        """See PageCopier.finish."""
        for copy in self._copying:
            copy.result()
        self._copying = []

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _runs(self, pages: np.ndarray, hosts: np.ndarray) -> list[Run]:
        """Raises IndexError for pages that do not exist, of which slices would copy fewer without an
        error."""
        for what, indices, limit in zip(("page", "host page"), (pages, hosts), self._limits, strict=True):
            if not 0 <= int(indices.min()) <= int(indices.max()) < limit:
                raise IndexError(
                    f"there is no {what} {indices.min()} or {indices.max()}, only 0 to {limit - 1}"
                )
        return find_runs(pages, hosts)


def _pages(cache: Tensor, page_size: int) -> np.ndarray:
    """A layer's keys or values [num_pages * page_size, K, D] as bytes: uint8 [num_pages, bytes of a page],
    shared with the cache."""
    bytes_of: np.ndarray = cache.view(len(cache) // page_size, -1).view(torch.uint8).numpy()
    return bytes_of


def _save(
    layers: list[list[tuple[np.ndarray, np.ndarray]]], runs: list[Run], done: Callable[[], None] | None
) -> None:
    for cache, memory in (pair for layer in layers for pair in layer):
        for page, host, size in runs:
            memory[host : host + size] = cache[page : page + size]
    if done is not None:
        done()


def _load(layer: list[tuple[np.ndarray, np.ndarray]], runs: list[Run]) -> None:
    for cache, memory in layer:
        for page, host, size in runs:
            cache[page : page + size] = memory[host : host + size]


def find_runs(pages: np.ndarray, hosts: np.ndarray) -> list[Run]:
    """Runs of pairs that are contiguous in both arrays, in order of their pages; int32 [N] each, N > 0."""
    order = np.argsort(pages)
    pages, hosts = pages[order], hosts[order]
    ends = np.flatnonzero((np.diff(pages) != 1) | (np.diff(hosts) != 1)) + 1
    begins = np.concatenate(([0], ends))
    return list(
        zip(
            pages[begins].tolist(),
            hosts[begins].tolist(),
            np.diff(begins, append=len(pages)).tolist(),
            strict=True,
        )
    )
