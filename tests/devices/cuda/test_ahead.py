"""Kernels compiled for an H200, because the interpreter takes more than the compiler does; and the benches,
dry."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices.cuda.torch_device import HAS_GPU

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(HAS_GPU, reason="a GPU compiles them itself")
def test_kernels_compile_for_a_card(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    names = ["llama", "rows", "logits", "hopper", "adapted", "states"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.cuda.ahead", "90", *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["kernel"] for one in made} >= {
        "paged_attention_kernel",
        "merge_splits_kernel",
        "store_kv_kernel",
        "prepare_heads_kernel",
        "rms_norm_kernel",
        "add_rms_norm_kernel",
        "rotary_kernel",
        "act_and_mul_kernel",
        "sample_kernel",
        "mask_kernel",
        "copy_rows_kernel",
        "gemm_kernel",
        "add_splits_kernel",
        "quantize_rows_kernel",
        "quantize_groups_kernel",
        "shrink_kernel",
        "expand_kernel",
        "count_experts_kernel",
        "align_kernel",
        "sum_experts_kernel",
        "topk_kernel",
        "scan_kernel",
        "delta_kernel",
    }
    assert not [one for one in made if one["spilled_bytes"] or one["shared_bytes"] > 227 << 10]
    assert [one["wgmma"] for one in made if one["kernel"] == "paged_attention_kernel"] == [False, True]
    large = [one for one in made if one["kernel"] == "gemm_kernel" and int(one["constants"]["M"]) >= 64]
    assert len(large) == 4 and all(one["wgmma"] for one in large)
