"""Steps of whole models on a GPU, one rank without the server: decodes as fractions of the bandwidth that
reads weights, keys and values, prompts as fractions of the peak of bf16 products. Both limits are measured in
the same run.

    python -m bench.gpu_steps                         # on a GPU; about three minutes, to gpu.jsonl
    python -m bench.gpu_steps --only "llama-3.1-8b"
    python -m bench.gpu_steps --dry                   # every line, tiny, without a GPU
"""

import argparse
import gc
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct

from bench.gpu import Bench
from bench.gpu_model import GREEDY, RANDOM, Model, folder_of, pages_for
from bench.lines import Figures
from runtime.devices.cuda.interpret import use_interpreter

STEPS = 40
MIXED = 512  # tokens of a prompt's chunk in a step with decodes


class Case(Struct, frozen=True, kw_only=True):
    """A model, and the steps of it that are measured."""

    shape: str  # of SHAPES
    quantization: str | None = None  # while loading
    weight_bits: int = 16  # of the experts, or of all linear layers
    kv_dtype: str = "auto"
    decodes: tuple[tuple[int, int], ...] = ()  # sequences, and their lengths
    prompts: tuple[int, ...] = ()  # tokens
    pieces: tuple[int, ...] = ()  # tokens of steps with prompts that are measured as piecewise graphs, too
    has_variants: bool = False  # also uneven lengths, random samples, and prompts beside decodes

    @property
    def name(self) -> str:
        """The model and its formats."""
        kv = "" if self.kv_dtype == "auto" else f" kv {self.kv_dtype}"
        return f"{self.shape}{f' {self.quantization}' if self.quantization else ''}{kv}"


DECODES = ((1, 2048), (8, 2048), (64, 2048), (256, 1024))
CASES = (
    Case(
        shape="llama-3.1-8b",
        decodes=DECODES,
        prompts=(2048, 8192, 32_768),
        pieces=(32, 256, 1024),
        has_variants=True,
    ),
    # as many as fit beside 61 GB of weights on 80 GB
    Case(
        shape="qwen3-30b-a3b",
        decodes=((1, 2048), (8, 2048), (64, 1024)),
        prompts=(2048, 8192),
        pieces=(32, 1024),
    ),
    Case(shape="llama-3.1-8b", quantization="fp8", weight_bits=8, decodes=DECODES, prompts=(8192,)),
    Case(shape="llama-3.1-8b", kv_dtype="fp8_e4m3", decodes=DECODES[2:], prompts=(8192,)),
    Case(shape="llama-3.1-8b", quantization="int4", weight_bits=4, decodes=DECODES, prompts=(8192,)),
    Case(shape="deepseek-v3-6-layers", weight_bits=8, decodes=DECODES, prompts=(2048,)),
    Case(shape="qwen3-0.6b", decodes=((1, 512), (256, 512)), pieces=(32, 1024)),
)
TINY = Case(shape="llama-3.1-8b", decodes=((2, 70),), prompts=(90,), pieces=(20,), has_variants=True)


def open_model(case: Case, folder: Any, *, is_dry: bool) -> Model:
    """A rank with room for the largest of its steps."""
    steps = 3 if is_dry else STEPS
    longest = max(*case.prompts, *(length for _, length in case.decodes), 512)
    room = max(
        pages_for(rows, 2 * length if case.has_variants else length, 4 * steps)
        for rows, length in case.decodes
    )
    rows = max(rows for rows, _ in case.decodes)
    return Model.open(
        folder,
        slots=rows + 1,
        longest=2 * longest + 8 * steps,
        tokens=max(room, longest) + pages_for(1, MIXED, 0),
        step_tokens=rows + max(*case.prompts, *case.pieces, MIXED, 1),
        is_dry=is_dry,
        piecewise_tokens=case.pieces,
        quantization=None if is_dry else case.quantization,
        kv_dtype=case.kv_dtype,
        graph_sizes=[rows for rows, _ in case.decodes],
    )


def decodes(bench: Bench, case: Case, model: Model, figures: Figures) -> None:
    """Adds decode steps of each size; `model` has captured none."""
    steps = 3 if bench.is_dry else STEPS
    for rows, length in case.decodes:
        model.capture(rows)
        lengths = [length] * rows
        variants = {"": (lengths, GREEDY)}
        if case.has_variants and rows > 1:
            uneven = [length // 4 + 2 * length * i * 3 // 4 // rows for i in range(rows)]
            variants |= {", uneven lengths": (uneven, GREEDY), ", random samples": (lengths, RANDOM)}
        for label, (each, sampling) in variants.items():
            model.begin(each, 2 * steps, sampling)
            seconds = model.decode(rows, steps)
            least = model.read_bytes(rows, case.weight_bits) + sum(each) * model.kv_bytes
            figures[f"{case.name} decode {rows} x {length}{label}"] = {
                "step_us": round(seconds * 1e6),
                "tokens_per_s": round(rows / seconds),
                "of_bandwidth": round(least / seconds / bench.bandwidth, 3),
            }


def prompts(bench: Bench, case: Case, model: Model, figures: Figures) -> None:
    """Adds steps with prompts: alone, beside decodes, and as piecewise graphs."""
    has_flops = case.quantization is None and model.config.mla is None
    for tokens in case.prompts:
        seconds = model.prefill(tokens, 2 if bench.is_dry else 5)
        figure = {"ms": round(seconds * 1e3, 2), "tokens_per_s": round(tokens / seconds)}
        if has_flops:
            figure["of_peak"] = round(model.prefill_flops(tokens) / seconds / bench.peak, 3)
        figures[f"{case.name} prompt {tokens}"] = figure
    rows, length = case.decodes[-1]
    if case.has_variants:
        model.begin([length] * rows, 64)
        tokens = 16 if bench.is_dry else MIXED
        figures[f"{case.name} {rows} decodes and a prompt of {tokens}"] = {
            "ms": round(model.prefill(tokens, 2 if bench.is_dry else 5, rows) * 1e3, 2)
        }
    in_pieces(case.name, case.pieces, model, figures)


def in_pieces(name: str, sizes: Sequence[int], model: Model, figures: Figures) -> None:
    """Adds milliseconds of steps with a prompt: launched kernel by kernel, and as piecewise graphs."""
    times = 2 if model.is_dry else 9
    for tokens in sizes:
        eager_s = model.prefill(tokens, times)
        captured_s = model.capture(tokens, "tokens")
        figures[f"{name} prompt {tokens}, in pieces"] = {
            "ms": round(model.prefill(tokens, times) * 1e3, 2),
            "launched_one_by_one_ms": round(eager_s * 1e3, 2),
            "capture_s": round(captured_s, 2),
        }


def measure(bench: Bench, case: Case, figures: Figures) -> None:
    """Adds all steps of a case."""
    with folder_of(case.shape, is_dry=bench.is_dry) as folder:
        model = open_model(case, folder, is_dry=bench.is_dry)
        figures[f"{case.name} start"] = {"s": round(model.start_s, 1)}
        decodes(bench, case, model, figures)
        prompts(bench, case, model, figures)
        model.close()


def main() -> int:
    """Measures the cases. Returns 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    args = parser.parse_args()
    if args.dry:
        use_interpreter()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    bench = Bench(args.dry)
    figures, has_failed = bench.figures("steps"), False
    cases = (TINY,) if args.dry else CASES
    for case in cases if args.dry or args.only is None else [one for one in cases if one.name in args.only]:
        try:
            measure(bench, case, figures)
        # GPU time is scarce: a model that fails must not cost the results of the others
        except Exception as error:
            traceback.print_exc()
            has_failed = True
            figures[f"{case.name} error"] = f"{type(error).__name__}: {error}"
        gc.collect()
        if not args.dry:
            torch.cuda.empty_cache()
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
