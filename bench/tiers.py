"""How fast pages move between the cpu's cache and host memory, as a share of one large memcpy in the same run.

    python -m bench.tiers

The layers of an 8B model (32, with 8 key/value heads of 128 numbers in bfloat16) and few enough pages to fit; scattered pages, warm memory.
"""

import json
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.record import record
from runtime.devices.cpu.memory import CpuMemory
from runtime.devices.host import LAYOUTS, HostPages

LAYERS, HEADS, DIM, TOKENS, RUNS = 32, 8, 128, 4096, 5


def best_s(body: Callable[[], Any]) -> float:
    times = []
    for _ in range(RUNS):
        begin = perf_counter()
        body()
        times.append(perf_counter() - begin)
    return min(times)


def measure(page_size: int, layout: str) -> dict[str, float]:
    """Half of all pages at once, each to and from a place that has nothing to do with its own."""
    num_pages, memory = TOKENS // page_size, CpuMemory(1)
    kv = [tuple(memory.allocate_cache(TOKENS, HEADS, DIM, torch.bfloat16).fill_(i + j) for j in range(2)) for i in range(LAYERS)]
    parts = (page_size * HEADS * DIM * 2,) * (2 * LAYERS)
    fd = os.memfd_create("bench")
    os.ftruncate(fd, num_pages * sum(parts))
    host = HostPages(fd, num_pages, parts, layout)
    os.close(fd)
    copies = memory.open_copies([(k, v) for k, v in kv], host, page_size)
    random = np.random.default_rng(0)
    pages, hosts = (random.permutation(num_pages)[: num_pages // 2].astype(np.int32) for _ in range(2))
    every = np.arange(num_pages, dtype=np.int32)
    copies.save(every, every)  # touches all memory

    def load() -> None:
        copies.load(hosts, pages)
        copies.finish()

    num_bytes = len(pages) * sum(parts)
    source, target = (np.ones(num_bytes, np.uint8) for _ in range(2))
    seconds = {"memcpy": best_s(lambda: np.copyto(target, source)), "save": best_s(lambda: copies.save(pages, hosts)), "load": best_s(load)}
    copies.close()
    rates = {f"{name}_gb_s": round(num_bytes / s / 1e9, 2) for name, s in seconds.items()}
    return rates | {f"{name}_of_memcpy": round(seconds["memcpy"] / seconds[name], 2) for name in ("save", "load")}


def main() -> None:
    torch.set_num_threads(1)
    results = {f"page {size}, {layout}": measure(size, layout) for size in (16, 64) for layout in LAYOUTS}
    print(json.dumps(results, indent=2))
    record("tiers", results)


if __name__ == "__main__":
    main()
