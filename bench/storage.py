"""How fast pages are written to files and read back, as a share of plain file copies of the same bytes in the
same run.

    python -m bench.storage [--pages 256] [--page-kib 2048] [--dir DIR]

A page of 2 MiB is that of an 8B model (32 layers, 8 key/value heads of 128, bfloat16) with 16 tokens. "plain"
writes and reads files of that size with one system call each: no names by content, no checksum, no index.
Files stay in the operating system's cache: the runtime is measured, not the disk. Best of
three rounds, taken in turns.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

import numpy as np

from bench.record import record
from runtime.storage.store import Store, open_store

ROUNDS = 3


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--dir", help="folder of the files; the default is the directory for temporary files")
    arguments = parser.parse_args()
    results = [
        measure(arguments.pages, arguments.page_kib << 10, threads, arguments.dir) for threads in (1, 2)
    ]
    checksum = crc_gb_s(arguments.page_kib << 10)
    print(json.dumps({"checksum_gb_s": checksum, "cases": results}, indent=2))
    record(
        "storage",
        {
            "pages": arguments.pages,
            "page_bytes": arguments.page_kib << 10,
            "checksum_gb_s": checksum,
            "cases": results,
        },
    )


def measure(num_pages: int, page_bytes: int, threads: int, folder: str | None) -> dict[str, float | int]:
    """GB/s of each way, by `threads` worker threads."""
    pages = np.random.default_rng(0).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)
    keys = [number.to_bytes(16, "big") for number in range(num_pages)]
    views = [memoryview(page) for page in pages]  # type: ignore[arg-type]
    into = np.zeros((threads, page_bytes), dtype=np.uint8)
    best: dict[str, float] = {}
    with ThreadPoolExecutor(threads) as pool:

        def timed(name: str, call: Callable[[int], object]) -> None:
            begin = time.perf_counter()
            parts: Iterable[range] = (range(first, num_pages, threads) for first in range(threads))
            list(pool.map(lambda part: [call(number) for number in part], parts))
            best[name] = max(
                best.get(name, 0.0), num_pages * page_bytes / (time.perf_counter() - begin) / 1e9
            )

        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory(dir=folder) as directory:
                path = Path(directory)
                plain = [path / f"{number}" for number in range(num_pages)]
                timed("plain_write", lambda number: put(plain[number], views[number]))
                timed("plain_read", lambda number: get(plain[number], into[number % threads]))
                store = open_store("file", {"dir": str(path / "pages")}, b"i" * 16, page_bytes)
                timed("write", lambda number: store.save(keys[number], [views[number]]))
                timed("read", lambda number: check(store, keys[number], into[number % threads]))
                assert (store.totals.pages_written, store.totals.pages_read, store.totals.errors) == (
                    num_pages,
                    num_pages,
                    0,
                )
                store.close()
    rounded = {f"{name}_gb_s": round(rate, 2) for name, rate in best.items()}
    return {
        "threads": threads,
        **rounded,
        "write_share": round(best["write"] / best["plain_write"], 2),
        "read_share": round(best["read"] / best["plain_read"], 2),
    }


def put(path: Path, page: memoryview) -> None:
    """Writes a page to a new file with one call."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(file, page)
    os.close(file)


def get(path: Path, into: np.ndarray) -> None:
    """Reads a page from a file with one call."""
    file = os.open(path, os.O_RDONLY)
    os.readv(file, [memoryview(into)])  # type: ignore[list-item, arg-type]
    os.close(file)


def check(store: Store, key: bytes, into: np.ndarray) -> None:
    """Loads a page from the store."""
    assert store.load(key, [memoryview(into)])  # type: ignore[arg-type]


def crc_gb_s(page_bytes: int) -> float:
    """What the checksum alone costs."""
    page = bytes(page_bytes)
    begin = time.perf_counter()
    for _ in range(64):
        crc32(page)
    return round(64 * page_bytes / (time.perf_counter() - begin) / 1e9, 2)


if __name__ == "__main__":
    main()
