"""Draft models with recurrent layers: their drafts are what transformers says that the model would write,
token for token, whatever was accepted before; and the target's tokens are those without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from runtime.errors import ModelError
from runtime.messages.memory import ChangeMemory
from runtime.ranks.drafting.draft_runner import DraftRunner
from runtime.ranks.open_executor import DEVICES as MODULES
from tests.devices import taped
from tests.devices.drive import speculation
from tests.models.make import make_checkpoint
from tests.ranks.test_draft_heads import check_drafts
from tests.ranks.test_own_drafts import decoded, drafted, opened
from tests.ranks.test_pipeline_drafts import staged
from tests.ranks.test_verify import PARAMS


class OwnReference:
    """Greedy drafts of a whole model, computed anew for each of them."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        following = list(tokens)
        for _ in range(count):
            logits = self.model(torch.tensor([following]), use_cache=False).logits
            following.append(int(logits[0, -1].argmax()))
        return following[-count:]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "mamba2", "qwen3_next"])
def test_drafts_are_those_of_transformers(family: str, target: Path, tmp_path: Path) -> None:
    draft = make_checkpoint(family, tmp_path / "draft")
    planner = opened(target, speculation=speculation("STANDALONE", draft))
    check_drafts(planner, OwnReference(draft), decoded(target, {}))


@pytest.mark.parametrize("params", ["greedy", "random"])
def test_a_recurrent_model_knows_what_it_will_sample(params: str, tmp_path: Path) -> None:
    folder = make_checkpoint("lfm2", tmp_path / "model")
    expected = decoded(folder, PARAMS[params], num_states=12)
    planner = opened(folder, num_states=12, speculation=speculation("STANDALONE", folder))
    assert drafted(planner, PARAMS[params], expected) >= 0.99


def test_states_come_and_go_with_pages(target: Path, tmp_path: Path) -> None:
    draft = make_checkpoint("mamba2", tmp_path / "draft")
    planner = opened(target, speculation=speculation("STANDALONE", draft))
    runner: DraftRunner = planner.executor.runner.drafts  # type: ignore[attr-defined]
    assert runner.recurrent is not None and runner.recurrent.memory.num_bytes > 0
    before = runner.recurrent.memory.num_bytes
    for released, num_bytes in ((("kv_cache",), 0), ((), before)):
        planner.executor.change_memory(ChangeMemory(1, released))
        assert runner.recurrent.memory.num_bytes == num_bytes
    check_drafts(planner, OwnReference(draft), decoded(target, {}))


def test_where_steps_are_captured(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are replayed, and the draft model follows them; steps that verify are launched one by
    one."""
    monkeypatch.setitem(MODULES, "taped", taped.__name__)
    draft = make_checkpoint("lfm2", tmp_path / "draft")
    graphs: dict[str, Any] = {"device": "taped", "max_slots": 5, "max_len": 64, "graph_sizes": [1, 2, 4]}
    planner = opened(target, speculation=speculation("STANDALONE", draft), **graphs)
    tapes = planner.executor.tapes  # type: ignore[attr-defined]
    assert planner.executor.runner.verifies is None  # type: ignore[attr-defined]
    before = tapes.replays
    assert not check_drafts(planner, OwnReference(draft), decoded(target, {}))
    assert tapes.replays > before


def test_on_the_last_stage(target: Path, tmp_path: Path) -> None:
    draft = make_checkpoint("lfm2", tmp_path / "draft")
    _, planner = staged(target, 2, speculation("STANDALONE", draft))
    check_drafts(planner, OwnReference(draft), decoded(target, {}))


def test_trees_are_refused(target: Path, tmp_path: Path) -> None:
    draft = make_checkpoint("lfm2", tmp_path / "draft")
    trees = structs.replace(speculation("STANDALONE", draft), topk=2, num_draft_tokens=5)
    with pytest.raises(ModelError, match="--speculative-eagle-topk 2 asks for trees"):
        opened(target, speculation=trees)
