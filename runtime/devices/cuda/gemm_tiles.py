"""Which kernel computes a matrix product, and in which tiles: data that bench/gpu_gemm.py measures on a GPU.

Until it has, these figures are estimates. With few rows a product is bound by reading weights, which many
programs that each read a part do best (the Triton kernel with splits); from some dozens of rows on, torch's
own products of 8-bit numbers (CUTLASS, cuBLASLt) have pipelines for each GPU that Triton's compiler does not
find.
"""

from dataclasses import dataclass

from runtime.devices.cuda.kernels.launch import INTERPRETER, Gpu, next_power_of_2

# scheme -> number of rows from which torch's own product is taken instead of Triton's; that of "fp8_block"
# was measured on an H100, the others are reasoned
TORCH_FROM = {"fp8": 33, "fp8_static": 33, "fp8_block": 64, "int8": 65, "int8_static": 65}
# whether sums of 8-bit floats with scales of blocks are kept in one multiplication a block
# (kernels/gemm.py: BLOCKED): on an H100 faster with any number of rows
SUMS_BY_BLOCK = True
# schemes whose 4-bit weights are packed in fragments (kernels/fragments.py), where their groups allow it: on
# an H100 twice as fast with any number of rows. MXFP4 always is
FRAGMENT_SCHEMES = frozenset({"int4_weight"})
# slots of an expert on average from which on torch's grouped product computes experts in 16 bits; None: at no
# number, as on an H100, where ours was faster with any
TORCH_GROUPED_FROM: int | None = None
# MoE slots up to which each is a tile of its own: the kernels that align them would cost more than sharing
# weights saves
SINGLE_SLOTS = 16
SPLIT_ROWS = 64  # the most rows of a product whose inputs may be split
FILL = 2  # programs per multiprocessor that splits aim at
SPLIT_K_BLOCKS = 4  # the fewest blocks of inputs of a split
# values of --fp8-gemm-backend: by_rows follows TORCH_FROM, cutlass is torch's product
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
    """What the size of a tile in bytes depends on."""

    input_bytes: float
    weight_bytes: float
    k_block: int  # the most inputs at a time
    is_fixed: bool  # whether it is exactly k_block inputs
    is_gated: bool
    is_wide: bool  # float32 products
    is_grouped: bool = False  # a group's sums next to the total: twice the registers
    is_fragments: bool = False  # weights are in fragments


#       rows up to: rows, outputs, inputs, warps of a tile
TILES = {16: (16, 64, 128, 4), 32: (32, 64, 128, 4), 64: (64, 128, 128, 4), 1 << 30: (128, 128, 64, 8)}
# of weights in fragments: rows, outputs (of each half where they are gated), warps
FRAGMENT_TILES = {
    16: (16, 64, 4),
    32: (32, 64, 4),
    64: (64, 128, 8),
    128: (128, 128, 8),
    1 << 30: (256, 128, 8),
}
WIDE = {16: (16, 32, 64, 4), 1 << 30: (64, 64, 32, 4)}  # of float32 numbers, each product of which is three


def rows_of(rows: int, gpu: Gpu) -> int:
    """The number of rows of a tile of experts that are expected to have `rows` rows each."""
    return next_power_of_2(min(rows, 128 if gpu != INTERPRETER else 16), 16)


def select_tile(rows: int, outs: int, tile_bytes: TileBytes, gpu: Gpu) -> Tile:
    """Sizes of a program whose tile has at most `rows` rows."""
    if gpu == INTERPRETER:
        return Tile(
            min(next_power_of_2(rows, 16), 64), min(next_power_of_2(outs, 16), 128), tile_bytes.k_block, 4, 1
        )
    if tile_bytes.is_fragments:
        return _fragment_tile(rows, tile_bytes, gpu)
    table = WIDE if tile_bytes.is_wide else TILES
    m, n, k, warps = next(size for most, size in table.items() if rows <= most)
    if tile_bytes.is_gated:
        n //= 2
    if tile_bytes.is_grouped and m >= 64:
        warps = 8
        if m > 64 and gpu.shared_bytes < 200 << 10:  # GPUs that keep sums in registers
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


def _fragment_tile(rows: int, tile_bytes: TileBytes, gpu: Gpu) -> Tile:
    """Sizes of a program with weights in fragments. Products of groups of warps are of 64 outputs."""
    m, n, warps = next(size for most, size in FRAGMENT_TILES.items() if rows <= most)
    if tile_bytes.is_wide:
        n = 64
    if tile_bytes.is_wide or tile_bytes.is_gated or gpu.shared_bytes < 200 << 10:
        m = min(m, 128)
    halves, k = 1 + tile_bytes.is_gated, tile_bytes.k_block
    per_stage = k * (m * tile_bytes.input_bytes + n * halves * tile_bytes.weight_bytes) + 4 * n * halves
    room = min(gpu.shared_bytes, 228 << 10) - (2 << 10)
    return Tile(m, n, k, warps, max(2, min(6 if m <= 32 else 4, int(room / per_stage))))


def select_splits(programs: int, rows: int, num_k_blocks: int, gpu: Gpu) -> int:
    """The number of splits of the inputs: as many as fill the GPU. `num_k_blocks`: blocks of inputs."""
    if rows > SPLIT_ROWS or programs >= gpu.num_cores:
        return 1
    return max(1, min(FILL * gpu.num_cores // programs, num_k_blocks // SPLIT_K_BLOCKS, 16))
