"""Variants of kernels: what Triton compiles of them, counted by Triton itself without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices.cuda.torch_device import HAS_GPU
from tests.models.make import make_checkpoint

ROOT = Path(__file__).parents[3]
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4, "head_dim": 64},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 128,
    },
    "deepseek_v3": {
        "num_key_value_heads": 16,
        "kv_lora_rank": 256,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
    },
}
# the most variants of attention, and of products of experts and of one row
MOST = {
    "paged_attention_kernel": 12,
    "gemm_kernel": 10,
    "align_kernel": 8,
    "count_experts_kernel": 8,
    "gemv_kernel": 3,
}

pytestmark = pytest.mark.skipif(HAS_GPU, reason="counts without a GPU")


def counted(*arguments: object) -> Any:
    """What tests.devices.cuda.variants finds, in a process of its own: here kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.cuda.variants", *map(str, arguments)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_triton_binds_the_arguments_of_every_kernel() -> None:
    """Arguments whose names Triton's generated binder uses itself would be lost."""
    bound = counted("bind")
    assert len(bound) >= 27 and {name: lost for name, lost in bound.items() if lost} == {}


def test_kernels_are_compiled_ahead_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant once, by Triton; nothing runs, and a later launch compiles nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert counted("compile") == {
        "loaded": ["act_and_mul_kernel", "rms_norm_kernel"],
        "at first launch": [],
        "reports": [["profile", done, 2] for done in range(3)],
        "is zero": True,
    }


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("llama", "fp8_e4m3"),
        pytest.param("qwen3_moe", "auto", marks=pytest.mark.full),
        ("deepseek_v3", "fp8_e4m3"),
        pytest.param("llama", "auto", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "fp8_e4m3", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "auto", marks=pytest.mark.full),
    ],
)
def test_no_variant_is_first_seen_while_serving(
    family: str, kv_dtype: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Random steps: prompts in chunks, of which some continue long rows, and decodes."""
    num_steps = 30 if family == "deepseek_v3" else 80  # the cpu takes long for the operators of MLA
    if pytestconfig.getoption("--full"):
        num_steps *= 3
    folder = make_checkpoint(family, tmp_path, **SIZES | SHAPES[family])
    found = counted("serve", folder, kv_dtype, num_steps)
    assert found["later"] == {}
    at_start = found["at start"]
    assert at_start["paged_attention_kernel"] >= 8 and at_start["sample_kernel"] == 1
    assert {name: count for name, count in at_start.items() if count > MOST.get(name, 2)} == {}


@pytest.mark.parametrize(
    ("family", "num_graphs", "least_used"),
    [("llama", 12, 7), pytest.param("deepseek_v3", 10, 4, marks=pytest.mark.full)],
)
def test_no_graph_of_cudnn_is_first_seen_while_serving(
    family: str, num_graphs: int, least_used: int, tmp_path: Path
) -> None:
    """Such steps with prompts by cuDNN, whose graphs are a double's: all are built before the first one,
    when the pages are there, and steps of the profile run build none."""
    folder = make_checkpoint(family, tmp_path, **SIZES | SHAPES[family])
    found = counted("graphs", folder, 40)
    assert found["later"] == [] and found["used at start"] == 0
    assert found["at start"] == num_graphs and found["used"] >= least_used
