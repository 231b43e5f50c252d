"""Draft models behind a pipeline: on its last stage, whose drafts all stages verify."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.messages.ranks import RankReady
from runtime.messages.speculation import Speculation
from runtime.models.config.model_config import read_config
from runtime.options.facts import MachineFacts
from runtime.options.footprint import stage_footprints, stored_weights
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from tests.devices.drive import Planner, speculation
from tests.devices.stages import StagedExecutor, start_stages
from tests.models.make import make_checkpoint
from tests.models.make_heads import HeadReference, make_eagle, make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.ranks.test_draft_heads import check_drafts, in_turn
from tests.ranks.test_own_drafts import decoded, drafted
from tests.ranks.test_verify import PARAMS

LAYERS: dict[str, Any] = {"num_hidden_layers": 4}


def staged(folder: Path, count: int, settings: Speculation) -> tuple[StagedExecutor, Planner]:
    """A pipeline with a draft model."""
    executor = start_stages(
        folder,
        count,
        page_size=4,
        num_states=12,
        speculation=settings,
        processors=["tests.ranks.test_verify:Alternating"],
    )
    planner = Planner(executor, executor.ready, 4)
    planner.follows = True
    return executor, planner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("target"), **LAYERS)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("params", ["greedy", "random", "penalties", "logprobs"])
def test_a_model_knows_what_it_will_sample(folder: Path, params: str, count: int) -> None:
    expected = decoded(folder, PARAMS[params])
    executor, planner = staged(folder, count, speculation("STANDALONE", folder))
    accepted = drafted(planner, PARAMS[params], expected)
    assert accepted >= 0.99 or params == "penalties"
    stages = [stage.runner for stage in executor.stages]
    assert [stage.drafts is not None for stage in stages] == [False] * (count - 1) + [True]
    assert not any(executor.wires.hidden), "each stage takes what the one before sends"


@pytest.mark.parametrize("params", ["greedy", "random"])
def test_trees(folder: Path, params: str) -> None:
    expected = decoded(folder, PARAMS[params])
    shape = {"topk": 3, "num_steps": 3, "num_draft_tokens": 9}
    _, planner = staged(folder, 3, speculation("STANDALONE", folder, **shape))
    assert drafted(planner, PARAMS[params], expected, most=8) > 0.25


def test_drafts_that_the_host_does_not_know(folder: Path) -> None:
    """As on devices that compute on their own."""
    expected = decoded(folder, {})
    executor, planner = staged(folder, 2, speculation("STANDALONE", folder))
    drafts = executor.runner.drafts
    assert drafts is not None
    drafts.is_host = False
    assert drafted(planner, {}, expected) >= 0.99


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_on_the_last_stage(is_tied: bool, tmp_path: Path) -> None:
    """Drafts are those of plain torch; the last stage has the embedding once."""
    target = make_checkpoint("llama", tmp_path / "target", tie_word_embeddings=is_tied, **LAYERS)
    head = make_eagle(tmp_path / "head")
    settings = speculation("EAGLE", head)
    executor, planner = staged(target, 2, settings)
    check_drafts(planner, HeadReference(target, head, "EAGLE"), decoded(target, {}))
    sizes = options(target, "EAGLE", head)
    check_sizes(target, [stage.ready for stage in executor.stages], sizes)


@pytest.mark.parametrize("layers", [None, [0, 2, 3], [3, 1, 1]], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_a_head_that_is_given_states_of_all_stages(
    count: int, layers: list[int] | None, tmp_path: Path
) -> None:
    """Each stage passes on the states of its layers and of those before; the head gets them in its order."""
    target = make_checkpoint("llama", tmp_path / "target", num_hidden_layers=5)
    head = make_eagle3(tmp_path / "head")
    if layers is not None:
        written = json.loads((head / "config.json").read_text())
        written["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
        (head / "config.json").write_text(json.dumps(written))
    executor, planner = staged(target, count, speculation("EAGLE3", head))
    check_drafts(planner, HeadReference(target, head, "EAGLE3"), decoded(target, {}))
    sizes = options(target, "EAGLE3", head)
    if count == 2:
        check_sizes(target, [stage.ready for stage in executor.stages], sizes)


@pytest.mark.parametrize(("family", "count"), [("glm4_moe", 1), ("qwen3_next", 1), ("deepseek_v3", 4)])
def test_next_token_layers(family: str, count: int, tmp_path: Path) -> None:
    """Behind a hybrid as well, and several in turn."""
    sizes = {} if family == "qwen3_next" else LAYERS
    target = add_next_token_layers(make_checkpoint(family, tmp_path / "target", **sizes), count)
    executor, planner = staged(target, 2, speculation("NEXTN", None) if count == 1 else in_turn(4))
    reference = HeadReference(target, target, "NEXTN")
    check_drafts(planner, reference, decoded(target, {}, num_states=12))
    if count > 1:
        return
    check_sizes(target, [stage.ready for stage in executor.stages], options(target, "NEXTN", None))


def test_memory_of_a_model_on_the_last_stage(folder: Path, tmp_path: Path) -> None:
    other = make_checkpoint("llama", tmp_path / "other", num_hidden_layers=1, hidden_size=32)
    executor, _ = staged(folder, 2, speculation("STANDALONE", other))
    check_sizes(folder, [stage.ready for stage in executor.stages], options(folder, "STANDALONE", other))


def options(folder: Path, algorithm: str, draft: Path | None) -> dict[str, Any]:
    """Options of a server with this draft model."""
    path = {} if draft is None else {"speculative_draft_model_path": str(draft)}
    return {"pipeline_parallel_size": 2, "speculative_algorithm": algorithm, **path}


def check_sizes(folder: Path, ready: list[RankReady], options: dict[str, Any]) -> None:
    """`runtime check memory` says what each stage holds."""
    machine = MachineFacts(cores=2, memory_bytes=2**30, entropy=1)
    plan = plan_for(from_values({"model_path": str(folder)} | options), machine)
    found = stage_footprints(plan, read_config(folder), machine, stored_weights(folder))
    assert [one.weights_bytes for one in found] == [one.weights_bytes for one in ready]
    assert [one.draft_weights_bytes > 0 for one in found] == [False, True]
