"""What the tables of the cuda device should hold: products of few rows with weights in full by cuBLAS and by
our kernel in tiles of several sizes, and attention of decodes by how many programs share a GPU.

    python -m bench.gpu_tuning --compile   # compiles every variant, in several processes; nothing is measured
    python -m bench.gpu_tuning             # on a GPU; half a minute behind that, to gpu.jsonl
    python -m bench.gpu_tuning --dry       # every line, tiny, without a GPU

Weights are read from several copies in turn, because one alone would stay in the L2 cache.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

from bench.gpu import SCORES, Bench, equal_rows
from runtime.devices.cuda.interpret import use_interpreter

# Llama-3.1-8B: outputs and inputs
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
# rows -> tiles that are tried: rows, outputs, inputs at a time, warps
TILES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    1: ((16, 64, 128, 4), (16, 32, 256, 4), (16, 128, 128, 4), (16, 64, 256, 8)),
    8: ((16, 64, 128, 4), (16, 32, 256, 4), (16, 128, 128, 4), (16, 64, 256, 8)),
    64: ((64, 128, 128, 4), (64, 64, 128, 4), (64, 64, 256, 4), (64, 128, 64, 4)),
}
FILLS = (1, 2, 4)  # programs per multiprocessor that splits of inputs aim at
COPIES_BYTES = 400 << 20  # of weights that are read in turn
ATTENTION = ((1, 32_768), (1, 2048), (8, 2048), (16, 8192), (64, 2048), (256, 1024))
ATTENTION_FILLS = (3, 6, 8, 12, 16)


@contextmanager
def set_table(module: Any, **values: Any) -> Iterator[None]:
    """Other values of a module's tables, for as long as the context is open."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def products(bench: Bench, gpu: Any, name: str, shape: tuple[int, int], rows: int) -> dict[str, Any]:
    """Microseconds of a product, and the share of the bandwidth: cuBLAS's, and ours by tile and fill."""
    from runtime.devices.cuda import gemm_tiles
    from runtime.devices.cuda.gemm import gemm
    from runtime.devices.cuda.kernels.gemv import gemv
    from runtime.devices.cuda.options import MOST_GEMV_ROWS
    from runtime.devices.cuda.weights import pack_dense

    outs, ins = (64, 128) if bench.is_dry else shape
    num_bytes = outs * ins * 2
    copies = 1 if bench.is_dry else -(-COPIES_BYTES // num_bytes)
    weights = [bench.randn(outs, ins) for _ in range(copies)]
    x = bench.randn(rows, ins)

    def timed(call: Callable[[Any], Any], each: list[Any]) -> dict[str, float]:
        seconds = bench.seconds(lambda: [call(one) for one in each], is_captured=True) / copies
        return {
            "us": round(seconds * 1e6, 2),
            "of_bandwidth": round(num_bytes / seconds / bench.bandwidth, 3),
        }

    found: dict[str, Any] = {"cublas": timed(lambda one: torch.nn.functional.linear(x, one), weights)}
    if rows <= MOST_GEMV_ROWS:
        found["gemv"] = timed(lambda one: gemv(x, one, None, gpu), weights)
    packed = [pack_dense(one.unsqueeze(0)) for one in weights]
    for tile in TILES[rows]:
        for fill in FILLS:
            with set_table(gemm_tiles, TILES={1 << 30: tile}, FILL=fill):
                key = f"{'x'.join(map(str, tile))} fill {fill}"
                try:
                    found[key] = timed(lambda one: gemm(x, one, gpu), packed)
                # a tile that takes more memory than there is tells something, too
                except Exception as error:
                    found[key] = {"error": f"{type(error).__name__}: {str(error)[:80]}"}
    return found


def best(found: dict[str, Any]) -> dict[str, Any]:
    """cuBLAS's time, that of the kernel for few rows, and our three best tiles."""
    apart = {name: one for name, one in found.items() if name in ("cublas", "gemv")}
    ours = {name: one for name, one in found.items() if name not in apart and "us" in one}
    return apart | dict(sorted(ours.items(), key=lambda one: one[1]["us"])[:3])


def compile_one(name: str, rows: int) -> None:
    """Launches every variant of a product once: Triton keeps what it compiles on disk."""
    from runtime.devices.cuda import gemm_tiles
    from runtime.devices.cuda.gemm import gemm
    from runtime.devices.cuda.kernels.launch import gpu_of
    from runtime.devices.cuda.weights import pack_dense

    torch_device = torch.device("cuda")
    outs, ins = LINEARS[name]
    packed = pack_dense(torch.zeros(1, outs, ins, dtype=torch.bfloat16, device=torch_device))
    x = torch.zeros(rows, ins, dtype=torch.bfloat16, device=torch_device)
    for tile in TILES[rows]:
        for fill in FILLS:
            with set_table(gemm_tiles, TILES={1 << 30: tile}, FILL=fill):
                try:
                    gemm(x, packed, gpu_of(torch_device))
                except Exception as error:
                    print(name, rows, tile, error, file=sys.stderr)


def attention(bench: Bench, gpu: Any, rows: int, length: int) -> dict[str, Any]:
    """Microseconds of decodes, and the share of the bandwidth, by programs per multiprocessor that splits of
    keys aim at."""
    from runtime.devices.cuda import attention_tiles as module
    from runtime.devices.cuda.ops import CudaOps

    ops, found = CudaOps(torch.bfloat16, gpu), {}
    plan_of, caches = equal_rows(bench, rows, length - 1, 1)
    plan, q = plan_of(ops), bench.randn(rows, 32, 128)
    size = rows * length * caches[0].shape[1] * caches[0].shape[2] * 4
    for fill in ATTENTION_FILLS:
        with set_table(module, FILL=fill):
            found[f"fill {fill}"] = bench.by_bytes(
                size, lambda: ops.attention(q, *caches, plan, SCORES), is_captured=True
            )
    return found


def main() -> None:
    """Compiles, or measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.dry:
        use_interpreter()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    if args.compile:
        pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
        with pool:
            list(
                pool.map(
                    compile_one, *zip(*((name, rows) for name in LINEARS for rows in TILES), strict=True)
                )
            )
        return
    from runtime.devices.cuda.kernels.launch import gpu_of

    bench = Bench(args.dry)
    gpu = gpu_of(bench.torch_device)
    figures = bench.figures("attention by fill")
    for rows, length in ((2, 100),) if args.dry else ATTENTION:
        figures[f"{rows} x {length}"] = attention(bench, gpu, rows, length)
    figures = bench.figures("products of few rows")
    for name, shape in {"o": LINEARS["o"]}.items() if args.dry else LINEARS.items():
        for rows in (1,) if args.dry else TILES:
            figures[f"{name}, {rows} rows"] = best(products(bench, gpu, name, shape, rows))


if __name__ == "__main__":
    main()
