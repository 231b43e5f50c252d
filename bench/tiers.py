"""How fast pages move between the cpu's cache and host memory, as a share of memcpy in the same run.

    python -m bench.tiers

The layers of an 8B model (32, with 8 key/value heads of 128 numbers in bfloat16) and few enough pages to fit,
in warm memory. Pages are scattered, each with a random host page, or in runs of 8 that are
neighbours in both. Two bounds: one large memcpy, and one memcpy for each part of a page between the same
addresses. Machines are never quiet, so all are measured in turn,
and the best of each counts.
"""

import json
import os
from collections.abc import Callable
from ctypes import memmove
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.record import record
from runtime.devices.cpu.memory import CpuMemory
from runtime.devices.host_memory import LAYOUTS, HostPages

LAYERS, HEADS, DIM, TOKENS, ROUNDS, RUN = 32, 8, 128, 4096, 15, 8


def best_s(bodies: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of the quickest run of each body, run in turns."""
    best = dict.fromkeys(bodies, float("inf"))
    for _ in range(ROUNDS):
        for name, body in bodies.items():
            begin = perf_counter()
            body()
            best[name] = min(best[name], perf_counter() - begin)
    return best


def random_pages(random: np.random.Generator, num_pages: int, run: int) -> np.ndarray:
    """Half of all pages at random, in runs of neighbours."""
    begins = random.permutation(num_pages // run)[: num_pages // run // 2] * run
    return (begins[:, None] + np.arange(run)).ravel().astype(np.int32)


def measure(page_size: int, layout: str, run: int) -> dict[str, float]:
    """GB/s of saves and loads, and their share of both bounds."""
    num_pages, memory = TOKENS // page_size, CpuMemory(1)
    kv = [
        (
            memory.allocate_cache(TOKENS, HEADS, DIM, torch.bfloat16).fill_(i),
            memory.allocate_cache(TOKENS, HEADS, DIM, torch.bfloat16).fill_(i + 1),
        )
        for i in range(LAYERS)
    ]
    parts = (page_size * HEADS * DIM * 2,) * (2 * LAYERS)
    fd = os.memfd_create("bench")
    os.ftruncate(fd, num_pages * sum(parts))
    host = HostPages(fd, num_pages, parts, layout)
    os.close(fd)
    copies = memory.open_page_copier(kv, host, page_size)
    random = np.random.default_rng(0)
    pages, hosts = (random_pages(random, num_pages, run) for _ in range(2))
    every = np.arange(num_pages, dtype=np.int32)
    copies.save(every, every)  # touches all memory
    caches = [cache.view(num_pages, -1).view(torch.uint8).numpy() for pair in kv for cache in pair]
    page_parts = [
        (cache[page].ctypes.data, host.part(i)[index].ctypes.data)
        for i, cache in enumerate(caches)
        for page, index in zip(pages, hosts, strict=True)
    ]

    def copy_parts() -> None:
        for page, index in page_parts:
            memmove(index, page, parts[0])

    def load() -> None:
        copies.load(hosts, pages)
        copies.finish()

    num_bytes = len(pages) * sum(parts)
    source, target = (np.ones(num_bytes, np.uint8) for _ in range(2))
    seconds = best_s(
        {
            "memcpy": lambda: np.copyto(target, source),
            "parts": copy_parts,
            "save": lambda: copies.save(pages, hosts),
            "load": load,
        }
    )
    copies.close()
    return {f"{name}_gb_s": round(num_bytes / s / 1e9, 2) for name, s in seconds.items()} | {
        f"{name}_of_{bound}": round(seconds[bound] / seconds[name], 2)
        for name in ("save", "load")
        for bound in ("memcpy", "parts")
    }


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    results = {
        f"page {size}, {layout}, {'scattered' if run == 1 else f'runs of {run}'}": measure(size, layout, run)
        for size in (16, 64)
        for layout in LAYOUTS
        for run in (1, RUN)
    }
    print(json.dumps(results, indent=2))
    record("tiers", results | {"load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)]})


if __name__ == "__main__":
    main()
