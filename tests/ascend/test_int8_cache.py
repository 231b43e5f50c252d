"""Keys and values in int8 on an NPU: greedy tokens in float32 are those that transformers has with keys and
values rounded alike, with graphs, prefixes that are found again, and pages of host memory."""

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from runtime import Engine
from runtime.errors import OptionsError, StartError
from tests.ascend.test_serve import OPTIONS, PROMPTS, SHARED
from tests.e2e.test_exact import COUNT, run_all
from tests.metrics.read import sample
from tests.models.make import make_checkpoint

pytestmark = [
    pytest.mark.ascend,
    pytest.mark.lenient,
    pytest.mark.anyio,
    pytest.mark.usefixtures("forked_children"),
]

SCALE = 0.03  # of layer 0; those behind it have larger ones
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of 128": ("qwen3", {"head_dim": 128}),
    "windows": ("mistral", {"sliding_window": 70, "head_dim": 128}),
}


class RoundedCache(DynamicCache):
    """Keys and values as an int8 cache has them."""

    def update(self, key: Any, value: Any, layer_idx: int, *args: Any, **named: Any) -> Any:
        scale = SCALE * (1 + layer_idx)
        rounded = [(x / scale).round().clamp(-128, 127) * scale for x in (key, value)]
        return super().update(*rounded, layer_idx, *args, **named)


def greedy(folder: Path, prompts: list[list[int]], *, rounds: bool = True) -> list[list[int]]:
    """transformers' continuations."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    name = next(name for name in ("cache", "past_key_values") if name in signature(model.forward).parameters)
    found = []
    for prompt in prompts:
        cache, tokens, given = RoundedCache() if rounds else DynamicCache(), [], prompt
        with torch.inference_mode():
            for _ in range(COUNT):
                out = model(torch.tensor([given]), use_cache=True, **{name: cache})
                given = [int(out.logits[0, -1].argmax())]
                tokens += given
        found.append(tokens)
    return found


def write_scales(folder: Path, ranks: int, dtype: str = "int8") -> str:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    scales = {rank: {layer: SCALE * (1 + layer) for layer in range(layers)} for rank in range(ranks)}
    path = folder / "scales.json"
    path.write_text(json.dumps({"kv_cache": {"dtype": dtype, "scaling_factor": scales}}))
    return str(path)


@pytest.mark.parametrize("model", MODELS)
async def test_tokens_are_those_of_rounded_keys(model: str, tmp_path: Path) -> None:
    family, overrides = MODELS[model]
    folder = make_checkpoint(family, tmp_path, **overrides)
    expected = greedy(folder, PROMPTS)
    assert expected != greedy(folder, PROMPTS, rounds=False), "rounding matters"
    options = OPTIONS | {
        "kv_cache_dtype": "int8",
        "quantization_param_path": write_scales(folder, 1),
        "chunked_prefill_size": 50,
        "cuda_graph_bs": (2, 4),
    }
    async with Engine(model_path=str(folder), **options) as engine:
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == expected
        assert sample(engine.metrics(), "runtime_capture_failures_total") == 0


async def test_two_ranks_and_host_memory(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, head_dim=32)
    prompts = [[first, *SHARED, *SHARED] for first in (1, 2, 3)]
    expected = greedy(folder, prompts)
    options = OPTIONS | {
        "kv_cache_dtype": "int8",
        "quantization_param_path": write_scales(folder, 2),
        "tensor_parallel_size": 2,
        "max_total_tokens": 512,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 3.0,
    }
    async with Engine(model_path=str(folder), **options) as engine:
        for _ in range(2):
            assert [(await run_all(engine, [prompt]))[0] for prompt in prompts] == expected
        assert sample(engine.metrics(), "runtime_host_loaded_tokens_total") > 0


@pytest.mark.parametrize(
    ("family", "overrides", "options", "message"),
    [
        ("qwen3", {}, {"quantization_param_path": None}, "needs the scales.*--quantization-param-path"),
        ("qwen3", {"head_dim": 16}, {}, "heads of size 16.*multiples of 32"),
        ("deepseek_v3", {}, {}, "latent attention"),
    ],
    ids=["no scales", "small heads", "latents"],
)
async def test_others_are_refused(
    family: str, overrides: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, **overrides)
    given = {"kv_cache_dtype": "int8", "quantization_param_path": write_scales(folder, 1)} | options
    with pytest.raises((OptionsError, StartError), match=message):
        async with Engine(model_path=str(folder), **OPTIONS | given):
            pass
