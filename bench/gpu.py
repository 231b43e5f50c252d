"""--device cuda as fractions of what the GPU reaches in the same run: its copy bandwidth and its bf16 matrix
products: kernels. Steps of whole models are in bench/gpu_steps.py, the server in bench/gpu_serve.py.

    python -m bench.gpu          # on a GPU; two minutes, to gpu.jsonl, gpu.json and gpu.svg
    python -m bench.gpu --only attention
    python -m bench.gpu --dry    # every line, tiny, in Triton's interpreter; its figures are not recorded
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.lines import Figures, Lines
from bench.picture import draw
from bench.record import record, results_folder
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.interpret import use_interpreter
from runtime.errors import StartError

NOTHING = np.empty(0, np.int32)
HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 32, 8, 128, 4096, 151_936
DECODES = [(1, 32_768), (16, 8192), (64, 2048), (256, 1024)]  # rows and their lengths
PROMPTS = [(1, 8192), (8, 1024)]
PAGE = 64
SCORES = Scores(DIM**-0.5)
WANTED = {"attention of_bandwidth": 0.85, "attention of_peak": 0.6}


class Bench:
    """The GPU, or the cpu in a dry run, and its measured limits."""

    def __init__(self, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.lines = Lines(None if is_dry else results_folder() / "gpu.jsonl")
        self.torch_device = torch.device("cpu" if is_dry else "cuda")
        self.bandwidth = self.measured_bandwidth(1 << 10 if is_dry else 1 << 32)
        self.read_only_bandwidth = self.measured_read_only(1 << 10 if is_dry else 1 << 32)
        self.peak = self.measured_peak(16 if is_dry else 8192)
        self.lines.write("ceilings", "this process", self.ceilings)

    @property
    def ceilings(self) -> dict[str, Any]:
        """The card, and what it reaches: figures of this process are shares of these."""
        return {
            "card": "none" if self.is_dry else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "bandwidth_gb_s": round(self.bandwidth / 1e9),
            "read_only_gb_s": round(self.read_only_bandwidth / 1e9),
            "peak_tflop_s": round(self.peak / 1e12, 1),
        }

    def figures(self, section: str) -> Figures:
        """The figures of a section, none yet."""
        return Figures(section, self.lines)

    def measured_bandwidth(self, size: int) -> float:
        """Bytes a second, read and written, of a copy of `size` bytes."""
        source = torch.zeros(size, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source))

    def measured_read_only(self, size: int) -> float:
        """Bytes a second of a sum of `size` bytes: what decodes do, which read weights and write little."""
        source = torch.zeros(size // 4, dtype=torch.float32, device=self.torch_device)
        return size / self.seconds(source.sum)

    def measured_peak(self, side: int) -> float:
        """Operations a second of a bf16 product of square matrices."""
        left, right = self.randn(side, side), self.randn(side, side)
        return 2 * side**3 / self.seconds(lambda: left @ right)

    def seconds(self, call: Callable[[], Any], *, is_captured: bool = False) -> float:
        """Median seconds of a call; `is_captured`: in a graph of many, as a step launches it, without
        the time of the host."""
        if self.is_dry:
            begin = perf_counter()
            call()
            return perf_counter() - begin
        from triton.testing import do_bench, do_bench_cudagraph

        if is_captured:
            return do_bench_cudagraph(call, rep=50, return_mode="median") / 1000
        return do_bench(call, warmup=50, rep=200, return_mode="median") / 1000

    def randn(self, *shape: int) -> torch.Tensor:
        """Random bf16 numbers on the device."""
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.torch_device)

    def by_bytes(
        self, num_bytes: int, call: Callable[[], Any], *, is_captured: bool = False
    ) -> dict[str, float]:
        """Microseconds, and the share of the bandwidth."""
        seconds = self.seconds(call, is_captured=is_captured)
        return {"us": round(seconds * 1e6, 1), "of_bandwidth": round(num_bytes / seconds / self.bandwidth, 3)}

    def by_flops(self, flops: float, call: Callable[[], Any]) -> dict[str, float]:
        """Microseconds, and the share of the peak."""
        seconds = self.seconds(call)
        return {"us": round(seconds * 1e6, 1), "of_peak": round(flops / seconds / self.peak, 3)}


def other_backends(bench: Bench) -> dict[str, Any]:
    """Ops with the other values of --attention-backend that work on this GPU and are installed."""
    from runtime.devices.cuda.attention_backends import BACKEND_CLASSES, open_hybrid_backend
    from runtime.devices.cuda.kernels.launch import gpu_of
    from runtime.devices.cuda.ops import CudaOps

    figures, capability = {}, (9, 0) if bench.is_dry else torch.cuda.get_device_capability()
    for name in BACKEND_CLASSES:
        try:
            attention_backend = open_hybrid_backend(
                name, name, torch.bfloat16, gpu_of(bench.torch_device), capability
            )
        except StartError as error:
            print(error, file=sys.stderr)
            continue
        if attention_backend is not None:
            attention_backend.take_pages(())  # cuDNN's graphs are built at the first call here
            figures[name] = CudaOps(
                torch.bfloat16, gpu_of(bench.torch_device), attention_backend=attention_backend
            )
    return figures


def equal_rows(
    bench: Bench, rows: int, starts: int, count: int
) -> tuple[Callable[[Any], Any], list[torch.Tensor]]:
    """A function that plans a step of equal rows over scattered pages with given ops, and the caches."""
    pages = -(-(starts + count) // PAGE)
    table = (torch.randperm(rows * pages, dtype=torch.int32) + 1).view(1, rows, pages).to(bench.torch_device)
    caches = [bench.randn((rows * pages + 1) * PAGE, KV_HEADS, DIM) for _ in range(2)]
    full = np.full(rows, 1, np.int32)
    plan = AttentionRows(
        rows if count == 1 else 0, np.arange(rows, dtype=np.int32), full * starts, full * count
    )
    return lambda ops: ops.plan_attention(plan, table, PAGE, (0,)), caches


def attempt(
    measure: Callable[..., dict[str, float]],
    amount: float,
    ops: Any,
    plan_of: Callable[[Any], Any],
    q: torch.Tensor,
    caches: list[torch.Tensor],
) -> dict[str, Any]:
    """Measures another package; its failure becomes part of the results."""
    try:
        plan = plan_of(ops)
        return measure(amount, lambda: ops.attention(q, *caches, plan, SCORES))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def attention(bench: Bench, ops: Any) -> dict[str, Any]:
    """Attention with Llama-3.1-8B's heads: ours, installed packages, and torch's over contiguous keys."""
    figures = bench.figures("attention")
    others = other_backends(bench)
    for rows, length in [(2, 100)] if bench.is_dry else DECODES:
        plan_of, caches = equal_rows(bench, rows, length - 1, 1)
        plan = plan_of(ops)
        q, size = bench.randn(rows, HEADS, DIM), rows * length * KV_HEADS * DIM * 4
        contiguous = [
            cache[: rows * length].view(rows, length, KV_HEADS, DIM).transpose(1, 2) for cache in caches
        ]
        figures[f"decode {rows} x {length}"] = {
            "ours": bench.by_bytes(size, lambda: ops.attention(q, *caches, plan, SCORES), is_captured=True),
            "torch": bench.by_bytes(
                size,
                lambda: scaled_dot_product_attention(q.unsqueeze(2), *contiguous, enable_gqa=True),
                is_captured=True,
            ),
        } | {
            name: attempt(bench.by_bytes, size, other_ops, plan_of, q, caches)
            for name, other_ops in others.items()
        }
    for rows, length in [(1, 40)] if bench.is_dry else PROMPTS:
        plan_of, caches = equal_rows(bench, rows, 0, length)
        plan = plan_of(ops)
        q, flops = bench.randn(rows * length, HEADS, DIM), 2.0 * rows * length * length * HEADS * DIM
        whole = q.view(rows, length, HEADS, DIM).transpose(1, 2)
        contiguous = [
            cache[: rows * length].view(rows, length, KV_HEADS, DIM).transpose(1, 2) for cache in caches
        ]
        figures[f"prompt {rows} x {length}"] = {
            "ours": bench.by_flops(flops, lambda: ops.attention(q, *caches, plan, SCORES)),
            "torch": bench.by_flops(
                flops,
                lambda: scaled_dot_product_attention(whole, *contiguous, is_causal=True, enable_gqa=True),
            ),
        } | {
            name: attempt(bench.by_flops, flops, other_ops, plan_of, q, caches)
            for name, other_ops in others.items()
        }
    return figures


def rows_of_activations(bench: Bench, ops: Any) -> dict[str, Any]:
    """Kernels over rows of activations."""
    figures = bench.figures("rows")
    for tokens in (2,) if bench.is_dry else (64, 8192):
        x, residual, weight = bench.randn(tokens, HIDDEN), bench.randn(tokens, HIDDEN), bench.randn(HIDDEN)
        gate_up = bench.randn(tokens, 2 * 14_336)
        figures[f"add_rms_norm {tokens}"] = bench.by_bytes(
            4 * x.nbytes, lambda: ops.add_rms_norm(x, residual, weight, 1e-6), is_captured=True
        )
        figures[f"silu_and_mul {tokens}"] = bench.by_bytes(
            gate_up.nbytes * 3 // 2, lambda: ops.act_and_mul(gate_up, "silu"), is_captured=True
        )
    return figures


def sampling(bench: Bench, ops: Any) -> dict[str, Any]:
    """Microseconds of sampling, ours and with torch's sort; ours also as a captured step launches it. A few
    tokens have nearly all of the weight of peaked rows, thousands of those of flat ones."""
    from runtime.devices.sampling_inputs import SamplingInputs
    from runtime.layers.sampling.sampler import sample_tokens

    figures = bench.figures("sampling")
    settings = {
        "greedy": (0.0, 1.0, 0),
        "temperature": (1.0, 1.0, 0),
        "top_p": (1.0, 0.95, 0),
        "top_k and top_p": (1.0, 0.95, 50),
    }
    for rows in (2,) if bench.is_dry else (1, 64, 256):
        flat = torch.randn(rows, 200 if bench.is_dry else VOCAB, device=bench.torch_device) * 3
        for name, (temperature, top_p, top_k) in settings.items():
            ones = torch.ones(rows, device=bench.torch_device)
            uniforms = torch.rand(rows, device=bench.torch_device).double()
            inputs = SamplingInputs(
                ones * temperature, ones * top_p, (ones * top_k).long(), ones * 0, uniforms
            )
            for kind, logits in {"flat": flat, "peaked": flat * 3}.items():
                figures[f"{name} {rows} {kind}"] = {
                    "ours_us": round(bench.seconds(lambda: ops.sample(logits, inputs)) * 1e6, 1),
                    "captured_us": round(
                        bench.seconds(lambda: ops.sample(logits, inputs), is_captured=True) * 1e6, 1
                    ),
                    "torch_us": round(bench.seconds(lambda: sample_tokens(logits, inputs)) * 1e6, 1),
                }
    return figures


SECTIONS: dict[str, Callable[[Bench, Any], dict[str, Any]]] = {
    "attention": attention,
    "rows": rows_of_activations,
    "sampling": sampling,
}


def bars(results: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """The bars of the picture: label, share of the limit, and the share that is aimed at."""
    figures = []
    for name, one in results["attention"].items():
        if "ours" in one:
            part = "of_bandwidth" if "of_bandwidth" in one["ours"] else "of_peak"
            figures.append((f"attention, {name}", one["ours"][part], WANTED[f"attention {part}"]))
            figures.append((f"torch's, {name}", one["torch"][part], None))
    return figures


def main() -> int:
    """Runs the sections and records their results. Returns 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    args = parser.parse_args()
    if args.dry:
        use_interpreter()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    from runtime.devices.cuda.kernels.launch import gpu_of
    from runtime.devices.cuda.ops import CudaOps

    bench = Bench(args.dry)
    ops = CudaOps(torch.bfloat16, gpu_of(bench.torch_device))
    results: dict[str, Any] = {**bench.ceilings, "date": time.strftime("%Y-%m-%d")} | {
        name: {} for name in SECTIONS
    }
    for name in args.only:
        try:
            results[name] = SECTIONS[name](bench, ops)
        # GPU time is scarce: a section that fails must not cost the results of the others
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            bench.lines.write(name, "error", results[name]["error"])
    if not args.dry and set(args.only) == set(SECTIONS):
        print(record("gpu", results))
    with TemporaryDirectory() as folder:
        picture = draw(
            f"{results['card']}: parts of the measured limit",
            bars(results),
            Path(folder) / "gpu.svg" if args.dry else results_folder() / "gpu.svg",
        )
        print(picture)
    return int(any("error" in results[name] for name in SECTIONS))


if __name__ == "__main__":
    sys.exit(main())
