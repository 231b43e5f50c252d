"""The longest gap of a stream of text while a large image is encoded on the CPU, and how long the image's
prompt waits for its first token.

    python -m bench.encode_gaps [--side 48] [--layers 16] [--threads 2]

A tiny text model decodes beside a vision tower of Qwen2-VL's layout, with random weights. Each turn asks for
another image, of `side` x `side` patches; one that was encoded alone before has shown what rows take.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import uvloop

import runtime
from bench.record import record
from tests.e2e.image_engine import Images
from tests.models.make_media import PLACEHOLDER, make_qwen_vl, picture

PATCH, MERGED = 4, 4  # pixels of a patch's side, patches of a row
TOWER = {"embed_dim": 256, "mlp_ratio": 4, "num_heads": 4}
NEW_TOKENS = 4000


def write_model(folder: Path, layers: int, side: int) -> None:
    """Configuration and tokenizer of a tiny Qwen2-VL with a larger tower, for images of up to `side` x `side`
    patches."""
    make_qwen_vl(folder, "2", max_position_embeddings=32768)
    (folder / "model.safetensors").unlink()
    for name, part, values in (
        ("config.json", "vision_config", {"depth": layers} | TOWER),
        ("preprocessor_config.json", "size", {"longest_edge": (side * PATCH) ** 2}),
    ):
        fields = json.loads((folder / name).read_text())
        fields[part] |= values
        (folder / name).write_text(json.dumps(fields))


async def gaps(engine: runtime.Engine, ends: anyio.Event, found: list[float]) -> None:
    """Appends the milliseconds between the tokens of a stream until it `ends`."""
    before = None
    async for _ in engine.stream([5, 6, 7], temperature=0, ignore_eos=True, max_new_tokens=NEW_TOKENS):
        now = time.perf_counter()
        if before is not None:
            found.append((now - before) * 1e3)
        before = now
        if ends.is_set():
            return


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Gaps with and without an image, and the image's own time with and without the stream."""
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), args.layers, args.side)
        rows = args.side**2 // MERGED
        options: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "float32",
            "num_threads": args.threads,
            "context_length": NEW_TOKENS + rows + 64,
            "max_total_tokens": 4 * (NEW_TOKENS + rows),
        }
        async with runtime.Engine(model_path=name, **options) as engine:
            images = Images(engine)
            alone: list[float] = []
            beside: list[float] = []
            longest: list[float] = []
            quiet: list[float] = []
            for turn in range(args.turns + 1):
                for is_beside in (False, True):
                    ends, found = anyio.Event(), list[float]()
                    async with anyio.create_task_group() as tasks:
                        if is_beside:
                            tasks.start_soon(gaps, engine, ends, found)
                            await anyio.sleep(0.5)
                            quiet += found
                            found.clear()
                        image = picture(2 * turn + is_beside, args.side * PATCH, args.side * PATCH)
                        begin = time.perf_counter()
                        await images.ask([9, PLACEHOLDER, 8], [image], max_new_tokens=1)
                        (beside if is_beside else alone).append((time.perf_counter() - begin) * 1e3)
                        ends.set()
                    if is_beside:
                        longest.append(max(found))
            return {
                "rows": rows,
                "gap_alone_ms": round(median(quiet), 1),
                "longest_gap_beside_an_image_ms": [round(gap, 1) for gap in longest[1:]],
                "first_token_of_an_image_alone_ms": round(median(alone[1:]), 1),
                "first_token_of_an_image_beside_ms": round(median(beside[1:]), 1),
            }


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=48, help="patches")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    results = uvloop.run(measure(parser.parse_args()))
    print(json.dumps(results, indent=2))
    record("encode_gaps", results)


if __name__ == "__main__":
    main()
