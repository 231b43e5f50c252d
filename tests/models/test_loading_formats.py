"""--load-format: the same model in each form gives the same tokens, and damaged files are refused with their
names."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.messages.memory import UpdateWeights
from runtime.messages.ranks import Reading
from runtime.models.config.model_config import read_config
from runtime.models.config.weight_files import check_weight_files
from tests.devices.drive import Planner, sampling, start
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.reference import Reference
from tests.models.write_formats import FORMATS, write_bin
from tests.models.write_mistral import write_mistral

PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 20).tolist()


def greedy(folder: Path, **options: object) -> list[int]:
    executor, ready = start(folder, **({"dtype": "float32"} | options))
    planner = Planner(executor, ready, 4)
    return planner.generate(planner.row(0, PROMPT, sampling()), 8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mistral", tmp_path_factory.mktemp("loading") / "hf")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    return Reference(checkpoint).greedy(PROMPT, 8)


@pytest.mark.parametrize("form", FORMATS)
def test_the_tokens_are_those_of_transformers(
    form: str, checkpoint: Path, expected: list[int], tmp_path: Path
) -> None:
    write, load_format = FORMATS[form]
    write(checkpoint, tmp_path / "model")
    assert greedy(tmp_path / "model", load_format=load_format) == expected


@pytest.mark.parametrize("load_format", ["safetensors", "fastsafetensors", "runai_streamer", "layered"])
@pytest.mark.parametrize("uses_mmap", [True, False])
def test_safetensors_by_other_names(
    load_format: str, uses_mmap: bool, checkpoint: Path, expected: list[int]
) -> None:
    reading = Reading(num_threads=2, uses_mmap=uses_mmap)
    assert greedy(checkpoint, load_format=load_format, reading=reading) == expected


def test_the_numpy_cache_is_read_and_made_anew(checkpoint: Path, expected: list[int], tmp_path: Path) -> None:
    """It is used while the files that it was made of stay the same, BF16 in it as well."""
    folder, other = tmp_path / "model", make_checkpoint("mistral", tmp_path / "other", seed=1)
    write_bin(make_checkpoint("mistral", tmp_path / "hf", dtype="bfloat16"), folder)
    first = greedy(folder, load_format="npcache")
    cached = folder / "np" / "model.norm.weight"
    written = cached.stat().st_mtime_ns
    assert np.load(cached, allow_pickle=False).dtype == np.uint16
    assert greedy(folder, load_format="npcache") == first == greedy(folder, load_format="pt")
    assert cached.stat().st_mtime_ns == written
    torch.save(load_file(other / "model.safetensors"), folder / "pytorch_model.bin")
    assert greedy(folder, load_format="npcache") == Reference(other).greedy(PROMPT, 8)
    assert np.load(cached, allow_pickle=False).dtype == np.float32


def test_params_say_what_config_says(checkpoint: Path, tmp_path: Path) -> None:
    write_mistral(checkpoint, tmp_path / "model")
    wanted, found = read_config(checkpoint), read_config(tmp_path / "model")
    names = [name for name in wanted.__struct_fields__ if getattr(wanted, name) != getattr(found, name)]
    assert set(names) <= {"eos_ids", "bos_id", "dtype", "sampling_defaults"}, names


def test_both_layouts_in_one_folder(checkpoint: Path, expected: list[int], tmp_path: Path) -> None:
    """As Mistral AI publishes models: auto takes one of them, mistral the other."""
    write_mistral(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(load_file(checkpoint / "model.safetensors"), tmp_path / "model" / "model.safetensors")
    assert greedy(tmp_path / "model") == expected
    (tmp_path / "model" / "model.safetensors").unlink()
    assert greedy(tmp_path / "model", load_format="mistral") == expected


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.mkdir, ("unpickled",)  # type: ignore[return-value]


BIN = "pytorch_model.bin"


def edit(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = torch.load(folder / BIN, weights_only=True)
        change(weights)
        torch.save(weights, folder / BIN)

    return damage


def cut(folder: Path) -> None:
    content = (folder / BIN).read_bytes()
    (folder / BIN).write_bytes(content[: len(content) // 2])


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "cut": (cut, [BIN, "cut short"]),
    "empty": (lambda folder: (folder / BIN).write_bytes(b""), [BIN, "torch.save"]),
    "foreign": (lambda folder: (folder / BIN).write_bytes(b"<html>"), [BIN, "torch.save"]),
    "code": (edit(lambda weights: weights.update(x=Evil())), [BIN, "tensors alone", "safetensors"]),
    "old code": (
        lambda folder: torch.save(Evil(), folder / BIN, _use_new_zipfile_serialization=False),
        [BIN, "tensors alone"],
    ),
    "no tensor": (edit(lambda weights: weights.update({NORM: [1.0]})), [NORM, BIN, "list"]),
    "not by name": (lambda folder: torch.save([torch.zeros(1)], folder / BIN), [BIN, "list"]),
    "dtype": (edit(lambda weights: weights.update({NORM: torch.zeros(64).char()})), [NORM, BIN, "I8"]),
    "shape": (edit(lambda weights: weights.update({NORM: torch.zeros(8)})), [NORM, BIN, "[8]", "[64]"]),
    "missing": (edit(lambda weights: weights.pop(NORM)), ["lacks 1", "norm.weight"]),
    "sparse": (
        edit(lambda weights: weights.update({NORM: torch.zeros(64).to_sparse()})),
        [NORM, BIN, "sparse"],
    ),
    "FIFO": (lambda folder: ((folder / BIN).unlink(), os.mkfifo(folder / BIN)), [BIN, "FIFO"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("load_format", ["pt", "npcache"])
def test_refuses_pickles(
    damage: str, load_format: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_bin(checkpoint, tmp_path / "model")
    do, words = DAMAGES[damage]
    do(tmp_path / "model")
    if load_format == "npcache":
        words = [word for word in words if not (word == BIN and damage in ("dtype", "shape"))]
    with pytest.raises(ModelError) as caught:
        greedy(tmp_path / "model", load_format=load_format)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert not (tmp_path / "unpickled").exists()


def test_a_pickle_is_looked_at_before_ranks_start(checkpoint: Path, tmp_path: Path) -> None:
    write_bin(checkpoint, tmp_path / "model")
    check_weight_files(tmp_path / "model")
    cut(tmp_path / "model")
    with pytest.raises(ModelError, match="cut short"):
        check_weight_files(tmp_path / "model")


def test_the_numpy_cache_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    write_bin(checkpoint, tmp_path / "model")
    greedy(tmp_path / "model", load_format="npcache")
    cached = tmp_path / "model" / "np" / NORM
    with cached.open("wb") as file:
        np.save(file, np.array([Evil()], dtype=object), allow_pickle=True)
    with pytest.raises(ModelError, match=NORM):
        greedy(tmp_path / "model", load_format="npcache")
    names = tmp_path / "model" / "np" / "weight_names.json"
    names.write_text(json.dumps(["../config.json"]))
    with pytest.raises(ModelError, match="config.json"):
        greedy(tmp_path / "model", load_format="npcache")


def renamed(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A loader of one's own: its files have other names."""
    for name, tensor in load_file(folder / "mine.dat").items():
        yield name.removeprefix("own."), tensor


def test_an_update_by_a_function_of_the_user(checkpoint: Path, expected: list[int], tmp_path: Path) -> None:
    folder, path = make_checkpoint("mistral", tmp_path / "other", seed=1), f"{__name__}:renamed"
    weights = load_file(checkpoint / "model.safetensors")
    save_file({f"own.{name}": tensor for name, tensor in weights.items()}, folder / "mine.dat")
    executor, ready = start(folder, dtype="float32", weight_functions=(path,))
    for load_format, words in ((path, ""), ("nothing:here", "load_format nothing:here is not known")):
        report = executor.update_weights(UpdateWeights(1, str(folder), load_format, is_trial=True))
        assert words in report.error and bool(words) == bool(report.error)
    executor.update_weights(UpdateWeights(2, str(folder), path, is_trial=False))
    planner = Planner(executor, ready, 4)
    assert planner.generate(planner.row(0, PROMPT, sampling()), 8) == expected
