"""Which kernels multiply what, and in which tiles: data that bench/gpu_gemm.py measures on a card.

Until it has, these figures are reasoned. Few rows are bound by the reading of weights, which many programs
that each read a part do best (our kernel with splits); from some dozens of rows on, torch's own products of
8-bit numbers (CUTLASS, cuBLASLt) have pipelines for each card that Triton's compiler does not find.
"""

from dataclasses import dataclass

from runtime.devices.cuda.kernels.launch import INTERPRETER, Card, power

# rows from which torch's own product is taken; else Triton's
TORCH_FROM = {"fp8": 33, "fp8_static": 33, "int8": 65, "int8_static": 65}
# choices of experts up to which each is a tile of its own: the kernels that line them up cost more than is
# shared
SINGLE_SLOTS = 16
SPLIT_ROWS = 64  # rows up to which the inputs of a product may be split
FILL = 2  # programs for each multiprocessor that splits are to reach
SPLIT_PIECES = 4  # pieces of inputs that each of them has at least
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
class Numbers:
    """What the bytes of a tile depend on."""

    input_bytes: float
    weight_bytes: float
    piece: int  # inputs at a time at most
    is_fixed: bool  # just these
    is_gated: bool
    is_wide: bool  # float32 products
    is_grouped: bool = False  # sums of a group beside sums of all: twice the registers


#       rows up to: rows, outputs, inputs, warps of a tile
TILES = {16: (16, 64, 128, 4), 32: (32, 64, 128, 4), 64: (64, 128, 128, 4), 1 << 30: (128, 128, 64, 8)}
WIDE = {16: (16, 32, 64, 4), 1 << 30: (64, 64, 32, 4)}  # of float32 numbers, each product of which is three


def rows_of(rows: int, card: Card) -> int:
    """How many rows of an expert a tile has, when it is expected to have `rows`."""
    return power(min(rows, 128 if card != INTERPRETER else 16), 16)


def choose_tile(rows: int, outs: int, numbers: Numbers, card: Card) -> Tile:
    """For a tile that is to have `rows` rows at most."""
    if card == INTERPRETER:
        return Tile(min(power(rows, 16), 64), min(power(outs, 16), 128), numbers.piece, 4, 1)
    table = WIDE if numbers.is_wide else TILES
    m, n, k, warps = next(size for most, size in table.items() if rows <= most)
    if numbers.is_gated:
        n //= 2
    if numbers.is_grouped and m >= 64:
        warps = 8
        if m > 64 and card.shared_bytes < 200 << 10:  # cards whose sums lie in registers with all else
            n //= 2
    if m >= 64 and numbers.input_bytes == 1 and numbers.weight_bytes == 1 and not numbers.is_wide:
        k = 128
    k = numbers.piece if numbers.is_fixed else min(k, numbers.piece)
    per_stage = k * (m * numbers.input_bytes + n * (1 + numbers.is_gated) * numbers.weight_bytes)
    unpacked = 2 * n * (1 + numbers.is_gated) * k if numbers.weight_bytes < numbers.input_bytes else 0
    room = min(card.shared_bytes, 228 << 10) - (2 << 10) - unpacked
    return Tile(m, n, k, warps, max(2, min(4, int(room / per_stage))))


def choose_splits(programs: int, rows: int, pieces: int, card: Card) -> int:
    """Into how many parts the inputs are split: as many as fill the card."""
    if rows > SPLIT_ROWS or programs >= card.num_cores:
        return 1
    return max(1, min(FILL * card.num_cores // programs, pieces // SPLIT_PIECES, 16))
