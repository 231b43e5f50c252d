"""Norms that sum over ranks beside what they replace, on two GPUs: microseconds of a sum of all ranks' rows,
the residual and the norm. `joined` is one launch through memory that the GPUs share (`--kernel-fusion all`),
`apart` torch's sum through such memory and a norm, `nccl` NCCL's sum and a norm; all in graphs.

    python -m bench.gpu_norm_sums          # on two GPUs; half a minute, to gpu.jsonl
    python -m bench.gpu_norm_sums --dry    # two processes without a GPU, in Triton's interpreter
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from bench.lines import Figures, Lines
from bench.record import results_folder
from runtime.devices.cuda.interpret import use_interpreter
from runtime.devices.operands import NormInputs
from runtime.devices.torch_collectives import TorchCollectives

RANKS = 2
SIZES = {"Llama-3.1-8B": 4096, "Qwen2.5-72B": 8192}
ROWS = (1, 4, 8, 16)
CALLS, REPLAYS, LIMIT_S = 50, 20, 240.0


def captured_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call in a graph of CALLS; every rank makes equally many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / (CALLS * REPLAYS)


def called_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    begin = perf_counter()
    call()
    return (perf_counter() - begin) * 1e6


def open_dry(rank: int, folder: Path) -> tuple[TorchCollectives, Any, None]:
    """Ranks of the CPU, whose memory is files that all of them map; there is no sum in such memory alone."""
    from runtime.devices.cuda.norm_sums import NormSums

    ranks = TorchCollectives("gloo", rank, RANKS, str(folder / "meet"))
    size = NormSums.num_bytes()
    files = [
        torch.from_file(str(folder / str(one)), shared=True, size=size, dtype=torch.uint8)
        for one in range(RANKS)
    ]
    return ranks, NormSums(files[rank], [one.data_ptr() for one in files], rank, files), None


def open_cards(rank: int, folder: Path) -> tuple[TorchCollectives, Any, Any]:
    """Ranks of GPUs, and both ways through the memory that they share. Raises StartError where they share
    none."""
    from runtime.devices.cuda.collectives import NcclCollectives

    torch.cuda.set_device(rank)
    torch_device = torch.device("cuda", rank)
    ranks = NcclCollectives(rank, RANKS, str(folder / "meet"), torch_device, symm_mem="on")
    return ranks, ranks.open_norm_sums(torch_device), ranks.sums


def ways_of(
    ranks: TorchCollectives, joined: Any, apart: Any, inputs: NormInputs
) -> Iterator[tuple[str, Any]]:
    """The calls by name."""
    from runtime.devices.cuda.kernels.norm import add_rms_norm

    x, residual, weight, eps = inputs

    def normed(sum_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        add_rms_norm(sum_of(x), residual, weight, eps)

    if joined is not None:
        yield "joined", partial(joined.add, inputs, None, early=False)
    if apart is not None:
        yield "apart", partial(normed, apart.sum)
    yield "nccl", partial(normed, ranks.all_reduce)


def rank_of(rank: int, folder: str, is_dry: bool) -> None:
    """One rank. The first one writes what it sees."""
    if is_dry:
        use_interpreter()
        torch.set_num_threads(1)
    ranks, joined, apart = (open_dry if is_dry else open_cards)(rank, Path(folder))
    lines = Lines(None if is_dry else results_folder() / "gpu.jsonl")
    figures = Figures("norms that sum", lines) if rank == 0 else {}
    if joined is not None:
        joined.check()  # known numbers, on all ranks
    torch_device = torch.device("cpu") if is_dry else torch.device("cuda", rank)
    for name, size in ({"tiny": 64} if is_dry else SIZES).items():
        for rows in ROWS[:2] if is_dry else ROWS:
            x, residual = (
                torch.zeros(rows, size, dtype=torch.bfloat16, device=torch_device) for _ in range(2)
            )
            inputs = NormInputs(x, residual, torch.ones_like(x[0]), 1e-6)
            measured = called_us if is_dry else captured_us
            found = {}
            for way, call in ways_of(ranks, joined, apart, inputs):
                found[way] = round(measured(call), 2)
                dist.barrier()
            figures[f"{name}: {rows}"] = found
    dist.destroy_process_group()


def main() -> int:
    """Starts the ranks. Returns 1 where one failed or hung."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if not args.dry and torch.cuda.device_count() < RANKS:
        raise SystemExit(f"there are no {RANKS} GPUs; use --dry")
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_of, args=(rank, folder, args.dry)) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(LIMIT_S)
        codes = [one.exitcode for one in ranks]
        for one in ranks:
            one.kill()
    return int(any(code != 0 for code in codes))


if __name__ == "__main__":
    sys.exit(main())
