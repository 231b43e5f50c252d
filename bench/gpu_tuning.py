"""What the table of tiles in runtime/devices/cuda/kernels/gemv.py should hold: products of few rows with
weights in full, by cuBLAS and by the kernel for few rows in tiles of several sizes.

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

from bench.gpu import Bench
from runtime.devices.cuda.interpret import use_interpreter

# Llama-3.1-8B: outputs and inputs
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
ROWS = (1, 2, 4, 8)
# tiles of the kernel for few rows that are tried: outputs, inputs at a time, warps
TILES = ((8, 512, 4), (4, 512, 4), (4, 1024, 4), (8, 256, 4), (16, 256, 4), (16, 512, 8), (8, 1024, 8))
COPIES_BYTES = 400 << 20  # of weights that are read in turn


def product_of(name: str, gpu: Any) -> Callable[[Any, Any], Any]:
    """The product of few rows that a layer needs: with gates, or without."""
    from runtime.devices.cuda.kernels.gemv import gemv

    is_gated = name == "gate_up"
    return lambda x, weight: gemv(x, weight, None, gpu, is_gated=is_gated)


def cublas_of(name: str) -> Callable[[Any, Any], Any]:
    """The product that a layer needs by cuBLAS, where there are gates with a launch of their own."""
    from runtime.devices.cuda.kernels.activation import act_and_mul

    def gated(x: Any, weight: Any) -> Any:
        return act_and_mul(torch.nn.functional.linear(x, weight), "silu")

    return gated if name == "gate_up" else torch.nn.functional.linear


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
    """Microseconds of a product, and the share of the bandwidth: cuBLAS's, and ours by tile."""
    from runtime.devices.cuda.kernels import gemv as gemv_module

    outs, ins = (64, 128) if bench.is_dry else shape
    num_bytes = outs * ins * 2
    copies = 1 if bench.is_dry else -(-COPIES_BYTES // num_bytes)
    weights = [bench.randn(outs, ins) for _ in range(copies)]
    x = bench.randn(rows, ins)

    def timed(call: Callable[[Any, Any], Any]) -> dict[str, float]:
        seconds = bench.seconds(lambda: [call(x, one) for one in weights], is_captured=True) / copies
        return {
            "us": round(seconds * 1e6, 2),
            "of_bandwidth": round(num_bytes / seconds / bench.bandwidth, 3),
        }

    found: dict[str, Any] = {"cublas": timed(cublas_of(name))}
    for tile in TILES:
        with set_table(gemv_module, TILES={max(ROWS): tile}):
            key = "x".join(map(str, tile))
            try:
                found[key] = timed(product_of(name, gpu))
            # a tile that takes more memory than there is tells something, too
            except Exception as error:
                found[key] = {"error": f"{type(error).__name__}: {str(error)[:80]}"}
    return found


def compile_one(name: str, rows: int) -> None:
    """Launches every variant of a product once: Triton keeps what it compiles on disk."""
    from runtime.devices.cuda.kernels import gemv as gemv_module
    from runtime.devices.cuda.kernels.launch import gpu_of

    torch_device = torch.device("cuda")
    outs, ins = LINEARS[name]
    weight = torch.zeros(outs, ins, dtype=torch.bfloat16, device=torch_device)
    x = torch.zeros(rows, ins, dtype=torch.bfloat16, device=torch_device)
    for tile in TILES:
        with set_table(gemv_module, TILES={max(ROWS): tile}):
            try:
                product_of(name, gpu_of(torch_device))(x, weight)
            except Exception as error:
                print(name, rows, tile, error, file=sys.stderr)


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
                pool.map(compile_one, *zip(*((name, rows) for name in LINEARS for rows in ROWS), strict=True))
            )
        return
    from runtime.devices.cuda.kernels.launch import gpu_of

    bench = Bench(args.dry)
    gpu = gpu_of(bench.torch_device)
    figures = bench.figures("products of few rows")
    for name, shape in {"o": LINEARS["o"]}.items() if args.dry else LINEARS.items():
        for rows in (1,) if args.dry else ROWS:
            figures[f"{name}, {rows} rows"] = products(bench, gpu, name, shape, rows)


if __name__ == "__main__":
    main()
