"""Matrix products with quantized weights, and experts, on a GPU: Triton's and torch's, as fractions of what
the GPU reaches in the same run.

    python -m bench.gpu_gemm          # on a GPU; about three minutes
    python -m bench.gpu_gemm --dry    # every line, tiny, in Triton's interpreter; nothing is recorded

Small steps read weights, so they are compared with the GPU's copy bandwidth; large ones with its bf16
products, which 8-bit ones may exceed. `first_torch` is the table that runtime/devices/cuda/gemm_tiles.py
should have (TORCH_FROM): for each scheme, the number of rows from which torch's product was faster at every
size.
"""

import argparse
from typing import Any

import torch

from bench.gpu import Bench
from bench.record import record
from runtime.devices.cuda.interpret import use_interpreter
from runtime.models.config.moe_config import Routing
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme

# Llama-3.1-8B
LINEARS = {
    "qkv 6144 x 4096": (6144, 4096),
    "gate_up 28672 x 4096": (28_672, 4096),
    "down 4096 x 14336": (4096, 14_336),
}
ROWS = (1, 16, 64, 256, 4096)
SCHEMES: list[Scheme] = [
    Fp8(),
    Fp8(activations="none"),
    Fp8(128),
    Int8(),
    PackedInt(4, 128),
    PackedInt(4, 128, has_zero_points=True),
    PackedInt(4, 0, activations="token"),
    PackedInt(8, 128),
]
# experts, experts of a token, hidden size, inner size
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral-8x7B": (8, 2, 4096, 14_336)}
TOKENS = (1, 16, 64, 256, 4096)


def weight_of(bench: Bench, scheme: Scheme, outs: int, ins: int, lead: tuple[int, ...] = ()) -> Any:
    """A weight of this scheme with arbitrary numbers."""
    from runtime.devices.base import Quantized

    group = 0 if isinstance(scheme, Int8) else scheme.group_size
    bits = scheme.bits if isinstance(scheme, PackedInt) else 8
    weight = torch.randint(
        0, 120, (*lead, outs, ins * bits // 8), dtype=torch.uint8, device=bench.torch_device
    )
    if not isinstance(scheme, PackedInt):
        weight = weight.view(torch.float8_e4m3fn if isinstance(scheme, Fp8) else torch.int8)
    groups = ins // group if group else 1
    has_zero_points = isinstance(scheme, PackedInt) and scheme.has_zero_points
    zeros = (
        torch.ones(*lead, outs, groups, dtype=torch.uint8, device=bench.torch_device)
        if has_zero_points
        else None
    )
    return Quantized(
        scheme, weight, torch.full((*lead, outs, groups), 1e-3, device=bench.torch_device), zeros
    )


def label(scheme: Scheme) -> str:
    """The scheme's name, which does not say whether there are zero points."""
    has_zero_points = isinstance(scheme, PackedInt) and scheme.has_zero_points
    return f"{scheme.name}{' with zero points' if has_zero_points else ''}"


def measured(bench: Bench, num_bytes: float, flops: float, call: Any) -> dict[str, Any]:
    """Microseconds, and the shares of bandwidth and peak."""
    seconds = bench.seconds(call)
    return {
        "us": round(seconds * 1e6, 1),
        "of_bandwidth": round(num_bytes / seconds / bench.bandwidth, 3),
        "of_peak": round(flops / seconds / bench.peak, 3),
    }


def linears(bench: Bench, gpu: Any) -> dict[str, Any]:
    """Each product by our kernel, by torch's where it has one, and in bf16."""
    from runtime.devices.cuda.gemm import gemm, supports_torch_gemm, torch_gemm
    from runtime.devices.cuda.weights import pack

    figures = bench.figures("linears")
    for name, (outs, ins) in ({"tiny 64 x 128": (64, 128)} if bench.is_dry else LINEARS).items():
        full = bench.randn(outs, ins)
        plain: dict[int, dict[str, float]] = {}  # the product in bf16, by rows
        for scheme in SCHEMES:
            packed = pack(weight_of(bench, scheme, outs, ins))
            for rows in (2,) if bench.is_dry else ROWS:
                x, flops = bench.randn(rows, ins), 2.0 * rows * outs * ins
                size = packed.weight.nbytes + 2.0 * rows * (ins + outs)
                if rows not in plain:
                    plain[rows] = measured(
                        bench, full.nbytes, flops, lambda: torch.nn.functional.linear(x, full)
                    )
                line = {
                    "triton": measured(bench, size, flops, lambda: gemm(x, packed, gpu)),
                    "bf16": plain[rows],
                }
                if supports_torch_gemm(packed, rows, torch.bfloat16, gpu):
                    line["torch"] = measured(bench, size, flops, lambda: torch_gemm(x, packed, None))
                figures[f"{label(scheme)} {name}, {rows} rows"] = line
    return figures


def first_torch(lines: dict[str, Any]) -> dict[str, int | None]:
    """scheme -> rows from which torch is faster; None: our kernel was faster at the most rows measured."""
    figures: dict[str, int | None] = {}
    for scheme in SCHEMES:
        least = None
        for rows in reversed(ROWS):
            names = [f"{label(scheme)} {name}, {rows} rows" for name in LINEARS]
            each = [lines[name] for name in names if name in lines]
            if not each or not all(
                "torch" in line and line["torch"]["us"] < line["triton"]["us"] for line in each
            ):
                break
            least = rows
        figures[label(scheme)] = least
    return figures


def experts(bench: Bench, gpu: Any) -> dict[str, Any]:
    """A layer of experts without its router; bytes are those of the expected number of experts with
    tokens."""
    from runtime.devices.cuda.moe import CudaExperts

    layer, figures = CudaExperts(gpu), bench.figures("experts")
    torchs = CudaExperts(gpu, grouped_from=0)  # experts in bf16 by torch's grouped product
    for name, (num, top_k, hidden, inner) in (
        {"tiny": (4, 2, 128, 128)} if bench.is_dry else EXPERTS
    ).items():
        for scheme in (None, *SCHEMES):
            if scheme is None:
                packed = layer.pack(bench.randn(num, 2 * inner, hidden), bench.randn(num, hidden, inner))
            else:
                shapes = (2 * inner, hidden), (hidden, inner)
                packed = layer.pack_quantized(*(weight_of(bench, scheme, *shape, (num,)) for shape in shapes))
            for tokens in (3,) if bench.is_dry else TOKENS:
                ids = torch.rand(tokens, num, device=bench.torch_device).topk(top_k).indices
                shares, x = torch.rand(tokens, top_k, device=bench.torch_device), bench.randn(tokens, hidden)
                chosen = 1 - (1 - top_k / num) ** tokens
                size = chosen * sum(one.weight.nbytes for one in packed)
                flops = 6.0 * tokens * top_k * hidden * inner
                line = measured(bench, size, flops, lambda: layer.apply(x, ids, shares, packed))
                if scheme is None:
                    line["torch"] = measured(bench, size, flops, lambda: torchs.apply(x, ids, shares, packed))
                figures[f"{'bf16' if scheme is None else label(scheme)} {name}, {tokens} tokens"] = line
    return figures


def routing(bench: Bench) -> dict[str, Any]:
    """Microseconds of routing, ours and torch's softmax with topk."""
    from runtime.devices.cuda.kernels.moe_routing import route

    figures = bench.figures("routing")
    for name, num, config in (
        ("Qwen3", 128, Routing(top_k=8, normalizes=True)),
        (
            "DeepSeek-V3",
            256,
            Routing(
                top_k=8,
                score="sigmoid",
                num_groups=8,
                top_groups=4,
                group_score="two largest",
                normalizes=True,
                scale=2.5,
            ),
        ),
    ):
        for tokens in (2,) if bench.is_dry else (1, 256, 4096):
            logits = torch.randn(tokens, num, device=bench.torch_device)
            figures[f"{name}, {tokens} tokens"] = {
                "ours_us": round(bench.seconds(lambda: route(logits, None, config)) * 1e6, 1),
                "softmax_topk_us": round(
                    bench.seconds(lambda: logits.softmax(1).topk(config.top_k)) * 1e6, 1
                ),
            }
    return figures


def main() -> None:
    """Prints and records the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    is_dry = parser.parse_args().dry
    if is_dry:
        use_interpreter()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    from runtime.devices.cuda.kernels.launch import gpu_of

    bench = Bench(is_dry)
    gpu = gpu_of(bench.torch_device)
    lines = linears(bench, gpu)
    results: dict[str, Any] = {
        **bench.ceilings,
        "first_torch": first_torch(lines),
        "linears": lines,
        "experts": experts(bench, gpu),
        "routing": routing(bench),
    }
    if not is_dry:
        print(record("gpu_gemm", results))


if __name__ == "__main__":
    main()
