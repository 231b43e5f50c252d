"""Matrix products with quantized weights, and experts, on a GPU: each way that there is to compute them, as
fractions of what the GPU reaches in the same run, with its error.

    python -m bench.gpu_gemm --compile   # compiles every kernel, in several processes; nothing is measured
    python -m bench.gpu_gemm             # on a GPU; a minute behind that, to gpu.jsonl
    python -m bench.gpu_gemm --new       # only what the tables of gemm_tiles.py do not choose yet
    python -m bench.gpu_gemm --dry       # every line, tiny, in Triton's interpreter; nothing is recorded

Small steps read weights, so they are compared with the GPU's copy bandwidth; large ones with its bf16
products, which 8-bit ones may exceed. Calls are captured in a graph, and take weights, or experts, in turn
that the L2 cache does not hold together. `error` is that of the first rows, relative to a float32 product
with the dequantized weight, by norms. `first` is what the tables should have: for each scheme, the number of
rows from which a way was faster than ours at every size.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from bench.gpu import Bench
from bench.gpu_experts import CLAMPED, EXPERTS, experts, routing
from bench.gpu_turns import (
    BY_BLOCK,
    CHECKED,
    FRAGMENTS,
    PLAIN,
    Calls,
    Compiler,
    copies_of,
    label,
    measured,
    weight_of,
    with_tables,
)
from runtime.devices.cuda.interpret import use_interpreter
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme

# Llama-3.1-8B
LINEARS = {
    "qkv 6144 x 4096": (6144, 4096),
    "gate_up 28672 x 4096": (28_672, 4096),
    "down 4096 x 14336": (4096, 14_336),
}
ROWS = (1, 16, 64, 256, 4096)
NEW: list[Scheme] = [Fp8(128), PackedInt(4, 128), PackedInt(4, 128, has_zero_points=True)]
SCHEMES: list[Scheme] = [
    *NEW,
    Fp8(),
    Fp8(activations="none"),
    Int8(),
    PackedInt(4, 0, activations="token"),
    PackedInt(8, 128),
]
# of weights in fragments: the fewest and most rows, and the tables that are tried: rows, outputs and warps
TRIES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "fragments": (1, 1 << 30, {}),
    "fragments fill 4": (1, 64, {"FILL": 4}),
    "fragments 16x128x4": (1, 16, {"FRAGMENT_TILES": {1 << 30: (16, 128, 4)}}),
    "fragments 16x128x4 fill 4": (1, 16, {"FRAGMENT_TILES": {1 << 30: (16, 128, 4)}, "FILL": 4}),
    "fragments 64x64x4": (17, 64, {"FRAGMENT_TILES": {1 << 30: (64, 64, 4)}}),
    "fragments 128x128x8": (65, 1 << 30, {"FRAGMENT_TILES": {1 << 30: (128, 128, 8)}}),
}


class Way(NamedTuple):
    """A way to compute a product."""

    packed: Any
    call: Callable[[torch.Tensor, Any], torch.Tensor]  # of rows and of a packed weight
    least: int = 1  # rows
    most: int = 1 << 30


def ways(weight: Any, gpu: Any) -> dict[str, Way]:
    """The ways to multiply with a weight, by name."""
    from runtime.devices.cuda.gemm import gemm, torch_gemm
    from runtime.devices.cuda.weights import pack

    def ours(x: torch.Tensor, packed: Any) -> torch.Tensor:
        return gemm(x, packed, gpu)

    def trying(tables: dict[str, Any], x: torch.Tensor, packed: Any) -> Any:
        return with_tables(tables, partial(ours, x, packed))

    packed, other = pack(weight, frozenset()), pack(weight, FRAGMENTS)
    found = {"ours": Way(packed, partial(trying, PLAIN))}
    if packed.blocks is not None:
        found["by block"] = Way(packed, partial(trying, BY_BLOCK))
    if other.kind == "fragments4":
        for name, (least, most, tables) in TRIES.items():
            found[name] = Way(other, partial(trying, tables), least, most)
    return found | {"torch": Way(packed, lambda x, one: torch_gemm(x, one, None))}


def reference(x: torch.Tensor, weight: Any, packed: Any) -> torch.Tensor:
    """The product in float32 with what the kernels multiply: activations are quantized where they do that."""
    from runtime.devices.cuda.gemm import quantize_activations
    from runtime.layers.quantization.dequantize import dequantized

    rows = x[:CHECKED]
    if packed.inputs:
        inputs = quantize_activations(rows, packed)
        assert inputs.factors is not None
        kind = torch.float8_e4m3fn if packed.inputs == "fp8" else torch.int8
        factors = inputs.factors.repeat_interleave(packed.padded // inputs.factors.shape[1], 1)
        rows = inputs.values.view(kind).float() * factors
    return rows.float() @ dequantized(weight, torch.float32).T


def linears(bench: Bench, gpu: Any, schemes: Iterable[Scheme], names: Iterable[str]) -> dict[str, Any]:
    """Each product in all ways, and in bf16."""
    from runtime.devices.cuda.gemm import supports_torch_gemm

    figures = bench.figures("linears")
    for name in names:
        outs, ins = (128, 256) if bench.is_dry else LINEARS[name]
        plain: dict[int, dict[str, Any]] = {}  # the product in bf16, by rows
        full = [bench.randn(outs, ins) for _ in range(1 if bench.is_dry else 3)]
        for scheme in schemes:
            weight = weight_of(bench, scheme, outs, ins)
            each, copies = ways(weight, gpu), {}
            for rows in (2,) if bench.is_dry else ROWS:
                x, flops = bench.randn(rows, ins), 2.0 * rows * outs * ins
                io, line = 2.0 * rows * (ins + outs), {}
                if rows not in plain:
                    calls: Calls = [partial(torch.nn.functional.linear, x, one) for one in full]
                    plain[rows] = measured(bench, full[0].nbytes + io, flops, calls, None)
                for way, (packed, call, least, most) in each.items():
                    is_torchs = way == "torch"
                    if not least <= rows <= most or (
                        is_torchs and not supports_torch_gemm(packed, rows, torch.bfloat16, gpu)
                    ):
                        continue
                    if packed.kind not in copies:
                        copies[packed.kind] = copies_of(bench, packed)
                    wanted = None if isinstance(bench, Compiler) else reference(x, weight, packed)
                    calls = [partial(call, x, one) for one in copies[packed.kind]]
                    size = packed.weight.nbytes + io
                    line[way] = measured(bench, size, flops, calls, wanted)
                figures[f"{label(scheme)} {name}, {rows} rows"] = line | {"bf16": plain[rows]}
    return figures


def first(lines: dict[str, Any], schemes: Iterable[Scheme]) -> dict[str, int | None]:
    """scheme and way -> rows from which it is faster than ours; None: ours was faster at the most rows
    measured."""
    found: dict[str, int | None] = {}
    for scheme in schemes:
        for way in ("torch", "by block", "fragments"):
            least = None
            for rows in reversed(ROWS):
                names = [f"{label(scheme)} {name}, {rows} rows" for name in LINEARS]
                each = [lines[name] for name in names if way in lines.get(name, {})]
                if not each or not all(
                    line[way].get("us", torch.inf) < line["ours"].get("us", 0.0) for line in each
                ):
                    break
                least = rows
            found[f"{label(scheme)}, {way}"] = least
    return found


def compile_one(section: str, name: str, scheme: Scheme | None) -> None:
    """The kernels of one product, or layer of experts, in all numbers of rows."""
    from runtime.devices.cuda.kernels.launch import gpu_of

    bench, schemes = Compiler(), [] if scheme is None else [scheme]
    compute = linears if section == "linears" else experts
    compute(bench, gpu_of(bench.torch_device), schemes, [name])


def compile_all(schemes: Iterable[Scheme], layers: Iterable[str]) -> None:
    """Compiles in as many processes as there are cores."""
    tasks: list[tuple[str, str, Scheme | None]] = [
        ("linears", name, scheme) for scheme in schemes for name in LINEARS
    ]
    for name in layers:
        tasks += [("experts", name, scheme) for scheme in ((None,) if name == CLAMPED else schemes)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*tasks, strict=True)))


def main() -> None:
    """Compiles, or prints and records the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--new", action="store_true")
    args = parser.parse_args()
    if args.dry and args.compile:
        return
    if args.dry:
        use_interpreter()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    schemes = NEW if args.new else SCHEMES
    layers = [name for name in EXPERTS if not args.new or "Mixtral" not in name]
    if args.compile:
        compile_all(schemes, layers)
        return
    from runtime.devices.cuda.kernels.launch import gpu_of

    bench = Bench(args.dry)
    gpu = gpu_of(bench.torch_device)
    lines = linears(bench, gpu, schemes, list(LINEARS)[:1] if args.dry else LINEARS)
    bench.lines.write("products", "first", first(lines, schemes))
    experts(bench, gpu, schemes, layers)
    if not args.new:
        routing(bench)


if __name__ == "__main__":
    main()
