"""Which kernels multiply what, and in which tiles: data that bench/gpu_gemm.py measures on a GPU.

Until it has, these figures are reasoned. Few rows are bound by the reading of weights, which many programs
that each read a part do best (our kernel with splits); from some dozens of rows on, torch's own products of
8-bit numbers (CUTLASS, cuBLASLt) have pipelines for each GPU that Triton's compiler does not find.
"""

from dataclasses import dataclass

from runtime.devices.cuda.kernels.launch import INTERPRETER, Gpu, next_power_of_2

# rows from which torch's own product is taken; else Triton's
TORCH_FROM = {"fp8": 33, "fp8_static": 33, "int8": 65, "int8_static": 65}
# choices of experts up to which each is a tile of its own: the kernels that line them up cost more than is
# shared
SINGLE_SLOTS = 16
SPLIT_ROWS = 64  # rows up to which the inputs of a product may be split
FILL = 2  # programs for each multiprocessor that splits are to reach
SPLIT_K_BLOCKS = 4  # pieces of inputs that each of them has at least
# of --fp8-gemm-backend: by_rows is TORCH_FROM, cutlass torch's product
NAMES = ("by_rows", "triton", "cutlass")


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program: rows, outputs, inputs at a time, warps, and stages of the pipeline that reads."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class TileBytes:
    """What the bytes of a tile depend on."""

    input_bytes: float
    weight_bytes: float
    k_block: int  # inputs at a time at most
    is_fixed: bool  # just these
    is_gated: bool
    is_wide: bool  # float32 products
    is_grouped: bool = False  # sums of a group beside sums of all: twice the registers


#       rows up to: rows, outputs, inputs, warps of a tile
TILES = {16: (16, 64, 128, 4), 32: (32, 64, 128, 4), 64: (64, 128, 128, 4), 1 << 30: (128, 128, 64, 8)}
WIDE = {16: (16, 32, 64, 4), 1 << 30: (64, 64, 32, 4)}  # of float32 numbers, each product of which is three


def rows_of(rows: int, gpu: Gpu) -> int:
    """How many rows of an expert a tile has, when it is expected to have `rows`."""
    return next_power_of_2(min(rows, 128 if gpu != INTERPRETER else 16), 16)


def select_tile(rows: int, outs: int, tile_bytes: TileBytes, gpu: Gpu) -> Tile:
    """For a tile that is to have `rows` rows at most."""
    if gpu == INTERPRETER:
        return Tile(
            min(next_power_of_2(rows, 16), 64), min(next_power_of_2(outs, 16), 128), tile_bytes.k_block, 4, 1
        )
    table = WIDE if tile_bytes.is_wide else TILES
    m, n, k, warps = next(size for most, size in table.items() if rows <= most)
    if tile_bytes.is_gated:
        n //= 2
    if tile_bytes.is_grouped and m >= 64:
        warps = 8
        if m > 64 and gpu.shared_bytes < 200 << 10:  # GPUs whose sums lie in registers with all else
            n //= 2
    if m >= 64 and tile_bytes.input_bytes == 1 and tile_bytes.weight_bytes == 1 and not tile_bytes.is_wide:
        k = 128
    k = tile_bytes.k_block if tile_bytes.is_fixed else min(k, tile_bytes.k_block)
    per_stage = k * (m * tile_bytes.input_bytes + n * (1 + tile_bytes.is_gated) * tile_bytes.weight_bytes)
    unpacked = (
        2 * n * (1 + tile_bytes.is_gated) * k if tile_bytes.weight_bytes < tile_bytes.input_bytes else 0
    )
    room = min(gpu.shared_bytes, 228 << 10) - (2 << 10) - unpacked
    return Tile(m, n, k, warps, max(2, min(4, int(room / per_stage))))


def select_splits(programs: int, rows: int, num_k_blocks: int, gpu: Gpu) -> int:
    """Into how many parts the inputs are split: as many as fill the GPU."""
    if rows > SPLIT_ROWS or programs >= gpu.num_cores:
        return 1
    return max(1, min(FILL * gpu.num_cores // programs, num_k_blocks // SPLIT_K_BLOCKS, 16))
