"""What images cost: encoding several in one batch and one by one, the event loop's time for one whose
encoding is cached, and gaps between the tokens of text streams while images are decoded.

    python -m bench.media encode    # a vision tower of Qwen2.5-VL's width on the CPU, random weights
    python -m bench.media cached    # a tiny Qwen2-VL on the CPU
    python -m bench.media prepare   # a small picture in the preparation process, and in a thread
    python -m bench.media streams   # the same files with the null device: loop and decoders alone

`streams` measures in turns: nothing beside the streams; images of 3840 x 2160 as JPEG in requests, which a
process of low priority sends one after the other; and as a control the same images for another server, which
shares the cores with the streams and nothing else.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import uvloop
from torch.nn.functional import linear

import runtime
from bench.media_preparation import preparation
from bench.media_streams import picture, streams
from bench.record import record
from bench.serve import get, server
from runtime.devices.cpu.device import open_device
from runtime.layers.weight import named_weights
from runtime.media_kind import MediaKind
from runtime.messages.media import MediaSource, MediaValues
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.models.vision.open_encoder import open_encoder
from runtime.models.vision.slices import finish
from tests.devices.drive import start_rank
from tests.models.make_media import PLACEHOLDER, make_qwen_vl, name_placeholder

BATCH = 8
STEP_S = 0.005
TOWER = QwenVlEncoder(
    placeholder_id=0,
    video_placeholder_id=1,
    hidden_size=1280,
    intermediate_size=3420,
    num_layers=4,
    num_heads=16,
    patch_size=14,
    num_frames=2,
    merge_size=2,
    activation="silu",
    output_size=2048,
    is_gated=True,
    window_patches=8,
    full_layers=(3,),
)
TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}<|image|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}"
)


def encode(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a batch of images in one call and in a call each, by the patches of a side, and how
    many GFLOP/s of products that is, next to products alone of as many rows. With one thread times are CPU
    time, which other work on the machine disturbs less."""
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    device = open_device(start_rank(""), 0, torch.float32)
    encoder = open_encoder(device, torch.float32, TOWER)
    for _, weight in named_weights(encoder):  # type: ignore[arg-type]
        weight.tensor.normal_(0, 0.02)
    rng, found = np.random.default_rng(0), {}
    for side in args.sides:
        media = [image_of(rng, index, side) for index in range(BATCH)]
        together: list[float] = []
        apart: list[float] = []
        with torch.inference_mode():
            for _ in range(args.runs + 1):
                begin = clock()
                finish(encoder.slices(media))
                middle = clock()
                for one in media:
                    finish(encoder.slices([one]))
                together.append((middle - begin) * 1e3)
                apart.append((clock() - middle) * 1e3)
        batch, single = median(together[1:]), median(apart[1:])
        found[f"{side}x{side} patches"] = {
            "batch_ms": round(batch, 1),
            "one_by_one_ms": round(single, 1),
            "ratio": round(single / batch, 2),
            "batch_gflops": round(BATCH * image_flops(side) / batch / 1e6),
            "one_by_one_gflops": round(BATCH * image_flops(side) / single / 1e6),
            "products_of_batch_gflops": product_gflops(BATCH * side * side, args.runs, clock),
            "products_of_one_gflops": product_gflops(side * side, args.runs, clock),
        }
    return found


def image_flops(side: int) -> float:
    """Floating-point operations of the products with weights for an image of side x side patches."""
    size, merged = TOWER.hidden_size, TOWER.hidden_size * TOWER.merge_size**2
    block = size * (4 * size + 3 * TOWER.intermediate_size)
    merger = merged * (merged + TOWER.output_size) / TOWER.merge_size**2
    patch = 3 * TOWER.num_frames * TOWER.patch_size**2 * size
    return 2.0 * side * side * (TOWER.num_layers * block + merger + patch)


def product_gflops(rows: int, runs: int, clock: Callable[[], float]) -> int:
    """Speed of the largest product of a block with so many rows."""
    ins, outs = TOWER.hidden_size, 2 * TOWER.intermediate_size
    x, weight, count = torch.randn(rows, ins), torch.randn(outs, ins), max(512 // rows, 1)
    spent: list[float] = []
    with torch.inference_mode():
        for _ in range(runs + 1):
            begin = clock()
            for _ in range(count):
                linear(x, weight)
            spent.append(clock() - begin)
    return round(2.0 * rows * ins * outs * count / median(spent[1:]) / 1e9)


def image_of(rng: np.random.Generator, id: int, side: int) -> MediaValues:
    """An image of side x side patches."""
    shape = (side * side, 3, TOWER.patch_size, TOWER.patch_size)
    return MediaValues(
        id=id,
        values=rng.standard_normal(shape, dtype=np.float32).ravel(),
        shape=shape,
        grid=(1, side, side),
        num_rows=side * side // TOWER.merge_size**2,
    )


def write_model(folder: Path) -> None:
    """A tiny Qwen2-VL with a chat template."""
    make_qwen_vl(folder, "2")
    name_placeholder(folder, "<|image|>", TEMPLATE, PLACEHOLDER)


async def cached(args: argparse.Namespace) -> dict[str, Any]:
    """Time of the loop's thread for a request with an image that was seen before, and for one of equally many
    tokens without. Requests come one after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        image = picture(256, 256, "PNG")
        options: dict[str, Any] = {"context_length": 512, "dtype": "float32", "num_threads": 1}
        async with runtime.Engine(model_path=name, **options) as engine:
            greedy = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
            source = MediaSource(kind=MediaKind.IMAGE, param="image", base64=image)
            prompt = [9, 8, PLACEHOLDER, 7]
            first = await engine.generate(prompt, media=[source], **greedy)
            assert first.finish is not None
            plain = list(range(20, 20 + first.finish.prompt_tokens))
            found: dict[str, Any] = {}
            for label, given in (("image", (prompt, [source])), ("text", (plain, []))):
                spent: list[float] = []
                for _ in range(args.requests):
                    begin = time.thread_time()
                    await engine.generate(given[0], media=given[1], **greedy)
                    spent.append((time.thread_time() - begin) * 1e3)
                found[f"{label}_loop_ms"] = round(median(spent), 2)
            scheduler = engine._core.replicas[0].scheduler
            assert scheduler is not None and scheduler.planner.encodings is not None
            found["encoded"] = scheduler.planner.encodings.num_encoded
        return found


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("encode", "cached", "prepare", "streams"))
    parser.add_argument("--sides", type=int, nargs="+", default=[4, 8, 16, 32], help="patches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    args = parser.parse_args()
    if args.what == "encode":
        results = encode(args)
    elif args.what == "cached":
        results = uvloop.run(cached(args))
    elif args.what == "prepare":
        with tempfile.TemporaryDirectory() as name:
            write_model(Path(name))
            results = preparation(Path(name), args.requests)
    else:
        with tempfile.TemporaryDirectory() as name:
            write_model(Path(name))
            options = ("--model-path", name, "--device", "null", "--served-model-name", "x")
            options += ("--null-step-s", str(STEP_S), "--log-level", "error")
            with server(*options) as (port, pid, _), server(*options) as (other_port, _, _):
                assert get(port, "/health")[0] == get(other_port, "/health")[0] == 200
                results = streams(port, pid, other_port, args.turns, args.seconds)
    print(json.dumps(results, indent=2))
    record(f"media_{args.what}", results)


if __name__ == "__main__":
    main()
