"""Step 3.5 in the layout of its makers, as the text model of Step 3.7, and what its config.json may not say.
Its other tests are those of all families (test_llama.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from tests.devices.drive import Planner, start
from tests.models.compare import expected_of, in_company, random_prompts
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise
from tests.models.reference import Reference
from tests.models.step3 import in_published_layout, with_experts_apart, with_experts_stacked
from tests.models.test_quantised import PROMPT, log_probabilities, wanted

NUM_TOKENS = 12
PROMPTS = random_prompts(1, 30, 41)


def rewritten(folder: Path, **fields: Any) -> None:
    """Changes fields of config.json; None takes one away."""
    found = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in found.items() if value is not None})
    )


def test_the_published_layout_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = make_checkpoint("step3", tmp_path)
    expected = expected_of(folder, PROMPTS, NUM_TOKENS).tokens
    ours = read_config(folder)
    in_published_layout(folder)
    config = read_config(folder)
    assert config.draft_layers == 1 and config.limits == (0.0, 0.25, 0.0, 0.3)
    names = ("layer_ropes", "windows", "window_heads", "moe", "limits", "num_kv_heads", "gate_dim")
    assert [getattr(config, name) for name in names] == [getattr(ours, name) for name in names]
    executor, ready = start(folder)
    assert in_company(Planner(executor, ready, 4), PROMPTS, NUM_TOKENS, chunk=7) == expected


@pytest.mark.parametrize("name", ["fp8 block", "ct fp8 weights"])
def test_checkpoints_in_8_bits(name: str, tmp_path: Path) -> None:
    """Layers with clamped experts too, whose weights are dequantized. With rounded inputs (fp8 block), in the
    layout of the published checkpoint, this is nearness to the weights' meaning; else tokens are equal."""
    plain = make_checkpoint("step3", tmp_path / "plain", moe_intermediate_size=32)
    with_experts_apart(plain)
    quantise(plain, tmp_path, name)
    with_experts_stacked(tmp_path / "meant", is_published=False)
    quantised = tmp_path / "quantised"
    is_block = name == "fp8 block"
    if is_block:
        with_experts_stacked(quantised, is_published=True)
        in_published_layout(quantised)
    found, tokens = log_probabilities(quantised)
    meant = Reference(tmp_path / "meant")
    expected = wanted(meant, tokens)[: len(found)]
    if is_block:
        assert (found - expected).abs().mean() < 0.12 * expected.abs().mean()
    else:
        assert tokens[len(PROMPT) :] == meant.greedy(PROMPT, 6)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_clamps_and_gates_matter(tmp_path: Path) -> None:
    """Without them the same weights give other tokens, so the comparison would find their absence."""
    folder = make_checkpoint("step3", tmp_path)
    expected = expected_of(folder, PROMPTS, NUM_TOKENS).tokens
    rewritten(folder, swiglu_limits=None)
    executor, ready = start(folder)
    assert in_company(Planner(executor, ready, 4), PROMPTS, NUM_TOKENS, chunk=7) != expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero_centered": False}, "zero_centered"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation softmax"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"layer_types": ["round"] * 4}, "layer_types"),
        ({"swiglu_limits": [7]}, "swiglu_limits has 1 entries"),
        ({"swiglu_limits_shared": [-1] * 4}, "swiglu_limits_shared"),
        ({"mlp_layer_types": None, "moe_layers_enum": "1;2"}, "moe_layers_enum"),
        (
            {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3}},
            "attention_other_setting",
        ),
        ({"attention_other_setting": {"num_attention_heads": 5}}, "not a multiple of the 2 key/value heads"),
    ],
)
def test_what_config_json_may_not_say(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_checkpoint("step3", tmp_path)
    rewritten(folder, **fields)
    with pytest.raises(ModelError, match=message):
        read_config(folder)


def test_clamped_experts_are_not_spread(tmp_path: Path) -> None:
    folder = make_checkpoint("step3", tmp_path)
    moe = read_config(folder).moe
    assert moe is not None and moe.is_on_all_ranks  # which the rules of --ep-size read
