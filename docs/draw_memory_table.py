"""Writes docs/model_memory.md, what known models take: `python docs/draw_memory_table.py`.

docs/model_configs.json has the fields of each model's config.json that decide it; the figures are those of
`runtime check memory`, which reads the same fields and no weights. A test compares the page with them.
"""

import json
import tempfile
from pathlib import Path

from msgspec import Struct

from runtime.json_value import Fields
from runtime.models.config.model_config import read_config
from runtime.options.facts import MachineFacts
from runtime.options.footprint import Footprint, Stored, footprint
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "model_memory.md"
CONFIGS = ROOT / "docs" / "model_configs.json"

GPTQ: Fields = {"quant_method": "gptq", "group_size": 128, "desc_act": False, "sym": True}
# name of a column -> quantization_config of the checkpoint
WEIGHTS: dict[str, Fields | None] = {"bf16": None, "int8": {**GPTQ, "bits": 8}, "int4": {**GPTQ, "bits": 4}}
UNQUANTIZED = ("GptOssForCausalLM",)  # no checkpoints in these formats exist
MEMORY_GB = (8, 16, 24, 48, 80)  # 10^9 bytes; boards of 24 GiB and 80 GiB have a little more
FRACTION = 0.9  # of the memory, for weights and pages
LEAST_TOKENS = 4096  # that must have room for a model to count as fitting

HEAD = """# What models take

Written by `python docs/draw_memory_table.py` from the fields of each model's `config.json`, with the arithmetic of `runtime check memory`, which
says the same of your model, options and machine before anything is loaded (`runtime check memory --model-path DIR`).

- GB are 10^9 bytes. `bf16` are weights as published; `int8` and `int4` those of a GPTQ checkpoint with groups of 128, whose embeddings and head stay
  in bf16. Weights in fp8 take what int8 does; AWQ takes what int4 does.
- *1k tokens* is what 1000 tokens of context take in the cache, in bf16; `--kv-cache-dtype fp8_e4m3` halves it. Layers with a sliding window are
  counted in full there; they keep no more than their window.
- The right columns: the finest of the three that fits into that much memory on one device, and the tokens of context that have room then, in all
  requests together, with `--mem-fraction-static 0.9`; a dash where there would be no room for 4096 tokens. With `--tensor-parallel-size N` each
  device takes an Nth of weights and cache (DeepSeek's cache is not divided).
"""


class Take(Struct, frozen=True):
    """What a model takes in one form of its weights: bytes of weights and of one token, and tokens that have
    room in each of MEMORY_GB."""

    weights_bytes: int
    token_bytes: int
    tokens: tuple[int, ...]


def configs() -> dict[str, Fields]:
    """The config.json fields of each model."""
    return dict(json.loads(CONFIGS.read_text("utf-8")))


def measure(config: Fields, form: str) -> Take:
    """What the model of `config` takes with weights in `form`, a key of WEIGHTS."""
    with tempfile.TemporaryDirectory() as folder:
        quantization = {"quantization_config": WEIGHTS[form]} if WEIGHTS[form] else {}
        (Path(folder) / "config.json").write_text(json.dumps({**config, **quantization}))
        found = [_footprint(folder, gigabytes * 10**9) for gigabytes in MEMORY_GB]
    rooms = [
        one.pool_tokens if one.total_bytes <= size * 10**9 and one.num_pages > 1 else 0
        for one, size in zip(found, MEMORY_GB, strict=True)
    ]
    return Take(found[0].weights_bytes, found[0].token_bytes, tuple(rooms))


def _footprint(folder: str, memory_bytes: int) -> Footprint:
    machine = MachineFacts(cores=8, memory_bytes=memory_bytes, entropy=0)
    options = {
        "model_path": folder,
        "device": "cpu",
        "dtype": "bfloat16",
        "mem_fraction_static": FRACTION,
        "max_running_requests": 256,
    }
    return footprint(
        plan_for(from_values(options), machine), read_config(folder), machine, Stored(0, 0, 0, "")
    )


def page() -> str:
    """The text of docs/model_memory.md."""
    sizes = [f"{size} GB" for size in MEMORY_GB]
    lines = [_row(["model", *WEIGHTS, "1k tokens", *sizes]), _row(["---"] * (len(WEIGHTS) + 2 + len(sizes)))]
    for name, config in configs().items():
        forms = ["bf16"] if config["architectures"][0] in UNQUANTIZED else list(WEIGHTS)
        takes = {form: measure(config, form) for form in forms}
        weights = [_gigabytes(takes[form].weights_bytes) if form in takes else "" for form in WEIGHTS]
        fits = [_fit(takes, i) for i in range(len(MEMORY_GB))]
        lines.append(_row([name, *weights, _megabytes(1000 * takes["bf16"].token_bytes), *fits]))
    return HEAD + "\n" + "\n".join(lines) + "\n"


def _fit(takes: dict[str, Take], i: int) -> str:
    """The finest form that fits into the i-th memory, with the tokens that have room."""
    for form, take in takes.items():
        if take.tokens[i] >= LEAST_TOKENS:
            return f"{form}, {_tokens(take.tokens[i])}"
    return "–"


def _tokens(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1_000_000 else f"{count // 1000}k"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count < 100e9 else f"{count / 1e9:.0f} GB"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
