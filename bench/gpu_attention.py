"""Attention in each form of its tiles that attention_tiles.py names for Hopper, beside what is chosen there
by default: prompts, decodes, and decodes of absorbed MLA (DeepSeek's shape).

    python -m bench.gpu_attention             # on a GPU; compiles and measures in a minute, to gpu.jsonl
    python -m bench.gpu_attention --compile   # compiles all forms, as many at a time as there are cores
    python -m bench.gpu_attention --dry       # every line, tiny, without a GPU

Each figure is a line the moment it is known: time, share of the bandwidth or the peak, and how far results
are from those of the default, as a part of their norm: two roundings to bfloat16 are 0.003. A form that is
fastest and as near is turned on in CHOSEN there.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.gpu import DIM, HEADS, KV_HEADS, PAGE, SCORES, Bench, equal_rows
from bench.gpu_tuning import COPIES_BYTES, set_table
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.interpret import use_interpreter

RANK, ROPE = 512, 64  # of DeepSeek's latents


class Case(NamedTuple):
    """Equal rows of one kind of attention (attention_tiles.CHOSEN)."""

    kind: str
    rows: int
    start: int  # tokens of a row that are in the cache
    count: int = 1
    heads: int = HEADS

    @property
    def name(self) -> str:
        """What its lines are called."""
        heads = f"MLA of {self.heads} heads" if "latents" in self.kind else self.kind
        after = f" behind {self.start}" if self.count > 1 and self.start else ""
        return f"{heads} {self.rows} x {self.count if self.count > 1 else self.start + 1}{after}"


PROMPTS = [
    Case("prompt", 1, 0, 8192),
    Case("prompt", 8, 0, 1024),
    Case("prompt", 1, 0, 2048),
    Case("prompt", 4, 2048, 2048),
]
DECODES = [Case("decode", 1, 2047), Case("decode", 8, 2047), Case("decode", 1, 32_767)]
LATENTS = [
    Case("few latents", 1, 8191, heads=16),
    Case("few latents", 32, 4095, heads=16),
    Case("latents", 1, 8191, heads=128),
    Case("latents", 32, 4095, heads=128),
]
DRY = [Case("prompt", 1, 0, 20), Case("decode", 1, 99), Case("few latents", 1, 70, heads=16)]


class Prepared(NamedTuple):
    """A case on the device."""

    case: Case
    call: Callable[[Any], torch.Tensor]  # with counters of split keys, or None
    num_bytes: int  # of keys and values
    flops: float


def copies(bench: Bench, case: Case, caches: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Caches that are read in turn, since decodes of few keys would find one in the L2 cache."""
    size = sum(x.nbytes for x in caches)
    num = 1 if bench.is_dry or case.count > 1 else -(-COPIES_BYTES // size)
    return [caches, *([x.clone() for x in caches] for _ in range(num - 1))]


def heads_of(bench: Bench, gpu: Any, case: Case) -> Prepared:
    """Attention with heads of DIM over scattered pages."""
    from runtime.devices.cuda.attention import attention
    from runtime.devices.cuda.ops import CudaOps

    plan_of, caches = equal_rows(bench, case.rows, case.start, case.count)
    turns = cycle(copies(bench, case, caches))
    plan = plan_of(CudaOps(torch.bfloat16, gpu))
    q = bench.randn(case.rows * case.count, case.heads, DIM)
    keys = case.rows * (case.count * case.start + case.count * (case.count + 1) / 2)
    return Prepared(
        case,
        lambda counters: attention(q, *next(turns), plan, SCORES, gpu, counters),
        case.rows * (case.start + case.count) * KV_HEADS * DIM * 4,
        4.0 * keys * case.heads * DIM,
    )


def latents_of(bench: Bench, gpu: Any, case: Case) -> Prepared:
    """Attention of absorbed queries over latents and rotary parts, without the projections around it."""
    from runtime.devices.cuda.attention import launch_attention, plan_attention

    length = case.start + 1
    pages = -(-length // PAGE)
    table = torch.randperm(case.rows * pages, dtype=torch.int32) + 1
    caches = [bench.randn((case.rows * pages + 1) * PAGE, 1, dim) for dim in (RANK, ROPE)]
    turns = cycle(copies(bench, case, caches))
    ones = np.ones(case.rows, np.int32)
    rows = AttentionRows(case.rows, np.arange(case.rows, dtype=np.int32), ones * case.start, ones)
    plan = plan_attention(rows, table.view(1, case.rows, pages).to(bench.torch_device), PAGE)
    q, q_rope = (bench.randn(case.rows, case.heads, dim) for dim in (RANK, ROPE))
    scores = Scores((128 + ROPE) ** -0.5)

    def call(counters: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty_like(q)
        launch, (latents, ropes) = plan.launches[0], next(turns)
        launch_attention(out, q, latents, latents, launch, plan, scores, gpu, q_rope, ropes, counters)
        return out

    size = case.rows * length
    return Prepared(case, call, size * (RANK + ROPE) * 2, 2.0 * size * case.heads * (2 * RANK + ROPE))


def tiles_of(kind: str, *, is_dry: bool) -> dict[str, Any]:
    """The default, and the forms of a kind; in a dry run the first one that reads with TMA."""
    from runtime.devices.cuda import attention_tiles as tiles

    forms = {"prompt": tiles.PROMPTS, "decode": tiles.DECODES, "few latents": tiles.FEW_LATENTS}
    found = forms.get(kind, tiles.LATENTS)
    if is_dry:
        name = next(name for name, tile in found.items() if tile.walk.tma and not tile.walk.groups)
        found = {name: found[name]}
    return {"default": tiles.CHOSEN[kind]} | found


def prepared(bench: Bench, gpu: Any, cases: list[Case]) -> list[Prepared]:
    """Cases on the device."""
    return [(latents_of if "latents" in case.kind else heads_of)(bench, gpu, case) for case in cases]


def figure(bench: Bench, one: Prepared, counters: Any) -> dict[str, Any]:
    """Time of a case with what is chosen now: of decodes in a graph, of prompts launched one by one."""
    is_prompt = one.case.count > 1
    seconds = bench.seconds(lambda: one.call(counters), is_captured=not is_prompt)
    found = {"us": round(seconds * 1e6, 1)}
    if not is_prompt:
        found["of_bandwidth"] = round(one.num_bytes / seconds / bench.bandwidth, 3)
    if one.case.kind != "decode":
        found["of_peak"] = round(one.flops / seconds / bench.peak, 3)
    return found


def forms(bench: Bench, gpu: Any, one: Prepared, *, roles: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures of a case by form, of those whose warps have `roles` or have none; the default of decodes
    also with parts that the last program merges."""
    from runtime.devices.cuda import attention_tiles as module
    from runtime.devices.cuda.attention import split_counters

    expected = one.call(None)
    for name, tile in tiles_of(one.case.kind, is_dry=bench.is_dry).items():
        if roles != (tile is not None and tile.walk.groups > 0):
            continue
        ways = {"": None}
        if one.case.kind == "decode" and tile is None:
            ways[", merging"] = split_counters(gpu, bench.torch_device)
        for suffix, counters in ways.items():
            with set_table(module, CHOSEN=module.CHOSEN | {one.case.kind: tile}):
                torch.full_like(expected, float("nan"))  # so that what is not written is no old result
                try:
                    error = (one.call(counters) - expected).float().norm() / expected.float().norm()
                    yield name + suffix, figure(bench, one, counters) | {"error": round(error.item(), 6)}
                # one that needs more memory than there is tells something, too
                except Exception as error:
                    yield name + suffix, {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def compile_all(bench: Bench, gpu: Any, cases: list[Prepared]) -> None:
    """Compiles what the cases launch, many at a time."""
    from runtime.devices.cuda import attention_tiles as module
    from runtime.devices.cuda.attention import split_counters
    from runtime.devices.cuda.compile_ahead import TritonCompiler
    from runtime.devices.progress import without_progress

    counters = split_counters(gpu, bench.torch_device)
    compiler = TritonCompiler(os.cpu_count() or 1, lambda: torch.cuda.set_device(0))
    try:
        with compiler.compiling(without_progress):
            for one in cases:
                for tile in tiles_of(one.case.kind, is_dry=False).values():
                    with set_table(module, CHOSEN=module.CHOSEN | {one.case.kind: tile}):
                        one.call(None)
                        one.call(counters if one.case.kind == "decode" and tile is None else None)
    # measured one by one, each form says what is wrong with it
    except Exception as error:
        print(error, file=sys.stderr)


def main() -> None:
    """Compiles and measures."""
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
    from runtime.devices.cuda.kernels.launch import gpu_of

    bench = Bench(args.dry)
    gpu = gpu_of(bench.torch_device)
    begin_s = time.monotonic()
    cases = prepared(bench, gpu, DRY if args.dry else [*PROMPTS, *DECODES, *LATENTS])
    figures = bench.figures("forms of attention")
    if not args.dry:
        compile_all(bench, gpu, cases)
        figures["compiled in s"] = round(time.monotonic() - begin_s, 1)
    if args.compile:
        return
    # those whose warps wait for one another last: one that waits forever costs no other figure
    for roles in (False, True):
        for one in cases:
            for name, found in forms(bench, gpu, one, roles=roles):
                figures[f"{one.case.name}: {name}"] = found


if __name__ == "__main__":
    main()
