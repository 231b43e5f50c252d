"""Decode steps of Llama-3.1-8B's shape by how far kernels are joined, and with what no card has run yet: one
rank without the server, each setting in turn, as fractions of the bandwidth of the same run.

    python -m bench.gpu_fusion          # on a GPU; about a minute and a half, to gpu.jsonl
    python -m bench.gpu_fusion --dry    # every line, tiny, in Triton's interpreter

`start` is the time until a rank is ready, kernels compiled: the first one compiles them, later ones find most
of them on disk.
"""

import argparse
import sys
import traceback
from typing import Any

import torch

from bench.gpu import Bench
from bench.gpu_model import GREEDY, RANDOM, Model, folder_of, pages_for
from bench.lines import Figures
from runtime.devices.cuda.interpret import use_interpreter

SHAPE = "llama-3.1-8b"
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"kernel_fusion": "all"},
    "all, listed decodes": {"kernel_fusion": "all", "lists_work": True},
    "safe, products of few rows": {"kernel_fusion": "safe", "gemv_rows": 8},
    "the same, early starts": {"kernel_fusion": "safe", "gemv_rows": 8, "starts_early": True},
    "everything": {"kernel_fusion": "all", "gemv_rows": 8, "starts_early": True, "lists_work": True},
}
DECODES = ((1, 2048), (8, 2048), (64, 2048))
LONG = 32_768  # tokens of the one long sequence of a step whose others are short
STEPS = 40


def measure(bench: Bench, name: str, options: dict[str, Any], figures: Figures) -> None:
    """Adds the steps of one setting."""
    decodes, steps = (((2, 70),), 3) if bench.is_dry else (DECODES, STEPS)
    rows, longest = decodes[-1][0], (200 if bench.is_dry else LONG) + 8 * steps
    with folder_of(SHAPE, is_dry=bench.is_dry) as folder:
        model = Model.open(
            folder,
            slots=rows + 1,
            longest=longest,
            tokens=max(pages_for(count, length, 4 * steps) for count, length in decodes)
            + pages_for(1, longest, 4 * steps),
            step_tokens=rows + 512,
            is_dry=bench.is_dry,
            graph_sizes=[count for count, _ in decodes],
            device_options=options,
        )
    figures[f"{name}: start"] = {"s": round(model.start_s, 1)}
    for count, length in decodes:
        model.capture(count)
        one_long = [length // 8] * (count - 1) + [longest - 8 * steps]
        variants = (
            ("", [length] * count, GREEDY),
            (", random samples", [length] * count, RANDOM),
            (", one long", one_long, GREEDY),
        )
        # the interpreter is slow, and these differ in their numbers alone
        for label, lengths, sampling in variants[:1] if bench.is_dry and name != "all" else variants:
            model.begin(lengths, 2 * steps, sampling)
            seconds = model.decode(count, steps)
            least = model.read_bytes(count) + sum(lengths) * model.kv_bytes
            figures[f"{name}: {count} x {length}{label}"] = {
                "step_us": round(seconds * 1e6),
                "of_bandwidth": round(least / seconds / bench.bandwidth, 3),
            }
    model.close()


def main() -> int:
    """Measures each setting. Returns 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        use_interpreter()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    bench = Bench(args.dry)
    figures, has_failed = bench.figures("fusion"), False
    dry = {name: SETTINGS[name] for name in ("all", "everything")}  # the interpreter is slow
    for name, options in (dry if args.dry else SETTINGS).items():
        try:
            measure(bench, name, options, figures)
        # GPU time is scarce: a setting that fails must not cost the results of the others
        except Exception as error:
            traceback.print_exc()
            has_failed = True
            figures[f"{name}: error"] = f"{type(error).__name__}: {error}"
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
