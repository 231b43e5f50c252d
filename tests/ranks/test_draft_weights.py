"""Weights of a draft model that go to host memory and come back, alone or with those of its target."""

from pathlib import Path

import pytest
import torch
from msgspec import structs

from runtime.messages.memory import ChangeMemory, WeightOffload
from runtime.messages.speculation import Speculation
from runtime.ranks.weight_offload import tensors
from tests.devices.drive import Planner, speculation, start_rank
from tests.devices.streams import StreamedRunner, Streams, install
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.make_heads import make_eagle, make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.ranks.test_own_drafts import decoded, drafted

SIX = {"num_hidden_layers": 6}  # EAGLE-3 takes the hidden states of layers 2, 3 and 3 of them


def made(kind: str, folder: Path) -> tuple[Path, Path | None, Speculation]:
    """A target, the folder of its draft model if that is one of its own, and how it drafts."""
    if kind == "NEXTN":
        return (
            add_next_token_layers(make_checkpoint("glm4_moe", folder / "model")),
            None,
            speculation(kind, None),
        )
    target = make_checkpoint("qwen3", folder / "model", **SIX)
    if kind == "STANDALONE":
        draft = make_checkpoint("qwen3", folder / "draft", **SIX)  # the same: its drafts are right
        return target, draft, speculation(kind, draft)
    if kind == "EAGLE3":
        draft = make_eagle3(folder / "draft")
        return target, draft, speculation(kind, draft)
    draft = make_eagle(folder / "draft")
    torch.save(torch.arange(3, VOCAB_SIZE, 6), folder / "map.pt")
    spec = speculation("EAGLE", draft)
    model = structs.replace(spec.draft_model, token_map=str(folder / "map.pt"))
    return target, draft, structs.replace(spec, draft_model=model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["STANDALONE", "EAGLE3", "EAGLE with a token map", "NEXTN"])
@pytest.mark.parametrize("has_backup", [False, True], ids=["alone", "with the target"])
def test_a_backup_needs_no_checkpoint(
    kind: str, has_backup: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, spec = made(kind, tmp_path)
    expected = decoded(target, {})
    install(monkeypatch, streams := Streams(is_late=True))
    setup = WeightOffload(has_backup=has_backup, has_draft_backup=True)
    rank = start_rank(target, max_total_tokens=512, speculation=spec, offload_setup=setup)
    executor = StreamedRunner(streams, None, rank)
    planner = Planner(executor, executor.ready, rank.page_size)
    planner.follows = True
    accepted = drafted(planner, {}, expected)
    for folder in (draft, target if has_backup else None):
        for file in () if folder is None else (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
            file.unlink()
    network = executor.runner.drafts.network  # type: ignore[union-attr]
    for _ in range(2):
        before = {one.untyped_storage().data_ptr() for one in tensors(network.parts)}
        answer = executor.change_memory(ChangeMemory(1, ("weights",)))
        assert answer.weights_bytes == 0 and answer.error == ""
        after = {one.untyped_storage().data_ptr() for one in tensors(network.parts)}
        assert len(after) == 1 and not before & after, "all of it is in one block of host memory"
        answer = executor.change_memory(ChangeMemory(2, ()))
        assert answer.weights_bytes == executor.ready.weights_bytes and answer.error == ""
        assert executor.runner.drafts.network is network  # type: ignore[union-attr]
        assert drafted(planner, {}, expected) == accepted
