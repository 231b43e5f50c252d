"""How benches of products measure: calls in a graph, that take weights in turn, and their errors."""

import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.gpu import Bench
from bench.gpu_tuning import set_table
from bench.lines import Figures, Lines
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme

TURN_BYTES = 150 << 20  # of weights that are read in turn
TURNS = 8  # the most of them
CHECKED = 4  # rows, or tokens, whose error is measured
FRAGMENTS = frozenset({"int4_weight"})
PLAIN, BY_BLOCK = {"SUMS_BY_BLOCK": False}, {"SUMS_BY_BLOCK": True}

Calls = list[Callable[[], Any]]


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


def in_turn(bench: Bench, calls: Calls) -> tuple[float, Any]:
    """Seconds of one of the calls, in a graph of all, and what the first one returns."""
    begin = perf_counter()
    first = calls[0]()
    if bench.is_dry or isinstance(bench, Compiler):
        return perf_counter() - begin, first
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(7):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended))
    return median(times[2:]) / 1000 / len(calls), first


def measured(
    bench: Bench, num_bytes: float, flops: float, calls: Calls, wanted: torch.Tensor | None
) -> dict[str, Any]:
    """Microseconds, the shares of bandwidth and peak, and the error; or why there is none of these."""
    try:
        seconds, first = in_turn(bench, calls)
        found = {} if wanted is None else {"error": error_of(first, wanted)}
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
        weight |= torch.randint_like(weight, 2) << 7
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


def with_tables(tables: dict[str, Any], call: Callable[[], Any]) -> Any:
    """The result of a call with other tables of gemm_tiles.py."""
    from runtime.devices.cuda import gemm_tiles

    with set_table(gemm_tiles, **tables):
        return call()
