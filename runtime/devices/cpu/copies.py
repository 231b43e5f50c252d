"""Copies between the cache and host memory on the cpu: a slice a page. bench/tiers.py sets it beside one large memcpy; torch's
scatter of bytes measured several times slower than that.

Saves are made at once. Loads are made by a thread of their own, layer by layer ahead of the forward that waits for each: a copy
of numpy holds no lock of the interpreter.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from runtime.devices.host import HostPages


class LayersArriving:
    """Loads of one step on their way: a future for each layer."""

    def __init__(self, layers: list[Future[None]]) -> None:
        self._layers = layers

    def wait(self, layer: int) -> None:
        self._layers[layer].result()


class CpuCopies:
    """See devices/base.py."""

    def __init__(self, kv: list[tuple[Tensor, Tensor]], host: HostPages, page_size: int) -> None:
        self._layers = [[(_pages(cache, page_size), host.part(2 * i + j)) for j, cache in enumerate(pair)] for i, pair in enumerate(kv)]
        self._thread = ThreadPoolExecutor(1, "loads")
        self._loading: list[Future[None]] = []

    def save(self, pages: np.ndarray, hosts: np.ndarray) -> None:
        for layer in self._layers:
            for cache, memory in layer:
                _copy(cache, pages.tolist(), memory, hosts.tolist())

    def load(self, hosts: np.ndarray, pages: np.ndarray) -> LayersArriving:
        places = hosts.tolist(), pages.tolist()
        self._loading = [self._thread.submit(_load, layer, *places) for layer in self._layers]
        return LayersArriving(self._loading)

    def finish(self) -> None:
        for layer in self._loading:
            layer.result()
        self._loading = []

    def close(self) -> None:
        self._thread.shutdown()


def _pages(cache: Tensor, page_size: int) -> np.ndarray:
    """A layer's keys or values [num_pages * page_size, K, D] as bytes: uint8 [num_pages, bytes of a page], shared with the cache."""
    bytes_of: np.ndarray = cache.view(len(cache) // page_size, -1).view(torch.uint8).numpy()
    return bytes_of


def _load(layer: list[tuple[np.ndarray, np.ndarray]], hosts: list[int], pages: list[int]) -> None:
    for cache, memory in layer:
        _copy(memory, hosts, cache, pages)


def _copy(source: np.ndarray, rows: list[int], target: np.ndarray, places: list[int]) -> None:
    for row, place in zip(rows, places, strict=True):
        target[place] = source[row]
