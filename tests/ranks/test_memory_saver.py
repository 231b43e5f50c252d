"""What a rank gives back and takes again: bytes as it reports them, and the tokens of a run that never gave
anything back."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.devices.cpu.memory import CpuMemory
from runtime.errors import ModelError
from runtime.messages.lora import AdapterSetup, LoadAdapter
from runtime.messages.memory import ChangeMemory, MemoryReport, Part, UpdateWeights
from runtime.ranks import open_executor
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices import taped
from tests.devices.drive import Planner, page_copies, sampling, start
from tests.models.make import make_checkpoint
from tests.models.make_adapter import make_adapter

PROMPT = [5, 9, 100, 7, 7, 31]
BIG: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one model, and one of another."""
    root = tmp_path_factory.mktemp("models")
    return {
        "one": make_checkpoint("qwen3", root / "one", **BIG),
        "two": make_checkpoint("qwen3", root / "two", seed=1, **BIG),
        "deep": make_checkpoint("qwen3", root / "deep", **(BIG | {"num_hidden_layers": 3})),
    }


def opened(folder: Path, **options: Any) -> tuple[Any, Any]:
    executor, ready = start(folder, **({"max_total_tokens": 16384} | options))
    assert isinstance(executor, TorchExecutor)
    return executor, ready


def say(executor: Any, *released: Part) -> MemoryReport:
    answer = executor.change_memory(ChangeMemory(1, released))
    assert answer.error == "" and answer.released == released
    return answer


def tokens(executor: Any, ready: Any, count: int = 8) -> list[int]:
    planner = Planner(executor, ready, 4)
    return planner.generate(planner.row(0, PROMPT, sampling()), count)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2", "qwen2_moe"])
def test_everything_goes_and_comes_back(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    executor, ready = opened(folders["one"] if family == "qwen3" else make_checkpoint(family, tmp_path))
    expected = tokens(executor, ready)
    for k, v in executor.runner.kv:  # all of it is resident
        k.fill_(1)
        v.fill_(1)
    whole = say(executor)
    assert (whole.weights_bytes, whole.pages_bytes) == (ready.weights_bytes, ready.pages_bytes)
    nothing = say(executor, "kv_cache", "weights")
    assert nothing.weights_bytes == nothing.pages_bytes == 0
    if family == "qwen3":  # large enough to be seen among all else that a process does
        assert whole.used_bytes - nothing.used_bytes > 0.9 * (ready.weights_bytes + ready.pages_bytes)
    weights = say(executor, "kv_cache")
    assert (weights.weights_bytes, weights.pages_bytes) == (ready.weights_bytes, 0)
    assert say(executor).pages_bytes == ready.pages_bytes
    assert tokens(executor, ready) == expected


def test_graphs_go_with_what_they_point_into(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(open_executor.DEVICES, "taped", taped.__name__)
    executor, ready = opened(folders["one"], device="taped", graph_sizes=[1, 2])
    expected = tokens(executor, ready)
    replays = executor.tapes.replays
    assert replays > 0
    for part in ("cuda_graph", "kv_cache", "weights"):
        forgotten = executor.tapes.forgotten
        say(executor, part)
        say(executor)
        assert executor.tapes.forgotten == forgotten + 1 and executor.runner.graphs.ready == []
        assert tokens(executor, ready) == expected and executor.tapes.replays == replays, (
            "nothing is replayed that was captured before"
        )
        assert executor.capture(1).error == ""
        assert tokens(executor, ready) == expected
        assert executor.tapes.replays > replays
        replays = executor.tapes.replays


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("host-test")
    yield fd
    os.close(fd)


def test_host_pages_outlive_it(folders: dict[str, Path], memory: int) -> None:
    executor, ready = opened(folders["one"], host_ratio=1.0, host_fds=[memory], max_total_tokens=128)
    planner = Planner(executor, ready, 4)
    row = planner.row(0, PROMPT * 2, sampling())
    expected = planner.generate(row, 8)
    planner.page_copies = page_copies(saves={page: 3 + i for i, page in enumerate(row.pages[:2])})
    planner.run([], [])
    say(executor, "kv_cache")
    say(executor)
    planner = Planner(executor, ready, 4, scramble=5)
    again = planner.row(0, PROMPT * 2, sampling())
    again.computed = 8
    again.pages = planner.free[:2]
    del planner.free[:2]
    planner.page_copies = page_copies(loads={3: again.pages[0], 4: again.pages[1]})
    assert planner.generate(again, 8) == expected


def test_what_finds_no_room_stays_given_back(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, ready = opened(folders["one"])
    expected = tokens(executor, ready)
    say(executor, "kv_cache", "weights")

    def refuse(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room\nand much more")

    with monkeypatch.context() as patch:
        patch.setattr(CpuMemory, "allocate_cache", refuse)
        answer = executor.change_memory(ChangeMemory(2, ()))
    assert (
        answer.released == ("kv_cache", "weights") and answer.error == "no room" and answer.pages_bytes == 0
    )
    say(executor)
    assert tokens(executor, ready) == expected


def test_a_checkpoint_that_is_gone_is_reported(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    executor, ready = opened(folder)
    say(executor, "weights")
    os.rename(folder / "model.safetensors", folder / "elsewhere")
    answer = executor.change_memory(ChangeMemory(2, ()))
    assert (
        "no weights" in answer.error
        and answer.released == ("weights",)
        and answer.pages_bytes == ready.pages_bytes
    )
    os.rename(folder / "elsewhere", folder / "model.safetensors")
    say(executor)
    assert len(tokens(executor, ready)) == 8


def test_adapters_stay_in_their_slots(folders: dict[str, Path], tmp_path: Path) -> None:
    adapter = make_adapter(folders["one"], tmp_path / "adapter", seed=0, targets=("q_proj", "down_proj"))
    setup = AdapterSetup(
        num_lora_slots=2, max_rank=8, targets=("q_proj", "down_proj"), loaded=[LoadAdapter(1, str(adapter))]
    )
    executor, _ = opened(folders["one"], adapters=setup)
    for lora_slots in executor.runner.adapters.lora_slots.values():
        lora_slots.weights.a.fill_(0.5)
    before = executor.runner.adapters
    size = say(executor, "weights").weights_bytes
    assert size == before.num_bytes > 0, "seats are on the device still"
    say(executor)
    adapted = executor.runner.model.layers[0].self_attn.qkv_proj.lora
    assert adapted is not None and adapted is before.lora_slots["layers.0.self_attn.qkv_proj"]
    assert all(
        (lora_slots.weights.a == 0.5).all() for lora_slots in executor.runner.adapters.lora_slots.values()
    )


def test_other_weights(folders: dict[str, Path]) -> None:
    executor, ready = opened(folders["one"])
    mine, theirs = tokens(executor, ready), tokens(*opened(folders["two"]))
    assert mine != theirs
    assert (
        executor.update_weights(UpdateWeights(1, str(folders["two"]), "auto", True)).error == ""
        and tokens(executor, ready) == mine
    ), "only a trial"
    assert (
        executor.update_weights(UpdateWeights(2, str(folders["two"]), "auto", False)).weights_bytes
        == ready.weights_bytes
    )
    assert tokens(executor, ready) == theirs
    say(executor, "weights")
    executor.update_weights(UpdateWeights(3, str(folders["one"]), "auto", False))
    assert say(executor, "weights").weights_bytes == 0, "what is given back stays so"
    say(executor)
    assert tokens(executor, ready) == mine


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_trial_finds_what_is_wrong(
    quantization: str | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    executor, ready = opened(folders["one"], quantization=quantization)
    expected = tokens(executor, ready)
    assert "num_layers" in executor.update_weights(UpdateWeights(1, str(folders["deep"]), "auto", True)).error
    config = (folders["one"] / "config.json").read_bytes()
    for name, source in (
        ("short", folders["one"]),
        ("wide", make_checkpoint("qwen3", tmp_path / "other", **(BIG | {"head_dim": 64}))),
    ):
        broken = tmp_path / name
        broken.mkdir()
        (broken / "config.json").write_bytes(config)
        weights = (source / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(weights[:-1000] if name == "short" else weights)
        answer = executor.update_weights(UpdateWeights(2, str(broken), "auto", True))
        assert ("damaged" if name == "short" else "shape") in answer.error
        with pytest.raises(ModelError):
            executor.update_weights(UpdateWeights(3, str(broken), "auto", False))
    assert executor.update_weights(UpdateWeights(4, str(tmp_path / "nowhere"), "auto", True)).error
    assert executor.update_weights(UpdateWeights(5, str(folders["one"]), "auto", True)).error == ""
    assert tokens(executor, ready) == expected
