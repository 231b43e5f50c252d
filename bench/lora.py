"""Throughput with LoRA adapters: tokens a second of 8 streams with none, one and four adapters, on a model
with random weights.

    python -m bench.lora [--rank 16]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import anyio

from runtime import Engine
from tests.models.make import make_checkpoint
from tests.models.make_adapter import make_adapter

STREAMS, TOKENS = 8, 64
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


async def tokens_per_s(engine: Engine, names: list[str]) -> float:
    """Tokens per second of streams that take the adapters in turn."""

    async def stream(index: int) -> None:
        await engine.generate(
            [index + 1] * 16,
            temperature=0,
            ignore_eos=True,
            max_new_tokens=TOKENS,
            lora_path=names[index % len(names)],
        )

    begin = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for index in range(STREAMS):
            tasks.start_soon(stream, index)
    return STREAMS * TOKENS / (time.perf_counter() - begin)


async def measure(folder: Path, rank: int, rounds: int) -> dict[str, float]:
    """The best of `rounds`; `base` is a server without adapters."""
    base = make_checkpoint("qwen3", folder / "base", **SIZES)
    paths = [make_adapter(base, folder / name, seed=i, rank=rank) for i, name in enumerate("wxyz")]
    loads = {"no adapter": [""], "one": ["w"], "four": list("wxyz"), "half of them one": ["", "w"]}
    options = {
        "model_path": str(base),
        "context_length": 256,
        "max_total_tokens": 4096,
        "num_threads": 1,
        "disable_radix_cache": True,
    }
    rates: dict[str, float] = {}
    async with Engine(**options) as engine:
        rates["base"] = max([await tokens_per_s(engine, [""]) for _ in range(rounds)])
    async with Engine(lora_paths=tuple(f"{path.name}={path}" for path in paths), **options) as engine:
        for what, names in loads.items():
            rates[what] = max([await tokens_per_s(engine, names) for _ in range(rounds)])
    return {what: round(value, 1) for what, value in rates.items()}


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(anyio.run(measure, Path(folder), args.rank, args.rounds), indent=1))


if __name__ == "__main__":
    main()
