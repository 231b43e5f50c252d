"""What of a rank's speed on the CPU reaches clients: a 0.5B shape and the embedded model over HTTP.

    python -m bench.cpu_serve [--weights int4] [--turns 2] [--tokens 256] [--parts shape,pocket]
                              [--limit-s 900] [--record]

In turns: the rank alone at batch 8 (bench/cpu.py), then a server of the same shape with 8 streams, free ones
and ones that are held to a JSON Schema. Random weights, and a tokenizer of 151,936 made-up tokens. Gaps are
between the tokens of a stream, so the ratio of the rank's step to a free stream's gap is what HTTP leaves of
the rank; the client shares the cores. Of the schema: its gaps to those of free streams, and the first token
of its first request, which compiles it, next to that of the second. Of pocket: one stream.

A brief run is `--turns 1 --tokens 32`. A turn that would begin after `--limit-s` is left out, and the results
say how many were taken.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import load
from bench.cpu import child
from bench.grammar import ENDLESS
from bench.record import record
from bench.serve import server
from bench.shapes import SHAPES
from runtime.devices.cpu.kernels.levels import supported_levels

SHAPE, STREAMS, PROMPT = "qwen2.5-0.5b", 8, 128
PARTS = ("shape", "pocket")
Body = tuple[str, dict[str, object]]


@dataclass(frozen=True)
class Extent:
    """How much is measured: turns, tokens of a stream, and when no further turn begins."""

    turns: int
    tokens: int
    until_s: float  # time.monotonic()

    def rounds(self, count: int) -> Iterator[int]:
        """Numbers of the turns, of `count`, of which the first one is always taken."""
        for turn in range(count):
            if turn and time.monotonic() > self.until_s:
                print(f"the time is over after {turn} of {count} turns", flush=True)
                return
            yield turn


def write_model(folder: Path) -> None:
    """config.json of the shape, and a tokenizer of as many tokens: bytes first, then words of letters."""
    config = dict(SHAPES[SHAPE])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters, count = "etaoinshrdlucmfwypvbgkjqxz", int(config["vocab_size"]) - len(alphabet)
    words = ["Ġ" + "".join(letters[(i // 26**k) % 26] for k in range(4)) for i in range(count)]
    tokenizer = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet + words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))


def bodies(seed: int, tokens: int, *, schema: bool, count: int = STREAMS) -> list[Body]:
    """Requests for as many tokens each, of prompts that nothing was sent before."""
    sampling: dict[str, object] = {"max_new_tokens": tokens, "temperature": 0.7}
    sampling |= {"json_schema": ENDLESS.schema} if schema else {"ignore_eos": True}
    prompts = [" ".join(chr(97 + (seed + i + k) % 26) for k in range(PROMPT // 2)) for i in range(count)]
    return [("/generate", {"text": text, "stream": True, "sampling_params": sampling}) for text in prompts]


def gap_ms(port: int, sent: list[Body], tokens: int) -> float:
    """Mean gap between the `tokens` tokens of streams that begin together."""
    finished = uvloop.run(load._drive(port, len(sent), sent))
    spans = [[at for at, count in reads.at if count] for reads in finished]
    return 1000 * mean((times[-1] - times[0]) / (tokens - 1) for times in spans)


def first_ms(port: int, body: Body) -> float:
    """Milliseconds from sending a request until its first event."""
    begin = time.perf_counter()
    (reads,) = uvloop.run(load._drive(port, 1, [body]))
    return 1000 * ([at for at, count in reads.at if count][0] - begin)


def of_shape(weights: str, extent: Extent) -> dict[str, Any]:
    """Figures of the 0.5B shape, medians of the turns."""
    free: list[float] = []
    held: list[float] = []
    rank: list[float] = []
    cold: list[float] = []
    warm: list[float] = []
    ready: list[float] = []
    tokens = extent.tokens
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        is_plain = weights in ("float32", "bfloat16", "float16")
        dtype, quantization = (weights, []) if is_plain else ("bfloat16", ["--quantization", weights])
        options = ["--model-path", name, "--load-format", "dummy", "--dtype", dtype, *quantization]
        for turn in extent.rounds(extent.turns):
            alone = child(
                supported_levels()[0].name,
                ["--shape", SHAPE, "--weights", weights, "--batches", str(STREAMS), "--no-prefill"],
            )
            rank.append(alone["step_ms"][str(STREAMS)])
            with server(*options, "--served-model-name", SHAPE, "--log-level", "error") as (port, _, ready_s):
                ready.append(ready_s)
                gap_ms(port, bodies(turn, tokens, schema=False), tokens)
                cold.append(first_ms(port, bodies(5 * turn + 1, tokens, schema=True, count=1)[0]))
                warm.append(first_ms(port, bodies(5 * turn + 2, tokens, schema=True, count=1)[0]))
                for seed in (100, 200):
                    free.append(gap_ms(port, bodies(seed + turn, tokens, schema=False), tokens))
                    held.append(gap_ms(port, bodies(seed + 50 + turn, tokens, schema=True), tokens))
            print(f"{weights}: {rank=} {free=} {held=} {cold=} {warm=}", flush=True)
    return {
        "turns": len(rank),
        "rank_step_ms": round(median(rank), 2),
        "free_gap_ms": round(median(free), 2),
        "schema_gap_ms": round(median(held), 2),
        "of_the_rank": round(median(rank) / median(free), 3),
        "schema_costs": round(median(held) / median(free) - 1, 3),
        "schema_first_token_ms": [round(median(cold)), round(median(warm))],
        "ready_s": round(median(ready), 2),
    }


def of_pocket(extent: Extent) -> dict[str, Any]:
    """One stream of the embedded model."""
    tokens = extent.tokens
    gaps: list[float] = []
    with server("--log-level", "error") as (port, _, ready_s):
        gap_ms(port, bodies(1, tokens, schema=False, count=1), tokens)
        for turn in extent.rounds(5 * extent.turns):
            gaps.append(gap_ms(port, bodies(10 + turn, tokens, schema=False, count=1), tokens))
    return {
        "turns": len(gaps),
        "tokens_s": round(1000 / median(gaps)),
        "gap_ms": round(median(gaps), 3),
        "ready_s": round(ready_s, 2),
    }


def main() -> None:
    """Measures and prints; --record keeps the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream, at least 2")
    parser.add_argument("--parts", default=",".join(PARTS), help="of these, what is measured")
    parser.add_argument("--limit-s", type=float, default=900.0, help="when no further turn begins")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS) or args.turns < 1 or args.tokens < 2:
        parser.error(f"--parts are of {', '.join(PARTS)}; --turns begins at 1, --tokens at 2")
    extent = Extent(args.turns, args.tokens, time.monotonic() + args.limit_s)
    results: dict[str, Any] = {}
    if "shape" in parts:
        results["shape"] = of_shape(args.weights, extent)
    if "pocket" in parts:
        results["pocket"] = of_pocket(extent)
    print(json.dumps(results, indent=2))
    if args.record:
        print(record("cpu_serve", {"weights": args.weights} | results))


if __name__ == "__main__":
    main()
