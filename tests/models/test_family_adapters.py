"""LoRA adapters of families whose modules have other names, no gate, or rows that are reordered for the
rotation: the tokens of the model with its adapter merged, beside a sequence without one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.messages.lora import AdapterSetup, LoadAdapter, LoraAssignment
from runtime.models.config.lora_targets import lora_modules
from runtime.models.config.model_config import read_config
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint
from tests.models.make_adapter import ALL, ATTENTION, make_adapter, merge
from tests.models.reference import Reference

# family -> modules of its adapters, by their names in checkpoints
TARGETS: dict[str, tuple[str, ...]] = {
    "arcee": (*ATTENTION, "up_proj", "down_proj"),
    "cohere": ALL,  # pairs of dimensions rotate, and blocks are in parallel
    "ernie4_5": ALL,
    "falcon": ("dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gemma2": ALL,
    "glm": ATTENTION,  # pairs in one half of each head; gate and up are one tensor
    "glm4_moe": ATTENTION,
    "gpt_neox": ("dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt_oss": ATTENTION,
    "llama4": (*ATTENTION, "gate_proj"),
    "nemotron": (*ATTENTION, "up_proj", "down_proj"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "phi3": ("o_proj", "down_proj"),
    "stablelm": ALL,
    "starcoder2": (*ATTENTION, "c_fc", "c_proj"),
}
PROMPT, NUM_TOKENS = [5, 9, 100, 7, 31, 88, 12], 14


@pytest.mark.parametrize("family", TARGETS)
def test_greedy_equals_the_merged_model(family: str, tmp_path: Path) -> None:
    # dense layers of Llama 4 are called feed_forward, as its experts are
    own: dict[str, Any] = {"interleave_moe_layer_step": 5} if family == "llama4" else {}
    folder = make_checkpoint(family, tmp_path / "base", **own)
    adapter = make_adapter(folder, tmp_path / "adapter", seed=1, targets=TARGETS[family])
    merged = merge(folder, adapter, tmp_path / "merged", {"": 2.0})
    setup = AdapterSetup(num_lora_slots=2, max_rank=6, targets=ALL, loaded=[LoadAdapter(1, str(adapter))])
    executor, ready = start(folder, adapters=setup)
    planner = Planner(executor, ready, 4)
    slots = np.array([1], np.int32), np.array([1], np.int32), np.empty(0, np.int32)
    planner.lora_assignment = LoraAssignment(*slots)
    rows = [planner.row(slot, PROMPT, sampling()) for slot in range(2)]
    rows[1].lora_slot = 1
    planner.run([], [(row, len(PROMPT)) for row in rows])
    for _ in range(NUM_TOKENS - 1):
        planner.run(rows, [])
    expected = [Reference(one).greedy(PROMPT, NUM_TOKENS) for one in (folder, merged)]
    assert expected[0] != expected[1]
    assert [row.tokens[len(PROMPT) :] for row in rows] == expected


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3n", "mamba2"])
def test_families_that_take_none(family: str, tmp_path: Path) -> None:
    assert lora_modules(read_config(make_checkpoint(family, tmp_path))) == {}
