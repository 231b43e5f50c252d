"""The server on a GPU: seconds to the first token of a model with Llama-3.1-8B's shape from files, and
streams over HTTP compared with one rank without the server."""

import http.client
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import runtime.pocket
from bench import load
from bench.gpu_model import Model, folder_of, pages_for
from bench.serve import server
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
        model.begin(rows, length, steps)
        found[rows] = rows / model.decode(rows, length, steps)
    model.close()
    return found


def measure(found: dict[str, Any], *, is_dry: bool) -> dict[str, Any]:
    """Adds the start to `found`, then streams by their number."""
    device = (
        ["--device", "cpu", "--dtype", "float32"]
        if is_dry
        else ["--device", "cuda", "--cuda-graph-bs", *map(str, STREAMS), "--max-running-requests", "256"]
    )
    with folder_of("llama-3.1-8b", is_dry=is_dry) as folder:
        write_llama(folder, read_config(folder))
        engine = alone(folder, is_dry=is_dry)
        begin = time.perf_counter()
        with server(
            "--model-path",
            str(folder),
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
