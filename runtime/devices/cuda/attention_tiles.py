"""How attention is cut into programs: sizes of tiles, splits of keys, and lists of tiles, by the facts of the
GPU."""

from dataclasses import dataclass, replace

import numpy as np

from runtime.devices.cuda.kernels.launch import INTERPRETER, Gpu, next_power_of_2

FILL = 3  # programs per multiprocessor below which keys are split
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class Walk:
    """How a program walks keys, see kernels/attention_keys.py: by descriptors (TMA), which a GPU of compute
    capability 9 has; with scores scaled in the exponent; in steps of so many tiles. With `groups` warps have
    roles, and so many groups of them attend: each for 64 queries (kernels/attention_roles.py), or of latents
    for half of each (kernels/latent_roles.py)."""

    tma: bool = False
    folds: bool = False
    together: int = 1
    groups: int = 0
    persists: bool = False  # no more programs than multiprocessors, each of which takes tile after tile

    @property
    def constants(self) -> dict[str, int]:
        """The constants of paged_attention_kernel that say so."""
        return {"TMA": self.tma, "FOLDS": self.folds, "TOGETHER": self.together}


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program: queries, keys at a time, warps, and stages of the pipeline that reads keys; and how
    many tiles of keys a split has at least. Keys are split where there are fewer programs than `fill` for
    each multiprocessor."""

    m: int
    n: int
    warps: int
    stages: int
    walk: Walk = Walk()
    least: int = 4
    fill: int = FILL


# Tiles of plain attention on Hopper by name, which bench.gpu_attention measures beside what ran there first:
# no window, cap, bias or 8 bits, heads of 128 or latents of 512, pages of a multiple of 64 tokens.
PROMPTS = {
    "scaled in the exponent": Tile(128, 64, 8, 5, Walk(folds=True)),
    "tma": Tile(128, 64, 8, 3, Walk(tma=True, folds=True)),
    "tma, 5 stages": Tile(128, 64, 8, 5, Walk(tma=True, folds=True)),
    "tma, steps of 128": Tile(128, 64, 8, 3, Walk(tma=True, folds=True, together=2)),
    "tma, 64 queries": Tile(64, 64, 4, 3, Walk(tma=True, folds=True)),
    "64 queries": Tile(64, 64, 4, 5, Walk(folds=True)),
    "roles, 2 groups": Tile(128, 64, 4, 4, Walk(tma=True, folds=True, groups=2)),
    "roles, 3 groups": Tile(192, 64, 4, 5, Walk(tma=True, folds=True, groups=3)),
    "roles, 2 groups, persistent": Tile(128, 64, 4, 5, Walk(tma=True, folds=True, groups=2, persists=True)),
    "roles, 3 groups, persistent": Tile(192, 64, 4, 5, Walk(tma=True, folds=True, groups=3, persists=True)),
}
DECODES = {
    "tma, 3 stages": Tile(16, 64, 4, 3, Walk(tma=True, folds=True)),
    "tma, 5 stages": Tile(16, 64, 4, 5, Walk(tma=True, folds=True)),
    "tma, 7 stages": Tile(16, 64, 4, 7, Walk(tma=True, folds=True)),
    "tma, steps of 128": Tile(16, 64, 4, 3, Walk(tma=True, folds=True, together=2)),
    "splits of 1 tile": Tile(16, 64, 4, 5, least=1),
    "tma, splits of 2 tiles": Tile(16, 64, 4, 5, Walk(tma=True, folds=True), least=2),
    "tma, splits of 1 tile": Tile(16, 64, 4, 5, Walk(tma=True, folds=True), least=1),
}
# a program takes all of a multiprocessor's shared memory, so that one for each is a full turn
ROLES = Tile(64, 64, 4, 2, Walk(tma=True, folds=True, groups=2), least=2, fill=1)
FEW_LATENTS = {  # up to 16 queries
    "tma": Tile(16, 32, 4, 5, Walk(tma=True, folds=True)),
    "tma, 64 keys": Tile(16, 64, 4, 3, Walk(tma=True, folds=True)),
    "tma, 64 keys, 5 stages": Tile(16, 64, 4, 5, Walk(tma=True, folds=True)),
    "tma, splits of 1 tile": Tile(16, 32, 4, 5, Walk(tma=True, folds=True), least=1),
    "tma, 64 keys, splits of 1 tile": Tile(16, 64, 4, 3, Walk(tma=True, folds=True), least=1),
    "roles": ROLES,
    "roles, 2 programs": replace(ROLES, fill=2),
}
LATENTS = {
    "tma": Tile(64, 32, 8, 3, Walk(tma=True, folds=True)),
    "tma, 64 keys": Tile(64, 64, 8, 2, Walk(tma=True, folds=True)),
    "tma, 64 keys, splits of 1 tile": Tile(64, 64, 8, 2, Walk(tma=True, folds=True), least=1),
    "roles": ROLES,
    "roles, 2 programs": replace(ROLES, fill=2),
}
# which of them is chosen; None: what ran on a card before they were written
CHOSEN: dict[str, Tile | None] = {"prompt": None, "decode": None, "few latents": None, "latents": None}


def kind_of(tile_queries: int, dim: int) -> str:
    """The kind of plain attention, a key of CHOSEN; "" for none of them."""
    if dim == 128:
        return "decode" if tile_queries <= 16 else "prompt" if tile_queries > 64 else ""
    if dim == 512:
        return "few latents" if tile_queries <= 16 else "latents"
    return ""


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


def select_tile(tile_queries: int, dim: int, itemsize: int, gpu: Gpu, *, is_plain: bool = False) -> Tile:
    """Sizes for tiles of at most `tile_queries` queries, chosen by what the compiler reports of registers and
    shared memory (tests/devices/cuda/ahead.py). `is_plain`: no window, cap, bias or 8 bits, and pages of a
    multiple of 64 tokens; see CHOSEN.

    Page ids take every second stage of the pipeline, so five stages hold two tiles of keys and values, three
    hold one.
    """
    chosen = CHOSEN.get(kind_of(tile_queries, dim)) if is_plain and itemsize == 2 else None
    if chosen is not None and (gpu.is_hopper or gpu == INTERPRETER):
        return chosen
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
    least so many tiles as `tile` says."""
    wanted = tile.fill * gpu.num_cores // max(1, num_programs)
    return 1 << max(0, min(wanted, max_kv_len // (tile.least * tile.n), MAX_SPLITS).bit_length() - 1)
