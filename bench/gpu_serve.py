"""The server on a GPU: seconds to the first token of a model with Llama-3.1-8B's shape from files, and
streams over HTTP compared with one rank without the server.

    python -m bench.gpu_serve                            # on a GPU; two minutes, to gpu.jsonl
    python -m bench.gpu_serve --folder FOLDER            # the checkpoint of 16 GB is written there, and stays
    python -m bench.gpu_serve --folder FOLDER --write    # writes it and does no more
    python -m bench.gpu_serve --dry                      # every line, tiny, without a GPU
"""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import runtime.pocket
from bench import load
from bench.gpu_model import Model, folder_of, pages_for
from bench.lines import Figures, Lines
from bench.record import results_folder
from bench.serve import get, server
from bench.shapes import SHAPES
from runtime.devices.cuda.interpret import use_interpreter
from runtime.models.config.model_config import ModelConfig, read_config

STREAMS = (1, 16, 64, 256)
PROMPT, TOKENS = 128, 128


def tensor(*shape: int) -> torch.Tensor:
    """Random numbers, which repeat in large ones."""
    numbers = torch.empty(min(1 << 20, torch.Size(shape).numel())).uniform_(-0.05, 0.05).bfloat16()
    return numbers.repeat(-(-torch.Size(shape).numel() // len(numbers)))[: torch.Size(shape).numel()].view(
        shape
    )


def write_llama(folder: Path, config: ModelConfig) -> None:
    """A checkpoint of the shape, a file a layer."""
    hidden, heads, kv = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    inner = config.intermediate_size
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        save_file(
            {
                f"{name}self_attn.q_proj.weight": tensor(heads, hidden),
                f"{name}self_attn.k_proj.weight": tensor(kv, hidden),
                f"{name}self_attn.v_proj.weight": tensor(kv, hidden),
                f"{name}self_attn.o_proj.weight": tensor(hidden, heads),
                f"{name}mlp.gate_proj.weight": tensor(inner, hidden),
                f"{name}mlp.up_proj.weight": tensor(inner, hidden),
                f"{name}mlp.down_proj.weight": tensor(hidden, inner),
                f"{name}input_layernorm.weight": torch.ones(hidden).bfloat16(),
                f"{name}post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
            },
            folder / f"model-{layer:03}.safetensors",
        )
    save_file(
        {
            "model.embed_tokens.weight": tensor(config.vocab_size, hidden),
            "lm_head.weight": tensor(config.vocab_size, hidden),
            "model.norm.weight": torch.ones(hidden).bfloat16(),
        },
        folder / "model-rest.safetensors",
    )


def bodies(count: int, base: int, tokens: int) -> list[tuple[str, dict[str, object]]]:
    """Unique prompts: nothing comes from the prefix cache."""
    return [
        (
            "/v1/completions",
            {
                "model": "bench",
                "prompt": [(base + i * 3 + k * 7) % 290 for k in range(PROMPT)],
                "max_tokens": tokens,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
                "cache_salt": f"{base} {i}",
            },
        )
        for i in range(count)
    ]


def first_token(port: int) -> None:
    """Returns at the first token of one stream."""
    ((path, body),) = bodies(1, 10**6, 4)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    while b"data: " not in response.readline():
        pass
    connection.close()


def alone(folder: Path, *, is_dry: bool) -> dict[int, float]:
    """Tokens a second of the rank without the rest, by number of sequences."""
    most, length, steps = (2, PROMPT, 3) if is_dry else (max(STREAMS), PROMPT + TOKENS // 2, 40)
    model = Model.open(
        folder,
        slots=most,
        longest=1024,
        tokens=pages_for(most, length, steps),
        step_tokens=most + 64,
        is_dry=is_dry,
    )
    found = {}
    for rows in (2,) if is_dry else STREAMS:
        model.capture(rows)
        model.begin([length] * rows, steps)
        found[rows] = rows / model.decode(rows, steps)
    model.close()
    return found


@contextmanager
def checkpoint(folder: Path | None, *, is_dry: bool) -> Iterator[Path]:
    """A folder with the checkpoint, which is written where it is not there yet; None: a temporary one."""
    if folder is None:
        with folder_of("llama-3.1-8b", is_dry=is_dry) as temporary:
            write_llama(temporary, read_config(temporary))
            yield temporary
        return
    if not (folder / "model-rest.safetensors").exists():  # the last file of it
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
        write_llama(folder, read_config(folder))
    yield folder


def start_phases(port: int) -> dict[str, float]:
    """Seconds of each phase of the first rank's start."""
    replica = json.loads(get(port, "/server_info")[1])
    return {name: round(seconds, 2) for name, seconds in _find(replica, "phases_s").items()}


def _find(value: Any, name: str) -> Any:
    """The first value of that name in nested JSON, an empty dictionary where there is none."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and name in value:
        return value[name]
    return next((found for one in inner if (found := _find(one, name))), {})


def measure(found: dict[str, Any], folder: Path | None = None, *, is_dry: bool) -> dict[str, Any]:
    """Adds the start to `found`, then streams by their number."""
    device = (
        ["--device", "cpu", "--dtype", "float32"]
        if is_dry
        else ["--device", "cuda", "--cuda-graph-bs", *map(str, STREAMS), "--max-running-requests", "256"]
    )
    with checkpoint(folder, is_dry=is_dry) as path:
        engine = alone(path, is_dry=is_dry)
        begin = time.perf_counter()
        with server(
            "--model-path",
            str(path),
            "--tokenizer-path",
            str(Path(runtime.pocket.__file__).parent),
            "--served-model-name",
            "bench",
            "--context-length",
            "2048",
            "--log-level",
            "error",
            *device,
        ) as (port, pid, ready_s):
            first_token(port)
            found["ready_s"] = round(ready_s, 2)
            found["phases_s"] = start_phases(port)
            found["first_token_s"] = round(time.perf_counter() - begin, 2)
            time.sleep(0 if is_dry else 10)  # captures take place while nothing is to do
            for streams, own in engine.items():
                load.run(port, pid, streams=streams, bodies=bodies(streams, 0, 16), tokens_each=16)
                run = load.run(
                    port,
                    pid,
                    streams=streams,
                    bodies=bodies(2 * streams, 1000 * streams, TOKENS),
                    tokens_each=TOKENS,
                )
                found[f"{streams} streams"] = run.figures | {
                    "engine_tokens_per_s": round(own),
                    "of_engine": round(run.tokens / run.wall_s / own, 3),
                }
    return found


def main() -> int:
    """Measures the server. Returns 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.dry:
        use_interpreter()
    if args.write:
        with checkpoint(args.folder, is_dry=args.dry):
            return 0
    if not args.dry and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    lines = Lines(None if args.dry else results_folder() / "gpu.jsonl")
    measure(Figures("http", lines), args.folder, is_dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
