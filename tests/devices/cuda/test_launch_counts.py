"""How many launches a captured decode step has, for each layer and beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices.cuda.test_variants import SHAPES, SIZES
from tests.devices.cuda.torch_device import HAS_GPU
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise

ROOT = Path(__file__).parents[3]
# model, its weights, --kernel-fusion -> launches of a layer (with DeepSeek one with experts)
LAYERS = {
    ("llama", "", "off"): 10,
    ("llama", "", "safe"): 10,
    ("llama", "", "all"): 7,
    ("llama", "fp8", "off"): 15,
    ("llama", "fp8", "safe"): 12,
    ("llama", "fp8", "all"): 9,
    ("qwen3_moe", "", "off"): 15,
    ("qwen3_moe", "", "safe"): 14,
    ("qwen3_moe", "", "all"): 10,
    ("deepseek_v3", "", "off"): 26,
    ("deepseek_v3", "", "safe"): 21,
    ("deepseek_v3", "", "all"): 16,
}
# --kernel-fusion -> launches beside the layers, of the graphs of a forward pass and of sampling at random
OTHERS = {"off": (25, 53), "safe": (9, 17), "all": (9, 17)}


def folder_of(family: str, weights: str, num_layers: int, tmp_path: Path) -> Path:
    folder = tmp_path / f"{family} {weights} {num_layers}"
    sizes: dict[str, Any] = SIZES | SHAPES[family] | {"num_hidden_layers": num_layers}
    make_checkpoint(family, folder / "plain", **sizes)
    if not weights:
        return folder / "plain"
    quantise(folder / "plain", folder, weights)
    return folder / "quantised"


def counted(cases: list[str]) -> list[dict[str, dict[str, int]]]:
    """What tests.devices.cuda.launch_counts finds, in a process of its own: here kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.cuda.launch_counts", *cases],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, dict[str, int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(HAS_GPU, reason="counts without a GPU")
def test_launches(tmp_path: Path) -> None:
    """What one more layer adds, and what is left."""
    folders = {
        (family, weights, num): folder_of(family, weights, num, tmp_path)
        for family, weights in dict.fromkeys((family, weights) for family, weights, _ in LAYERS)
        for num in (2, 3)
    }
    found = counted([f"{folders[*case[:2], num]}:{case[2]}" for case in LAYERS for num in (2, 3)])
    layers, others = {}, {}
    for case, few, many in zip(LAYERS, found[::2], found[1::2], strict=True):
        totals = [sum(graphs["forward"].values()) for graphs in (few, many)]
        layers[case] = totals[1] - totals[0]
        if case[0] == "llama" and not case[1]:
            others[case[2]] = 3 * totals[0] - 2 * totals[1], sum(few["random"].values())
    assert layers == LAYERS
    assert others == OTHERS
