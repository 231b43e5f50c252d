"""Benchmark of a device's operators: `runtime check doctor --bench`, which starts one process for each rank
and shows what rank 0 prints.

    python -m runtime.ranks.benchmark --device npu --ranks 2 --rank 0 --rendezvous FILE

Every figure measures the device's own operators (devices/base.py), as a model's step uses them. Inputs are
random; sizes are those of an 8B model's layer, or a sixteenth of it on a CPU. A figure is the best of a few
runs, which excludes the influence of other processes as far as possible.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.base import Device
from runtime.errors import StartError
from runtime.messages.ranks import StartRank
from runtime.ranks.benchmark_results import Figure, Measured
from runtime.ranks.open_executor import torch_device

RUN_S, RUNS = 0.1, 3
SEQUENCES, CONTEXT, PAGE = 16, 2048, 128
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def seconds(call: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of one call among many in a row; the best of a few runs."""
    call()
    wait()
    count, best = 1, math.inf
    for _ in range(RUNS):
        while True:
            begin = perf_counter()
            for _ in range(count):
                call()
            wait()
            took = perf_counter() - begin
            if took >= RUN_S:
                break
            count = max(count + 1, min(10 * count, int(1.2 * count * RUN_S / max(took, 1e-6))))
        best = min(best, took / count)
    return best


class Bench:
    """A device, and inputs of sizes that suit it."""

    def __init__(self, device: Device, dtype: torch.dtype, shrink: int | None) -> None:
        """`shrink` divides the sizes of dimensions; None: the device decides."""
        self.device = device
        self.dtype = dtype
        self.shrink = shrink or (4 if device.torch_device.type == "cpu" else 1)
        self.hidden, self.inner = 4096 // self.shrink, 14336 // self.shrink

    def random(self, *shape: int) -> Tensor:
        """A random tensor on the device."""
        return torch.randn(*shape, dtype=torch.float32).to(self.dtype).to(self.device.torch_device)

    def wait(self) -> None:
        """Waits until the device has done its work."""
        if self.device.torch_device.type != "cpu":
            torch.accelerator.synchronize()

    def speed(self, name: str, size: float, unit: str, call: Callable[[], object]) -> Figure:
        """A measurement of `call`, which moves or computes `size` bytes or operations (not used with unit
        us)."""
        took = seconds(call, self.wait)
        return Figure(
            name,
            round(took * 1e6 if unit == "us" else size / took / (1e9 if unit == "GB/s" else 1e12), 3),
            unit,
        )

    def figures(self) -> Iterator[Figure]:
        """All measurements. With several ranks all of them call it together, and collectives are included."""
        yield self.copy()
        yield from self.linears()
        yield from self.attention()
        if self.device.collectives.size > 1:
            yield from self.exchange()

    def copy(self) -> Figure:
        """Bandwidth of device memory."""
        source = self.random(32 * self.hidden * self.hidden // self.shrink)
        target = torch.empty_like(source)
        return self.speed("copy", 2 * source.nbytes, "GB/s", lambda: target.copy_(source))

    def linears(self) -> Iterator[Figure]:
        """Norm and GEMMs."""
        ops, hidden, inner = self.device.ops, self.hidden, self.inner
        few, many, norm = self.random(SEQUENCES, hidden), self.random(hidden, hidden), self.random(hidden)
        packed = ops.pack_linear(self.random(inner, hidden))
        yield self.speed("rms_norm of one token", 0, "us", lambda: ops.rms_norm(few[:1], norm, 1e-6))
        yield self.speed(
            "linear of 16 tokens",
            inner * hidden * self.dtype.itemsize,
            "GB/s",
            lambda: ops.linear(few, packed, None),
        )
        yield self.speed(
            "linear of many tokens",
            2 * hidden * hidden * inner,
            "TFLOP/s",
            lambda: ops.linear(many, packed, None),
        )

    def attention(self) -> Iterator[Figure]:
        """Attention of decodes and of a prompt."""
        ops, context = self.device.ops, CONTEXT // self.shrink
        heads, kv_heads, pages = HEADS // self.shrink, max(1, KV_HEADS // self.shrink), -(-context // PAGE)
        keys = self.random(SEQUENCES * pages * PAGE, kv_heads, HEAD_DIM)
        values, queries = torch.rand_like(keys), self.random(max(SEQUENCES, context), heads, HEAD_DIM)
        tables = torch.arange(SEQUENCES * pages, dtype=torch.int32, device=self.device.torch_device).view(
            1, SEQUENCES, pages
        )
        scores = Scores(HEAD_DIM**-0.5)
        decodes = ops.plan_attention(rows(SEQUENCES, context - 1, 1), tables, PAGE, (0,))
        yield self.speed(
            "attention of 16 decodes",
            2 * SEQUENCES * context * kv_heads * HEAD_DIM * self.dtype.itemsize,
            "GB/s",
            lambda: ops.attention(queries[:SEQUENCES], keys, values, decodes, scores),
        )
        prompt = ops.plan_attention(rows(1, 0, context), tables, PAGE, (0,))  # causal: half of the operations
        yield self.speed(
            "attention of a prompt",
            2 * context * context * heads * HEAD_DIM,
            "TFLOP/s",
            lambda: ops.attention(queries[:context], keys, values, prompt, scores),
        )

    def exchange(self) -> Iterator[Figure]:
        """All-reduce. The number of calls is fixed, since ranks must agree on it."""
        ranks = self.device.collectives
        for name, tokens, calls in (
            ("all_reduce of one token", 1, 200),
            ("all_reduce of 512 tokens", 512, 20),
        ):
            x = self.random(tokens, self.hidden)
            for count in (3, calls):  # the first ones warm up
                begin = perf_counter()
                for _ in range(count):
                    x = ranks.all_reduce(x)
                    x /= ranks.size
                x.cpu()
            yield Figure(name, round((perf_counter() - begin) / calls * 1e6, 1), "us")


def rows(count: int, start: int, tokens: int) -> AttentionRows:
    """`count` rows of `tokens` tokens each, the first of them at position `start`."""
    every = np.ones(count, np.int32)
    return AttentionRows(
        count if tokens == 1 else 0, np.arange(count, dtype=np.int32), every * start, every * tokens
    )


def open_measured(name: str, rank: int, ranks: int, rendezvous: str) -> tuple[Device, torch.dtype]:
    """The device, opened as for a rank of a model. Raises StartError."""
    start = StartRank(
        device=name,
        model_path="",
        dtype="auto",
        load_format="dummy",
        tp_size=ranks,
        page_size=PAGE,
        max_slots=SEQUENCES,
        max_len=CONTEXT,
        max_step_tokens=CONTEXT,
        memory_fraction=0.5,
        max_total_tokens=None,
        num_threads=None,
        rendezvous=rendezvous,
        seed=0,
    )
    dtype = torch.float32 if name == "cpu" else torch.bfloat16
    return torch_device(name).open_device(start, rank, dtype), dtype


def main() -> int:
    """Measures one rank's device; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="runtime.ranks.benchmark", description="Started by runtime check doctor --bench."
    )
    parser.add_argument("--device", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shrink", type=int, help="divides sizes, to try it out")
    parser.add_argument("--rendezvous", type=Path, default=Path())
    args = parser.parse_args()
    torch.manual_seed(args.rank)
    try:
        device, dtype = open_measured(args.device, args.rank, args.ranks, str(args.rendezvous))
    except StartError as error:
        print(error, file=sys.stderr)
        return 2
    with torch.inference_mode():
        figures = list(Bench(device, dtype, args.shrink).figures())
    device.collectives.close()
    if args.rank == 0:
        measured = Measured(
            device=args.device,
            dtype=str(dtype).removeprefix("torch."),
            ranks=args.ranks,
            torch=str(torch.__version__),
            figures=figures,
        )
        print(msgspec.json.encode(measured).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
