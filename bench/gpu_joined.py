"""Launches that do the work of two, beside the two: what `--kernel-fusion all` joins, at the sizes of
Llama-3.1-8B, Qwen3-30B-A3B and DeepSeek-V3, in graphs.

    python -m bench.gpu_joined          # on a GPU; half a minute, to gpu.jsonl
    python -m bench.gpu_joined --dry    # every line, tiny, in Triton's interpreter

Weights are taken in turn that the L2 cache does not hold together. `apart` is what `safe` launches.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu import Bench
from bench.gpu_turns import weight_of
from runtime.devices.cuda.interpret import use_interpreter
from runtime.devices.operands import NormInputs
from runtime.models.config.moe_config import Routing
from runtime.models.config.quantization_schemes import Fp8, Int8, Scheme

ROWS = (1, 4, 8, 16)
GATES = {"gate of Llama-3.1-8B": (28_672, 4096), "gate of Qwen3-30B-A3B's size": (12_288, 2048)}
ROUTERS = {"router of Qwen3-30B-A3B": (128, 2048), "router of DeepSeek-V3": (256, 7168)}
ROUTINGS = {
    "routing of Qwen3-30B-A3B": (128, Routing(top_k=8, normalizes=True)),
    "routing of DeepSeek-V3": (256, Routing(top_k=8, score="sigmoid", num_groups=8, top_groups=4)),
}
SCHEMES: dict[str, Scheme] = {"o of Llama-3.1-8B in fp8": Fp8(), "o of Llama-3.1-8B in int8": Int8()}
COPIES_BYTES = 200 << 20  # of weights that are taken in turn


def in_turn(calls: list[Callable[[], Any]]) -> None:
    """Calls all of them."""
    for call in calls:
        call()


def both(bench: Bench, ways: dict[str, list[Callable[[], Any]]]) -> dict[str, float]:
    """Microseconds of a call of each way, in a graph."""
    return {
        way: round(bench.seconds(partial(in_turn, calls), is_captured=True) / len(calls) * 1e6, 1)
        for way, calls in ways.items()
    }


def copies(bench: Bench, outs: int, ins: int) -> list[torch.Tensor]:
    """Weights in full."""
    count = 1 if bench.is_dry else max(2, min(8, COPIES_BYTES // (2 * outs * ins)))
    return [bench.randn(outs, ins) for _ in range(count)]


def inputs_of(bench: Bench, rows: int, ins: int) -> NormInputs:
    """Rows and what they are added to."""
    return NormInputs(bench.randn(rows, ins), bench.randn(rows, ins), bench.randn(ins), 1e-6)


def norms(bench: Bench, ops: Any, figures: dict[str, Any]) -> None:
    """Norms within the products behind them, of gates and of routers."""
    from runtime.devices.cuda.gemm import gated_product

    def gate_apart(inputs: NormInputs, weight: torch.Tensor) -> None:
        gated_product(ops.add_rms_norm(*inputs, None)[0], weight, ops.ops.gpu)

    def router_apart(inputs: NormInputs, weight: torch.Tensor) -> None:
        # the cpu has no product of 16-bit numbers whose sums have 32
        packed = weight.float() if bench.is_dry else weight
        ops.router_logits(ops.add_rms_norm(*inputs, None)[0], packed)

    for sizes, joined, apart in (
        (GATES, partial(ops.gated_product_of_norm, kind="silu"), gate_apart),
        (ROUTERS, ops.router_logits_of_norm, router_apart),
    ):
        for name, size in sizes.items():
            outs, ins = (64, 48) if bench.is_dry else size
            weights = copies(bench, outs, ins)
            for rows in (2,) if bench.is_dry else ROWS:
                inputs = inputs_of(bench, rows, ins)
                ways = {"joined": joined, "apart": apart}
                figures[f"{name}: {rows}"] = both(
                    bench,
                    {way: [partial(call, inputs, one) for one in weights] for way, call in ways.items()},
                )


def routings(bench: Bench, gpu: Any, figures: dict[str, Any]) -> None:
    """Slots aligned at the end of the routing."""
    from runtime.devices.cuda.moe import CudaExperts, route_counter

    counter = route_counter(bench.torch_device, are_all_here=True, fusion="all")
    for name, (num_experts, routing) in ROUTINGS.items():
        for rows in (3,) if bench.is_dry else ROWS[1:]:
            logits = torch.randn(rows, 16 if bench.is_dry else num_experts, device=bench.torch_device)

            def call(experts: Any, logits: torch.Tensor, routing: Routing) -> None:
                ids, _ = experts.route(logits, None, routing)
                experts._tiles(ids, logits.shape[1])

            given = {"joined": CudaExperts(gpu, "all", counter=counter), "apart": CudaExperts(gpu, "all")}
            figures[f"{name}: {rows}"] = both(
                bench, {way: [partial(call, one, logits, routing)] for way, one in given.items()}
            )


def quantized(bench: Bench, gpu: Any, figures: dict[str, Any]) -> None:
    """Rows in 8 bits that the product makes itself."""
    from runtime.devices.cuda import gemm as products
    from runtime.devices.cuda.weights import pack

    counters = products.split_counters(gpu, bench.torch_device)
    side = 128 if bench.is_dry else 4096
    for name, scheme in SCHEMES.items():
        weights = [pack(weight_of(bench, scheme, side, side)) for _ in range(1 if bench.is_dry else 6)]
        for rows in (2,) if bench.is_dry else ROWS[:2]:
            x = bench.randn(rows, side)

            def apart(x: torch.Tensor, packed: Any) -> None:
                products.gemm(x, packed, gpu, None, products.quantize_activations(x, packed), counters)

            def joined(x: torch.Tensor, packed: Any) -> None:
                products.gemm(x, packed, gpu, counters=counters)

            ways = {"joined": joined, "apart": apart}
            figures[f"{name}: {rows}"] = both(
                bench, {way: [partial(call, x, packed) for packed in weights] for way, call in ways.items()}
            )


def main() -> None:
    """Measures all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        use_interpreter()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    from runtime.devices.cuda.fused import CudaFusedOps
    from runtime.devices.cuda.kernels.launch import gpu_of
    from runtime.devices.cuda.ops import CudaOps

    bench = Bench(args.dry)
    figures, gpu = bench.figures("joined"), gpu_of(bench.torch_device)
    ops = CudaFusedOps(CudaOps(torch.bfloat16, gpu, fusion="all"))
    norms(bench, ops, figures)
    routings(bench, gpu, figures)
    quantized(bench, gpu, figures)


if __name__ == "__main__":
    main()
