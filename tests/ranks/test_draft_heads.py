"""Heads that draft behind a target: their drafts are those of plain torch, token for token, whatever was
accepted before; and the target's tokens are those without them."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import MiMoV2FlashConfig

from runtime.errors import ModelError
from runtime.messages.speculation import DraftModel, Speculation
from runtime.models.config.draft_config import read_draft_config
from runtime.models.config.model_config import read_config
from runtime.ranks.drafting.own_rows import OwnRows
from runtime.scheduling.drafts import Draft
from tests.devices.drive import Planner, Row, sampling, speculation
from tests.models.layouts import in_mimo_layout
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.make_heads import HeadReference, make_eagle, make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.ranks.test_own_drafts import decoded, drafted, opened
from tests.ranks.test_verify import PARAMS, PROMPTS

NUM_TOKENS = 20
LFM2_LAYERS = ["conv", "full_attention", "conv", "conv", "full_attention", "conv"]
NEXT_LAYERS = ["linear_attention", "full_attention", "linear_attention"] * 2
LAYERS = 6  # EAGLE-3 takes the hidden states of layers 2, 3 and 3 of them


class DraftReference(Protocol):
    """What a draft model drafts."""

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What follows `tokens`, of which the target has computed all but the last one."""
        ...


class Recorded:
    """Drafts of each step of a draft runner, by slot."""

    def __init__(self, planner: Planner) -> None:
        runner = planner.executor.runner  # type: ignore[attr-defined]
        self.latest: dict[int, list[int]] = {}
        self.num_captured = 0  # steps whose drafts came from graphs
        self.chains: Callable[..., Tensor] = runner.drafts.chains
        runner.drafts.chains = self.record
        if runner.verifies is not None:
            self.replayed: Callable[..., Tensor] = runner.verifies.drafts.propose
            runner.verifies.drafts.propose = self.record_captured

    def record(self, rows: OwnRows, slots: np.ndarray, starts: np.ndarray) -> Tensor:
        chains = self.chains(rows, slots, starts)
        found = zip(slots.tolist(), chains.tolist(), rows.counts.tolist(), strict=True)
        self.latest = {slot: chain[:count] for slot, chain, count in found}
        return chains

    def record_captured(self, size: int, filters: Any, slots: np.ndarray, counts: np.ndarray) -> Tensor:
        tokens = self.replayed(size, filters, slots, counts)
        self.num_captured += 1
        rows = zip(slots.tolist(), counts.tolist(), tokens.tolist(), strict=True)
        self.latest = {slot: drafts[:count] for slot, count, drafts in rows if count}
        return tokens


def check_drafts(planner: Planner, reference: DraftReference, expected: list[list[int]]) -> int:
    """Decodes with own drafts, drafts that are right and none, and compares each own draft. -> steps whose
    drafts came from graphs"""
    random, recorded = Random(5), Recorded(planner)
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(PROMPTS)]
    for row in rows:
        planner.prefill(row, random.choice([1, 4, 100]))
    compared = 0
    while left := [row for row in rows if len(row.tokens) - row.prompt_len < NUM_TOKENS]:
        verifies: list[tuple[Row, Draft]] = []
        for row in left:
            truth = expected[row.slot][len(row.tokens) - row.prompt_len :]
            if random.random() < 0.3 and len(truth) > 3:  # of another drafter: one is right, one is not
                verifies.append((row, Draft([truth[0], (truth[1] + 1) % VOCAB_SIZE])))
            elif random.random() < 0.8:
                verifies.append((row, Draft.own(random.randint(1, 4))))
        known = {row.slot: list(row.tokens) for row in left}
        wants = {row.slot: len(draft.tokens) for row, draft in verifies if draft.is_own}
        recorded.latest = {}
        others = [row for row in left if all(row is not own for own, _ in verifies)]
        planner.run(others, [], verifies)
        assert {slot: len(found) for slot, found in recorded.latest.items()} == wants
        for slot, found in recorded.latest.items():
            assert found == reference.drafts(known[slot], len(found))
            compared += 1
    for row, truth in zip(rows, expected, strict=True):
        assert row.tokens[row.prompt_len :][:NUM_TOKENS] == truth[:NUM_TOKENS]
    assert compared > 15
    return recorded.num_captured


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    layers: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen3": {},
        "deepseek_v3": {},
        "lfm2": {"layer_types": LFM2_LAYERS},
        "qwen3_next": {"layer_types": NEXT_LAYERS},
    }
    return {
        family: make_checkpoint(family, folder / family, num_hidden_layers=LAYERS, **more)
        for family, more in layers.items()
    }


@pytest.mark.parametrize("family", ["deepseek_v3", "lfm2", "llama", "qwen3", "qwen3_next"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_drafts_are_those_of_plain_torch(
    targets: dict[str, Path], family: str, algorithm: str, tmp_path: Path
) -> None:
    make = make_eagle if algorithm == "EAGLE" else make_eagle3
    head = make(tmp_path / "head")
    expected = decoded(targets[family], {}, num_states=12)
    planner = opened(targets[family], speculation=speculation(algorithm, head), num_states=12)
    check_drafts(planner, HeadReference(targets[family], head, algorithm), expected)


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "deepseek_v32",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "mimo",
        "mimo_v2",
        "nemotron_h",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "step3",
    ],
)
def test_next_token_layers(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2" if family == "mimo" else family, tmp_path / "model")
    if family == "mimo":
        in_mimo_layout(folder)
    add_next_token_layers(folder)
    expected = decoded(folder, {}, num_states=12)
    planner = opened(folder, speculation=speculation("NEXTN", None), num_states=12)
    check_drafts(planner, HeadReference(folder, folder, "NEXTN"), expected)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo", "mimo_v2", "step3"])
def test_next_token_layers_in_turn(family: str, tmp_path: Path) -> None:
    """Each of several next-token layers makes one draft, of the tokens that the one before it took and its
    draft."""
    folder = make_checkpoint("qwen2" if family == "mimo" else family, tmp_path / "model")
    if family == "mimo":
        in_mimo_layout(folder)
    add_next_token_layers(folder, 4)
    expected = decoded(folder, {})
    planner = opened(folder, speculation=in_turn(4))
    check_drafts(planner, HeadReference(folder, folder, "NEXTN"), expected)


def test_more_layers_than_there_are(tmp_path: Path) -> None:
    folder = add_next_token_layers(make_checkpoint("deepseek_v3", tmp_path / "model"), 2)
    with pytest.raises(ModelError, match="--speculative-num-steps 3 .* the model has 2"):
        opened(folder, speculation=in_turn(3))


def test_config_json_of_mimo_v2_counts_no_layers(tmp_path: Path) -> None:
    """Published checkpoints have three, as layers with a window and without experts."""
    config = MiMoV2FlashConfig(architectures=["MiMoV2FlashForCausalLM"], vocab_size=VOCAB_SIZE)
    config.save_pretrained(tmp_path)
    target = read_config(tmp_path)
    found = read_draft_config(in_turn(3), target)
    assert found is not None
    assert [head.layers.windows for head in found.heads] == [(config.sliding_window,)] * 3
    assert all(head.layers.moe is None for head in found.heads)
    with pytest.raises(ModelError, match="--speculative-num-steps 4 .* the model has 3"):
        read_draft_config(in_turn(4), target)


def in_turn(num_steps: int) -> Speculation:
    model = DraftModel(is_multi_layer=True)
    shape = {"num_steps": num_steps, "num_draft_tokens": num_steps + 1}
    return structs.replace(speculation("NEXTN", None, **shape), draft_model=model)


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_a_token_map_leaves_some_tokens(algorithm: str, targets: dict[str, Path], tmp_path: Path) -> None:
    if algorithm == "EAGLE":
        target, head = targets["llama"], make_eagle(tmp_path / "head")
    else:
        target = head = add_next_token_layers(make_checkpoint("glm4_moe", tmp_path / "model"))
    known = torch.arange(3, VOCAB_SIZE, 6)
    torch.save(known.flip(0), tmp_path / "map.pt")
    draft_model = DraftModel(
        path=str(head) if algorithm == "EAGLE" else None, token_map=str(tmp_path / "map.pt")
    )
    planner = opened(
        target, speculation=structs.replace(speculation(algorithm, None), draft_model=draft_model)
    )
    reference = HeadReference(target, head, algorithm)
    reference.known = known
    check_drafts(planner, reference, decoded(target, {}))


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_trees_of_heads(targets: dict[str, Path], algorithm: str, tmp_path: Path) -> None:
    """A tree's first drafts are those of the chain, and no token changes."""
    make = make_eagle if algorithm == "EAGLE" else make_eagle3
    head = make(tmp_path / "head")
    expected = decoded(targets["qwen3"], {})
    shape = {"topk": 3, "num_steps": 3, "num_draft_tokens": 9}
    planner = opened(targets["qwen3"], speculation=speculation(algorithm, head, **shape))
    reference = HeadReference(targets["qwen3"], head, algorithm)
    seen: list[list[int]] = []
    inputs = planner.executor.runner.inputs  # type: ignore[attr-defined]
    with_tokens = inputs.batch

    def noted(plan: Any, *rest: Any) -> Any:
        batch = with_tokens(plan, *rest)
        if plan.num_verifies:
            seen.append(batch.token_ids[1 : plan.counts[0]].tolist())
        return batch

    inputs.batch = noted
    row = planner.row(0, PROMPTS[1], sampling())
    planner.prefill(row)
    while len(row.tokens) - row.prompt_len < NUM_TOKENS:
        known = list(row.tokens)
        planner.run([], [], [(row, Draft.own(8))])
        chain = reference.drafts(known, 3)
        assert chain[0] in seen[-1] and len(seen[-1]) == 8
    assert row.tokens[row.prompt_len :][:NUM_TOKENS] == expected[1][:NUM_TOKENS]


@pytest.mark.parametrize("params", ["random", "penalties", "logprobs"])
def test_tokens_are_those_without_a_head(targets: dict[str, Path], params: str, tmp_path: Path) -> None:
    head = make_eagle3(tmp_path / "head", has_vocab=False)
    expected = decoded(targets["llama"], PARAMS[params])
    drafted(opened(targets["llama"], speculation=speculation("EAGLE3", head)), PARAMS[params], expected)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        ("EAGLE", {"vocab_size": 300}, "vocabulary of 300 tokens"),
        ("EAGLE", {"hidden_size": 32}, "hidden states of 32 numbers"),
        ("EAGLE3", {"num_hidden_layers": 2}, "EAGLE3 heads of 2 layers"),
        ("EAGLE3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 3]}}, "the model has 6"),
        ("NEXTN", {}, "no next-token layers"),
    ],
)
def test_heads_of_other_models_are_refused(
    targets: dict[str, Path], algorithm: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make = make_eagle3 if algorithm == "EAGLE3" else make_eagle
    head = make(tmp_path / "head", **overrides) if algorithm != "NEXTN" else None
    with pytest.raises(ModelError, match=message):
        opened(targets["llama"], speculation=speculation(algorithm, head))
