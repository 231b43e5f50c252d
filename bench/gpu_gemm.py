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
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.gpu import Bench
from bench.gpu_tuning import set_table
from bench.lines import Figures, Lines
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
NEW: list[Scheme] = [Fp8(128), PackedInt(4, 128), PackedInt(4, 128, has_zero_points=True)]
SCHEMES: list[Scheme] = [
    *NEW,
    Fp8(),
    Fp8(activations="none"),
    Int8(),
    PackedInt(4, 0, activations="token"),
    PackedInt(8, 128),
]
# experts, experts of a token, hidden size, inner size
EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "Mixtral-8x7B": (8, 2, 4096, 14_336),
}
CLAMPED = "gpt-oss-20b"  # the one whose experts have biases, and may be in MXFP4
TOKENS = (1, 16, 64, 256, 4096)
TURN_BYTES = 150 << 20  # of weights that are read in turn
TURNS = 8  # the most of them
CHECKED = 4  # rows, or tokens, whose error is measured
FRAGMENTS = frozenset({"int4_weight"})

Calls = list[Callable[[], torch.Tensor]]


class Compiler(Bench):
    """Runs each call once: Triton keeps what it compiles on disk."""

    def __init__(self) -> None:
        self.is_dry, self.torch_device = False, torch.device("cuda")
        self.bandwidth = self.read_only_bandwidth = self.peak = 1.0

    def figures(self, section: str) -> Figures:
        """Figures that go nowhere."""
        return Figures(section, Silent())


class Silent(Lines):
    """Lines that are not written."""

    def write(self, section: str, name: str, figure: Any) -> None:
        """Nothing."""


def in_turn(bench: Bench, calls: Calls) -> float:
    """Seconds of one of the calls, in a graph of all."""
    if bench.is_dry or isinstance(bench, Compiler):
        begin = perf_counter()
        calls[0]()
        return perf_counter() - begin
    calls[0]()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[2:]) / 1000 / len(calls)


def measured(
    bench: Bench, num_bytes: float, flops: float, calls: Calls, wanted: torch.Tensor | None
) -> dict[str, Any]:
    """Microseconds, the shares of bandwidth and peak, and the error; or why there is none of these."""
    try:
        seconds = in_turn(bench, calls)
        found = {} if wanted is None else {"error": error_of(calls[0](), wanted)}
    # one way that fails must not cost the figures of the others
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:2000], file=sys.stderr)
        return {"failed": f"{type(error).__name__}: {str(error)[:160]}"}
    return {
        "us": round(seconds * 1e6, 1),
        "of_bandwidth": round(num_bytes / seconds / bench.bandwidth, 3),
        "of_peak": round(flops / seconds / bench.peak, 3),
    } | found


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference of the first rows, as a part of what is wanted."""
    difference = found[: len(wanted)].float() - wanted
    return round((difference.norm() / wanted.norm()).item(), 6)


def weight_of(bench: Bench, scheme: Scheme, outs: int, ins: int, lead: tuple[int, ...] = ()) -> Any:
    """A random weight of this scheme; where groups are of 128 8-bit floats, squares share scales."""
    from runtime.devices.base import Quantized

    group = 0 if isinstance(scheme, Int8) else scheme.group_size
    bits = scheme.bits if isinstance(scheme, PackedInt) else 8
    most = 256 if isinstance(scheme, PackedInt) else 120  # bytes of 8-bit floats that are none are left out
    shape = *lead, outs, ins * bits // 8
    weight = torch.randint(0, most, shape, dtype=torch.uint8, device=bench.torch_device)
    if not isinstance(scheme, PackedInt):
        weight = weight.view(torch.float8_e4m3fn if isinstance(scheme, Fp8) else torch.int8)
    groups = ins // group if group else 1
    per = 128 if scheme == Fp8(128) and outs % 128 == 0 else 1
    scale = torch.rand(*lead, outs // per, groups, device=bench.torch_device) * 1e-3 + 1e-4
    has_zero_points = isinstance(scheme, PackedInt) and scheme.has_zero_points
    size = *lead, outs, groups
    zeros = (
        torch.randint(0, 16, size, dtype=torch.uint8, device=bench.torch_device) if has_zero_points else None
    )
    return Quantized(scheme, weight, scale.half().float().repeat_interleave(per, len(lead)), zeros)


def label(scheme: Scheme) -> str:
    """The scheme's name, which does not say whether there are zero points."""
    has_zero_points = isinstance(scheme, PackedInt) and scheme.has_zero_points
    return f"{scheme.name}{' with zero points' if has_zero_points else ''}"


def copies_of(bench: Bench, packed: Any) -> list[Any]:
    """Weights that are read in turn."""
    num = 1 if bench.is_dry else min(TURNS, -(-TURN_BYTES // packed.weight.nbytes))
    return [packed, *(replace(packed, weight=packed.weight.clone()) for _ in range(num - 1))]


def by_block(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A product where sums are kept in one multiplication a block."""
    from runtime.devices.cuda import gemm_tiles

    with set_table(gemm_tiles, SUMS_BY_BLOCK=True):
        return call()


def ways(weight: Any, gpu: Any) -> dict[str, tuple[Any, Callable[[torch.Tensor, Any], torch.Tensor]]]:
    """The ways to compute a product: name -> the packed weight, and a function of rows and of it."""
    from runtime.devices.cuda.gemm import gemm, torch_gemm
    from runtime.devices.cuda.weights import pack

    packed = pack(weight, frozenset())
    found: dict[str, Any] = {"ours": (packed, lambda x, one: gemm(x, one, gpu))}
    if packed.blocks is not None:
        found["by block"] = packed, lambda x, one: by_block(lambda: gemm(x, one, gpu))
    if (other := pack(weight, FRAGMENTS)).kind == "fragments4":
        found["fragments"] = other, lambda x, one: gemm(x, one, gpu)
    return found | {"torch": (packed, lambda x, one: torch_gemm(x, one, None))}


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
            each = {
                way: (copies_of(bench, packed), call) for way, (packed, call) in ways(weight, gpu).items()
            }
            for rows in (2,) if bench.is_dry else ROWS:
                x, flops = bench.randn(rows, ins), 2.0 * rows * outs * ins
                io, line = 2.0 * rows * (ins + outs), {}
                if rows not in plain:
                    calls: Calls = [lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in full]  # type: ignore[misc]
                    plain[rows] = measured(bench, full[0].nbytes + io, flops, calls, None)
                for way, (copies, call) in each.items():
                    if way == "torch" and not supports_torch_gemm(copies[0], rows, torch.bfloat16, gpu):
                        continue
                    wanted = None if isinstance(bench, Compiler) else reference(x, weight, copies[0])
                    calls = [lambda one=one, call=call, x=x: call(x, one) for one in copies]  # type: ignore[misc]
                    size = copies[0].weight.nbytes + io
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


def stack_of(bench: Bench, num: int, outs: int, ins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts in MXFP4."""
    codes = torch.randint(0, 256, (num, outs, ins // 2), dtype=torch.uint8, device=bench.torch_device)
    exponents = torch.randint(
        114, 120, (num, outs, ins // 32), dtype=torch.uint8, device=bench.torch_device
    )
    return codes, exponents


def clamped_experts(bench: Bench, layer: Any, num: int, hidden: int, inner: int) -> dict[str, Any]:
    """gpt-oss's: name -> layer, packed weights, and stacks in float32 with their biases."""
    from runtime.layers.quantization.mxfp4 import dequantized

    biases = bench.randn(num, 2 * inner), bench.randn(num, hidden)
    stacks = stack_of(bench, num, 2 * inner, hidden), stack_of(bench, num, hidden, inner)
    full = [dequantized(codes.unflatten(2, (-1, 16)), exponents) for codes, exponents in stacks]
    plain = layer.pack_clamped(*(numbers.bfloat16() for numbers in full), biases)
    numbers = (*full, biases)
    return {
        "mxfp4": (layer, layer.pack_clamped_mxfp4(*stacks, biases), numbers),
        "bf16": (layer, plain, numbers),
    }


def expert_ways(bench: Bench, gpu: Any, name: str, schemes: Iterable[Scheme]) -> dict[str, Any]:
    """name -> layer, packed weights, and numbers that the error is measured with: without what activations
    lose where they are quantized, which is about three hundredths."""
    from runtime.devices.cuda.moe import CudaExperts
    from runtime.devices.cuda.weights import pack
    from runtime.layers.quantization.dequantize import dequantized

    layer, torchs = CudaExperts(gpu), CudaExperts(gpu, grouped_from=0)
    num, _, hidden, inner = (4, 2, 256, 128) if bench.is_dry else EXPERTS[name]
    shapes = (2 * inner, hidden), (hidden, inner)
    if name == CLAMPED:
        return clamped_experts(bench, layer, num, hidden, inner)
    full = [bench.randn(num, *shape).mul_(0.02) for shape in shapes]
    packed = layer.pack(*full)
    found: dict[str, Any] = {
        "bf16": (layer, packed, (*full, None)), "bf16, torch": (torchs, packed, (*full, None))
    }
    for scheme in schemes:
        pair = [weight_of(bench, scheme, *shape, (num,)) for shape in shapes]
        numbers = (*(dequantized(one, torch.bfloat16) for one in pair), None)
        plain = tuple(pack(one, frozenset()) for one in pair)
        found[label(scheme)] = layer, plain, numbers
        if plain[0].blocks is not None:
            found[f"{label(scheme)}, by block"] = layer, plain, numbers
        other = tuple(pack(one, FRAGMENTS) for one in pair)
        if other[0].kind == "fragments4":
            found[f"{label(scheme)}, fragments"] = layer, other, numbers
    return found


def expert_reference(
    x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, numbers: Any
) -> torch.Tensor:
    """What experts make of the first tokens, one by one in float32."""
    from runtime.models.gpt_oss import ALPHA, LIMIT

    gate_up, down, biases = numbers
    found = []
    for row, places, weights in zip(x[:CHECKED].float(), ids.tolist(), shares, strict=False):
        total = torch.zeros_like(row)
        for place, weight in zip(places, weights, strict=True):
            gate, up = (gate_up[place].float() @ row + (0 if biases is None else biases[0][place])).chunk(2)
            if biases is None:
                inner = torch.nn.functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                inner = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
            total += (down[place].float() @ inner + (0 if biases is None else biases[1][place])) * weight
        found.append(total)
    return torch.stack(found)


def experts(bench: Bench, gpu: Any, schemes: Iterable[Scheme], names: Iterable[str]) -> dict[str, Any]:
    """A layer of experts without its router; bytes are those of the expected number of experts with
    tokens."""
    figures = bench.figures("experts")
    for name in names:
        num, top_k, hidden, inner = (4, 2, 256, 128) if bench.is_dry else EXPERTS[name]
        for way, (layer, packed, numbers) in expert_ways(bench, gpu, name, schemes).items():
            for tokens in (3,) if bench.is_dry else TOKENS:
                turns = 1 if bench.is_dry or tokens > 256 else TURNS
                ids = [
                    torch.rand(tokens, num, device=bench.torch_device).topk(top_k).indices
                    for _ in range(turns)
                ]
                shares, x = torch.rand(tokens, top_k, device=bench.torch_device), bench.randn(tokens, hidden)
                chosen = 1 - (1 - top_k / num) ** tokens
                size = chosen * sum(one.weight.nbytes for one in packed)
                flops = 6.0 * tokens * top_k * hidden * inner
                apply = lambda one, layer=layer, x=x, shares=shares, packed=packed: layer.apply(  # type: ignore[misc] # noqa: E731
                    x, one, shares, packed
                )
                calls: Calls = [lambda one=one, apply=apply: apply(one) for one in ids]  # type: ignore[misc]
                if way.endswith("by block"):
                    calls = [lambda call=call: by_block(call) for call in calls]  # type: ignore[misc]
                is_checked = not isinstance(bench, Compiler)
                wanted = expert_reference(x, ids[0], shares, numbers) if is_checked else None
                figures[f"{way} {name}, {tokens} tokens"] = measured(bench, size, flops, calls, wanted)
    return figures


def routing(bench: Bench) -> dict[str, Any]:
    """Microseconds of routing, ours and torch's softmax with topk."""
    from runtime.devices.cuda.kernels.moe_routing import route

    grouped = Routing(
        top_k=8,
        score="sigmoid",
        num_groups=8,
        top_groups=4,
        group_score="two largest",
        normalizes=True,
        scale=2.5,
    )
    figures = bench.figures("routing")
    for name, num, config in (
        ("Qwen3", 128, Routing(top_k=8, normalizes=True)),
        ("DeepSeek-V3", 256, grouped),
    ):
        for tokens in (2,) if bench.is_dry else (1, 256, 4096):
            logits = torch.randn(tokens, num, device=bench.torch_device)
            ours = in_turn(bench, [lambda x=logits, c=config: route(x, None, c)[0]])  # type: ignore[misc]
            others = in_turn(bench, [lambda x=logits, c=config: x.softmax(1).topk(c.top_k)[0]])  # type: ignore[misc]
            figures[f"{name}, {tokens} tokens"] = {
                "ours_us": round(ours * 1e6, 1),
                "softmax_topk_us": round(others * 1e6, 1),
            }
    return figures


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
