"""Every operator that a rank calls in a step, in bf16, kept in tests/ascend/golden: a change of calls is seen
in review."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.devices.ascend import mla_prolog as prolog
from runtime.devices.ascend.mla_prolog import Limits
from tests.ascend.test_exact import LATENT
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import make_checkpoint

pytestmark = pytest.mark.ascend


def begin(folder: Path, options: dict[str, Any] | None = None, **params: Any) -> tuple[Planner, Row, Row]:
    executor, ready = start(
        folder,
        device="npu",
        page_size=128,
        dtype="bfloat16",
        max_len=512,
        max_total_tokens=2048,
        device_options=options or {},
    )
    planner = Planner(executor, ready, 128)
    return planner, planner.row(0, [5, 9, 100], sampling(**params)), planner.row(1, [7] * 200, sampling())


def record(name: str, planner: Planner, decodes: list[Row], extends: list[tuple[Row, int]]) -> None:
    from tests.ascend.recorder import compare, recorded

    plan = planner.plan(decodes, extends)
    with recorded() as trace:
        planner.executor.launch(plan).result()
    compare(name, trace.text())


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 128}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 128}),
    "gpt-oss": ("gpt_oss", {"head_dim": 128, "num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "deepseek-v3": ("deepseek_v3", LATENT | {"num_hidden_layers": 2}),  # one dense layer, one of experts
}


def test_pages_in_nz(tmp_path: Path) -> None:
    """Norms, rotary positions and the store of a layer are one operator."""
    planner, short, long = begin(make_checkpoint("qwen3", tmp_path, head_dim=128), {"nz_cache": True})
    planner.run([], [(short, 3)])
    record("qwen3-nz-mixed", planner, [short], [(long, 200)])
    record("qwen3-nz-decode", planner, [short, long], [])


SMALL = {"deepseek-v3"}  # whose latents are


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[pytest.mark.lenient] if model in SMALL else []) for model in MODELS]
)
def test_steps(model: str, tmp_path: Path) -> None:
    """A prompt beside a decode, then decodes, greedy."""
    family, overrides = MODELS[model]
    planner, short, long = begin(make_checkpoint(family, tmp_path, **overrides))
    planner.run([], [(short, 3)])
    record(f"{model}-mixed", planner, [short], [(long, 200)])
    record(f"{model}-decode", planner, [short, long], [])


@pytest.mark.lenient
@pytest.mark.parametrize(
    ("name", "options"),
    [("fused", {"nz_cache": True}), ("prolog", {"mla_prolog": True, "nz_cache": True, "multi_stream": True})],
)
def test_latents_in_fused_operators(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sizes that are documented in place of these, DeepSeek-V3's steps are so."""
    for limits in ("CACHE_LIMITS", "FUSED_LIMITS"):
        monkeypatch.setattr(prolog, limits, Limits((torch.bfloat16,), {}))
    sizes = LATENT | {"num_hidden_layers": 2, "q_lora_rank": 32, "kv_lora_rank": 32}
    planner, short, long = begin(make_checkpoint("deepseek_v3", tmp_path, **sizes), options)
    planner.run([], [(short, 3)])
    record(f"deepseek-v3-{name}-mixed", planner, [short], [(long, 200)])
    record(f"deepseek-v3-{name}-decode", planner, [short, long], [])


def test_a_captured_step(tmp_path: Path) -> None:
    """What the host does for a replay: one copy, lengths for each layer, two graphs."""
    executor, ready = start(
        make_checkpoint("qwen3", tmp_path, head_dim=128),
        device="npu",
        page_size=128,
        dtype="bfloat16",
        max_len=512,
        max_total_tokens=2048,
        graph_sizes=[2],
    )
    executor.capture(2)
    planner = Planner(executor, ready, 128)
    rows = [planner.row(0, [5, 9, 100], sampling()), planner.row(1, [7] * 200, sampling())]
    for row in rows:
        planner.prefill(row)
    record("qwen3-captured", planner, rows, [])


def test_windows_and_a_filtered_choice(tmp_path: Path) -> None:
    planner, short, long = begin(
        make_checkpoint("mistral", tmp_path, sliding_window=150, num_hidden_layers=1),
        temperature=0.7,
        top_p=0.9,
        top_k=20,
    )
    planner.run([], [(short, 3), (long, 199)])
    record("window-decode", planner, [short], [(long, 1)])
