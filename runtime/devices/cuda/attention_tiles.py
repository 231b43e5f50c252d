"""How attention is cut into programs: sizes of tiles, splits of keys, and lists of tiles, by the facts of the
GPU."""

from dataclasses import dataclass

import numpy as np

from runtime.devices.cuda.kernels.launch import INTERPRETER, Gpu, next_power_of_2

FILL = 3  # programs per multiprocessor below which keys are split
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program: queries, keys at a time, warps, and stages of the pipeline that reads keys."""

    m: int
    n: int
    warps: int
    stages: int


def list_query_tiles(ends: np.ndarray, tokens: int) -> np.ndarray:
    """Rows [2, R] as tiles of so many tokens: int32 [2, tiles], row and first token in it, the most keys
    first."""
    starts, counts = ends
    per_row = -(-counts // tokens)
    row = np.repeat(np.arange(len(counts), dtype=np.int32), per_row)
    offset = (np.arange(len(row), dtype=np.int32) - np.repeat(np.cumsum(per_row) - per_row, per_row)).astype(
        np.int32
    ) * tokens
    order = np.argsort(-(starts[row] + offset), kind="stable")
    return np.stack((row[order], offset[order]))


def select_tile(tile_queries: int, dim: int, itemsize: int, gpu: Gpu) -> Tile:
    """Sizes for tiles of at most `tile_queries` queries, chosen by what the compiler reports of registers and
    shared memory (tests/devices/cuda/ahead.py).

    Page ids take every second stage of the pipeline, so five stages hold two tiles of keys and values, three
    hold one.
    """
    if gpu == INTERPRETER:
        return Tile(min(next_power_of_2(tile_queries, 16), 64), 128, 4, 1)
    is_large = gpu.shared_bytes >= 200 << 10  # else three quarters of a hundred KiB must do
    stages = 5 if is_large else 3
    if itemsize == 4:
        return Tile(
            16 if tile_queries <= 16 or dim > 128 else 32,
            32 if dim <= 128 else 16,
            4,
            3 if tile_queries <= 16 and is_large else 2,
        )
    if dim > 256:  # latents
        return (
            Tile(16, 32, 4, stages if is_large else 2)
            if tile_queries <= 16 or not is_large
            else Tile(64, 32, 8, stages)
        )
    if tile_queries <= 32:
        return Tile(
            next_power_of_2(tile_queries, 16), 128 if dim <= 64 else 64 if dim <= 128 else 32, 4, stages
        )
    if not is_large:
        return Tile(64, 64 if dim <= 128 else 32, 4, 3 if dim <= 128 else 2)
    return (
        Tile(128, 64 if dim <= 128 else 32, 8, stages)
        if tile_queries > 64
        else Tile(64, 64 if dim <= 128 else 32, 4, stages)
    )


def select_splits(num_programs: int, max_kv_len: int, tile: Tile, gpu: Gpu) -> int:
    """The number of splits of the keys: a power of two, so that programs fill the GPU and each of them has at
    least four tiles."""
    wanted = FILL * gpu.num_cores // max(1, num_programs)
    return 1 << max(0, min(wanted, max_kv_len // (4 * tile.n), MAX_SPLITS).bit_length() - 1)
