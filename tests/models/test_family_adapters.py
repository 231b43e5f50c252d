"""LoRA adapters of families whose modules have other names, no gate, or rows that are reordered for the
rotation: the tokens of the model with its adapter merged, beside a sequence without one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import ModelError
from runtime.messages.lora import AdapterSetup, LoadAdapter, LoraAssignment
from runtime.models.config.lora_targets import lora_modules, lora_names, lora_renames
from runtime.models.config.model_config import read_config
from runtime.models.config.peft import read_adapter
from tests.devices.cpu.ranks import RankProcesses
from tests.devices.cpu.tp_rank import PROMPTS
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint
from tests.models.make_adapter import ALL, ATTENTION, make_adapter, merge
from tests.models.reference import Reference
from tests.ranks.lora_slots import leaves

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "down_proj")
# family -> modules of its adapters, by their names in checkpoints
TARGETS: dict[str, tuple[str, ...]] = {
    "bamba": (*ALL, "in_proj", "out_proj"),
    "falcon_h1": (*ALL, "in_proj", "out_proj"),
    "falcon_mamba": ("in_proj", "x_proj", "dt_proj", "out_proj"),
    "granite_hybrid": (*ATTENTION, "in_proj", "out_proj"),
    "jamba": (*ATTENTION, "in_proj", "x_proj", "dt_proj", "out_proj"),
    "kimi_linear": (
        *(*ATTENTION, "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj"),
        *("kv_a_proj_with_mqa", "up_proj"),
    ),
    "lfm2": ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    "lfm2_moe": ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj"),
    "mamba": ("in_proj", "x_proj", "dt_proj", "out_proj"),
    "mamba2": ("in_proj", "out_proj"),
    "nemotron_h": (*ATTENTION, "in_proj", "out_proj", "up_proj", "down_proj"),
    "olmo_hybrid": (*ALL, "a_proj", "b_proj", "g_proj"),
    "qwen3_5": (*ALL, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    "qwen3_5_moe": (*ALL, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    "qwen3_next": (*ALL, "in_proj_qkvz", "in_proj_ba", "out_proj"),
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
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj"),  # pairs of dimensions rotate
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "minicpm3": LATENT,
    "zamba2": (*ATTENTION, "gate_up_proj", "down_proj", "linear", "in_proj", "out_proj"),
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
    setup = AdapterSetup(
        num_lora_slots=2, max_rank=6, targets=leaves(folder), loaded=[LoadAdapter(1, str(adapter))]
    )
    executor, ready = start(folder, adapters=setup, num_states=8)
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


# a family of Llama's kind, each kind of mixer, and gated attention
SPLIT = (
    *("deepseek_v3", "gemma2", "jamba", "kimi_linear", "lfm2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5", "qwen3_next", "zamba2"),
)


@pytest.mark.full
def test_two_ranks(tmp_path: Path) -> None:
    folders = [make_checkpoint(family, tmp_path / family) for family in SPLIT]
    adapters = [
        make_adapter(folder, tmp_path / f"{family}-adapter", seed=2, targets=TARGETS[family])
        for family, folder in zip(SPLIT, folders, strict=True)
    ]
    ranks = RankProcesses()
    try:
        first, second = ranks.run(2, folders, tmp_path, adapters=adapters)
    finally:
        ranks.close()
    for family, folder, adapter, one, other in zip(SPLIT, folders, adapters, first, second, strict=True):
        merged = merge(folder, adapter, tmp_path / f"{family}-merged", {"": 2.0})
        for prompt, tokens, model in zip(PROMPTS[:2], one["tokens"], (folder, merged), strict=False):
            found = tokens[len(prompt) :]
            assert len(found) > 8 and found == Reference(model).greedy(prompt, len(found)), family
        assert one["last"] == other["last"], family


def test_targets_by_the_names_of_checkpoints(tmp_path: Path) -> None:
    lfm2, kimi = (
        read_config(make_checkpoint(family, tmp_path / family)) for family in ("lfm2", "kimi_linear")
    )
    assert lora_names("w1", lfm2) == {"gate_proj"}
    assert lora_names("out_proj", lfm2) == {"out_proj", "o_proj"}
    assert lora_names("f_a_proj", kimi) == {"low_f"}
    assert lora_names("conv", lfm2) == set()


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("mamba2", "conv1d"),
        ("granite_hybrid", "input_linear"),
        ("kimi_linear", "kv_b_proj"),
        ("deepseek_v3", "kv_b_proj"),
    ],
)
def test_modules_that_take_none(family: str, module: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "base")
    adapter = make_adapter(folder, tmp_path / "adapter", seed=1, targets=(module,))
    config = read_config(folder)
    with pytest.raises(ModelError, match=rf"changes \S*\.{module}, which this model lacks or where"):
        read_adapter(str(adapter), lora_modules(config), lora_renames(config))


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_families_that_take_none(family: str, tmp_path: Path) -> None:
    assert lora_modules(read_config(make_checkpoint(family, tmp_path))) == {}
