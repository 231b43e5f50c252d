"""How fast weights are read, next to what the page cache gives in the same run; and peak memory.

A checkpoint of random bfloat16 weights is written to a temporary folder. Then in turns: its bytes are read
by as many threads into memory that was touched before, into memory that was not, and into such memory in
huge pages; the loader fills a model with them (without what a device makes of weights). At last a fresh
process loads them once, and says what it had in memory at most.

    python -m bench.loading [--mb 400] [--runs 5] [--threads 4]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.record import record
from runtime.devices.cpu.device import open_device
from runtime.devices.progress import without_progress
from runtime.huge_pages import prefer_huge_pages
from runtime.layers.weight import named_weights
from runtime.messages.ranks import Reading, StartRank
from runtime.models.checkpoint import Checkpoint
from runtime.models.config.model_config import read_config
from runtime.models.config.registry import model_class
from runtime.models.loader import allocate, fill_from_files, take

PIECE = 1 << 24
HIDDEN, LAYERS_BYTES = 1024, 2 * (4 * 1024**2 + 3 * 1024 * 4096)


def write_checkpoint(folder: Path, num_bytes: int) -> None:
    """A Llama of about so many bytes, in files of about 100 MB."""
    num_layers = max(1, num_bytes // LAYERS_BYTES)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 4096,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 512,
        "dtype": "bfloat16",
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (4096, HIDDEN)}
    shapes |= {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "kvo"}
    shapes |= {"mlp.up_proj": (4096, HIDDEN), "mlp.down_proj": (HIDDEN, 4096)}
    shapes |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    tensors = {
        f"model.{name}.weight": shape
        for name, shape in (("embed_tokens", (512, HIDDEN)), ("norm", (HIDDEN,)))
    }
    files = [tensors | {"lm_head.weight": (512, HIDDEN)}]
    for i in range(num_layers):
        if i % 3 == 0:
            files.append({})
        files[-1] |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    for i, file in enumerate(files):
        numbers = {name: torch.rand(shape).bfloat16() for name, shape in file.items()}
        save_file(numbers, folder / f"model-{i:05}.safetensors")


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def read_all(files: list[Path], targets: list[torch.Tensor], num_threads: int) -> None:
    """Reads whole files into memory."""
    with ThreadPoolExecutor(num_threads) as pool:
        for path, target in zip(files, targets, strict=True):
            memory = memoryview(target.numpy())
            descriptor = os.open(path, os.O_RDONLY)
            pieces = range(0, len(memory), PIECE)
            list(pool.map(lambda at: os.preadv(descriptor, [memory[at : at + PIECE]], at), pieces))
            os.close(descriptor)


def in_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory that was not touched, uint8, in huge pages where the system gives them."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    prefer_huge_pages(memory.data_ptr(), num_bytes)
    return memory


def load(folder: Path, num_threads: int) -> None:
    """Fills a model that is allocated here."""
    start = StartRank(
        device="cpu", model_path=str(folder), dtype="auto", load_format="auto", tp_size=1, page_size=16,
        max_slots=1, max_len=16, max_step_tokens=16, memory_fraction=0.5, max_total_tokens=None,
        num_threads=num_threads, rendezvous="", seed=0,
    )  # fmt: skip
    config = read_config(folder)
    model = model_class(config)(open_device(start, 0, torch.bfloat16), torch.bfloat16, config)
    checkpoint = Checkpoint(folder=folder, reading=Reading(num_threads=num_threads))
    allocate(model, config, checkpoint)
    targets = {(name, part): weight for name, weight in named_weights(model) for part in weight.sources}
    with torch.inference_mode():
        fill_from_files(
            targets, model, config, checkpoint, without_progress, lambda *one: take(frozenset(), *one)
        )


def peak_bytes() -> int:
    """Most memory that this process had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def peak_of_a_load(folder: Path, num_threads: int) -> dict[str, int]:
    """Peak memory of a fresh process before and after it loads."""
    code = (
        "import sys, json; from pathlib import Path; from bench.loading import load, peak_bytes\n"
        "import runtime.models.llama; before = peak_bytes(); load(Path(sys.argv[1]), int(sys.argv[2]))\n"
        "print(json.dumps({'before': before, 'after': peak_bytes()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(num_threads)], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(prog="bench.loading", description=__doc__)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, arguments.mb * 10**6)
        files = sorted(folder.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        touched = [torch.zeros(path.stat().st_size, dtype=torch.uint8) for path in files]
        cached, fresh, huge, loaded = [], [], [], []
        for _ in range(arguments.runs):
            cached.append(timed(lambda: read_all(files, touched, arguments.threads)))
            fresh.append(
                timed(
                    lambda: read_all(
                        files,
                        [torch.empty(len(one), dtype=torch.uint8) for one in touched],
                        arguments.threads,
                    )
                )
            )
            huge.append(
                timed(
                    lambda: read_all(files, [in_huge_pages(len(one)) for one in touched], arguments.threads)
                )
            )
            loaded.append(timed(lambda: load(folder, arguments.threads)))
        peak = peak_of_a_load(folder, arguments.threads)
    rates = {
        name: round(size / min(seconds) / 1e9, 2)
        for name, seconds in (("touched", cached), ("fresh", fresh), ("huge", huge), ("load", loaded))
    }
    results = {
        "bytes": size,
        "gb_per_s": rates,
        "load_to_touched": round(min(cached) / min(loaded), 3),
        "load_to_fresh": round(min(fresh) / min(loaded), 3),
        "load_to_huge": round(min(huge) / min(loaded), 3),
        "peak_above_weights_mb": round((peak["after"] - peak["before"] - size) / 1e6, 1),
    }
    print(json.dumps(results, indent=1))
    if not arguments.dry:
        print(record("loading", results))


if __name__ == "__main__":
    main()
