"""Packed weights that a start finds as an earlier one left them: the same bits, or none of it."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cpu import kept_matrices, packed_folder, packed_memory
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.kept_matrices import KeptPackedWeights
from runtime.devices.cpu.matrices import Matrix
from runtime.devices.cpu.packed_folder import PackedFolder
from runtime.devices.cpu.self_check import load_library
from runtime.messages.memory import ChangeMemory, UpdateWeights, WeightOffload
from runtime.messages.ranks import KeepWeights
from runtime.ranks import checkpoint_key
from runtime.ranks.weight_offload import tensors
from runtime.ranks.weights_loader import WeightsLoader, read_model
from tests.devices.drive import Planner, sampling, start, start_rank
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise

pytestmark = pytest.mark.skipif(load_library() is None, reason="no kernels are built")
PROMPT = [5, 9, 100, 7, 7, 31]
LARGE = 1 << 40


@pytest.fixture(autouse=True)
def keeps_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_matrices, "MIN_BYTES", 0)
    monkeypatch.setattr(checkpoint_key, "SETTLED_NS", 0)


class Started:
    """A rank, and what it has."""

    def __init__(self, model: Path, folder: Path, max_bytes: int = LARGE, **options: Any) -> None:
        kept = KeepWeights(str(folder), max_bytes)
        executor, self.ready = start(model, kept_weights=kept, max_total_tokens=512, **options)
        self.executor: Any = executor
        self.kept: KeptPackedWeights = self.executor.runner.device.kept_weights
        self.writes = self.kept.writer is not None
        if self.kept.writer is not None:
            self.kept.writer.join()

    @property
    def model(self) -> Any:
        return self.executor.runner.model

    @property
    def file(self) -> Path:
        return self.kept.folder.path(self.kept.key)

    @property
    def maps_its_file(self) -> bool:
        return str(self.file) in Path("/proc/self/maps").read_text()

    def numbers(self) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors(self.model)]

    def tokens(self) -> list[int]:
        planner = Planner(self.executor, self.ready, 4)
        return planner.generate(planner.row(0, PROMPT, sampling()), 8)


def same(first: Started, second: Started) -> bool:
    mine, other = first.numbers(), second.numbers()
    return len(mine) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(mine, other, strict=True)
    )


def plain(family: str, dtype: str = "bfloat16", **sizes: Any) -> Callable[[Path], Path]:
    return lambda root: make_checkpoint(family, root / "model", dtype=dtype, **sizes)


def quantised(name: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        quantise(make_checkpoint("qwen3", root / "plain"), root, name)
        return root / "quantised"

    return make


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "bfloat16": (plain("qwen3"), {}),
    "float32": (plain("qwen3", "float32"), {}),
    "float16": (plain("qwen3", "float16"), {"dtype": "float16"}),
    "tied": (plain("qwen2", tie_word_embeddings=True), {}),
    "tied, wide head": (plain("qwen2", tie_word_embeddings=True), {"has_wide_head": True}),
    "gemma": (plain("gemma2"), {}),
    "experts": (plain("qwen2_moe"), {}),
    "experts, int8": (plain("qwen2_moe"), {"quantization": "int8"}),
    "latents": (plain("deepseek_v2"), {}),
    "gpt-oss": (plain("gpt_oss"), {}),
    "int8": (plain("qwen3"), {"quantization": "int8"}),
    "int4": (plain("qwen3"), {"quantization": "int4"}),
    "awq": (quantised("awq"), {"dtype": "bfloat16"}),
    "gptq": (quantised("gptq"), {"dtype": "bfloat16"}),
    "w8a8": (quantised("ct int8"), {"dtype": "bfloat16"}),
    "compressed, 4 bits": (quantised("ct int4 zeros"), {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_second_start_has_the_same_bits(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    model, folder = make(tmp_path), tmp_path / "kept"
    first, alone = Started(model, folder, **options), start(model, max_total_tokens=512, **options)[0]
    assert first.writes and not first.maps_its_file
    second = Started(model, folder, **options)
    assert not second.writes and second.maps_its_file
    assert same(first, second)
    assert first.tokens() == second.tokens()
    assert alone.runner.device.kept_weights is None  # type: ignore[attr-defined]


def test_weights_that_are_packed_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    first = Started(model, tmp_path / "kept")
    monkeypatch.setattr(kept_matrices, "KeptMismatch", AssertionError)
    second = Started(model, tmp_path / "kept")
    layer = second.model.layers[0].mlp.gate_up_proj
    assert isinstance(layer.packed, Matrix)
    again = KeptPackedWeights(first.kept.threads, first.kept.folder)
    names = again.open(second_key(model), writes=False)
    assert "layers.0.mlp.gate_up_proj.weight" in names and "layers.0.self_attn.qkv_proj.weight" in names
    assert "lm_head.weight" in names
    assert "norm.weight" not in names and "embed_tokens.weight" not in names


def second_key(model: Path) -> str:
    message = start_rank(model)
    return checkpoint_key.checkpoint_key(message, 0, "torch.bfloat16", read_model(message))


CHANGES: dict[str, Callable[[Path], object]] = {
    "another file": lambda file: file.write_bytes(file.read_bytes()),
    "its last byte": lambda file: change_byte(file),
    "a touch": lambda file: os.utime(file),
}


def change_byte(file: Path) -> None:
    found = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))  # as if it had not been changed


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_checkpoint_is_packed_again(change: str, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    first = Started(model, tmp_path / "kept")
    time.sleep(0.02)  # the file system's clock has moved on
    CHANGES[change](model / "model.safetensors")
    second = Started(model, tmp_path / "kept")
    assert second.writes and second.file != first.file


@pytest.mark.parametrize(
    "option",
    [{"quantization": "int8"}, {"dtype": "float32"}, {"config_overrides": {"rms_norm_eps": 0.1}}],
    ids=str,
)
def test_other_options_are_other_weights(option: dict[str, Any], tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    assert Started(model, tmp_path / "kept").writes
    assert Started(model, tmp_path / "kept", **option).writes
    assert not Started(model, tmp_path / "kept").writes


def test_few_weights_are_neither_looked_for_nor_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_matrices, "MIN_BYTES", 64 << 20)
    started = Started(make_checkpoint("llama", tmp_path / "model"), tmp_path / "kept")
    assert not started.kept.key and not started.writes  # no file was asked for
    assert started.tokens()


def test_a_file_that_changed_just_now_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_key, "SETTLED_NS", 10**18)
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    assert not Started(model, tmp_path / "kept").writes and not (tmp_path / "kept").exists()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def flip(place: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        with file.open("r+b") as opened:
            opened.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 0x40]))

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": lambda file: os.truncate(file, 0),
    "magic": flip(0),
    "numbers": flip(20),
    "header": flip(100),
    "first byte of the data": flip(2 << 20),
    "zeros behind the data": flip(-1),
    "of another model": lambda file: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    first = Started(model, tmp_path / "kept")
    if damage == "of another model":
        other = Started(model, tmp_path / "kept", quantization="int8")
        first.file.unlink()
        os.rename(other.file, first.file)
    else:
        DAMAGES[damage](first.file)
    second = Started(model, tmp_path / "kept")
    assert second.writes and same(first, second)
    assert not Started(model, tmp_path / "kept").writes, "the damaged file was replaced"


def test_layers_that_ask_for_something_else_read_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    first = Started(model, tmp_path / "kept")
    monkeypatch.setattr(KeptPackedWeights, "take", lambda self, form: None)
    second = Started(model, tmp_path / "kept")  # weights that were not loaded are packed
    assert same(first, second) and not first.file.exists()


def test_bounds(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    first = Started(model, tmp_path / "kept")
    size = first.file.stat().st_size
    os.utime(first.file, (1, 1))
    Started(model, tmp_path / "kept", max_bytes=2 * size)  # used now
    second = Started(model, tmp_path / "kept", max_bytes=2 * size + 4096, quantization="int8")
    os.utime(second.file, (1, 1))
    third = Started(model, tmp_path / "kept", max_bytes=2 * size + 4096, dtype="float16")
    assert first.file.exists() and third.file.exists() and not second.file.exists()
    small = Started(model, tmp_path / "kept", max_bytes=1000, dtype="float32")
    assert not small.file.exists() and first.file.exists()
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "kept").iterdir()} == {"0o600"}
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to any folder")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    model, folder = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16"), tmp_path / "kept"
    folder.mkdir(mode=0o500)
    started = Started(model, folder)
    assert started.writes and list(folder.iterdir()) == []
    assert started.tokens()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")]
)
def test_a_disk_that_takes_nothing(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16"), tmp_path / "kept"

    def write(*_: Any) -> int:
        raise error

    monkeypatch.setattr(os, "pwrite", write)
    started = Started(model, folder)
    assert started.writes and list(folder.iterdir()) == [] and started.tokens()


def test_a_full_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_folder, "FREE_SHARE", 1.0)
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    assert not Started(model, tmp_path / "kept").file.exists()


def test_one_of_two_writers_writes(tmp_path: Path) -> None:
    folder = PackedFolder(tmp_path / "kept", LARGE)
    written = []

    def fill(fd: int) -> None:
        written.append(fd)
        assert PackedFolder(tmp_path / "kept", LARGE).write("key", 10, fill) == ""  # nothing: it is locked
        os.pwrite(fd, b"0123456789", 0)

    assert folder.write("key", 10, fill) == ""
    assert folder.write("key", 10, fill) == "" and len(written) == 1
    assert folder.path("key").read_bytes() == b"0123456789"
    (tmp_path / "kept" / "left.writing").write_bytes(b"of a writer that was killed")
    folder.write("other", 10, lambda fd: None)
    assert sorted(path.name for path in folder.folder.iterdir()) == ["key.packed", "other.packed"]


def test_only_files_of_this_user_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    first = Started(model, tmp_path / "kept")
    target = tmp_path / "elsewhere"
    os.rename(first.file, target)
    first.file.symlink_to(target)
    second = Started(model, tmp_path / "kept")
    assert not second.maps_its_file and same(first, second)
    first.file.unlink()
    os.rename(target, first.file)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(packed_folder, "TRUSTED", frozenset())
    third = Started(model, tmp_path / "kept")
    assert not third.maps_its_file and same(first, third)


def test_data_in_small_pages_is_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    first = Started(model, tmp_path / "kept")
    monkeypatch.setattr(packed_memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(packed_memory, "huge_bytes", lambda address: 0)
    monkeypatch.setattr(packed_memory, "has_huge_pages", lambda: True)
    monkeypatch.setattr(packed_memory, "READ_BYTES", 100_000)
    second = Started(model, tmp_path / "kept")
    assert not second.writes and not second.maps_its_file and same(first, second)
    assert first.tokens() == second.tokens()


class OneOf:
    """The collectives of a rank, as far as layers ask while they are made."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    message = start_rank(model, tp_size=1, kept_weights=KeepWeights(str(tmp_path / "kept"), LARGE))
    found: list[list[list[Tensor]]] = []
    for _ in range(2):
        ranks = []
        for rank in range(2):
            device = open_device(message, 0, torch.bfloat16)
            device = replace(device, collectives=OneOf(rank, 2))  # type: ignore[arg-type]
            loader = WeightsLoader(device, message, read_model(message), torch.bfloat16)
            loaded = loader.load(writes=True)
            kept: Any = device.kept_weights
            if kept.writer is not None:
                kept.writer.join()
            ranks.append([tensor.clone() for tensor in tensors(loaded.model)])
        found.append(ranks)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    for first, second in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*found[0], strict=True))


def test_weights_go_come_back_and_are_replaced(tmp_path: Path) -> None:
    one = make_checkpoint("qwen3", tmp_path / "one", dtype="bfloat16")
    two = make_checkpoint("qwen3", tmp_path / "two", seed=1, dtype="bfloat16")
    folder = tmp_path / "kept"
    expected, other = Started(one, folder).tokens(), Started(two, tmp_path / "other").tokens()
    assert expected != other
    started = Started(one, folder)
    file = started.file
    assert started.executor.change_memory(ChangeMemory(1, ("weights",))).error == ""
    assert str(file) not in Path("/proc/self/maps").read_text(), "nothing holds weights that were released"
    assert started.executor.change_memory(ChangeMemory(2, ())).error == ""
    assert started.maps_its_file and started.tokens() == expected
    assert started.executor.update_weights(UpdateWeights(3, str(two), "auto", False)).error == ""
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert started.tokens() == other and len(list(folder.iterdir())) == 1, "updates are not kept"
    assert Started(one, folder).tokens() == expected


def test_packed_weights_move_to_host_memory_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    options: dict[str, Any] = {"quantization": "int8", "offload_setup": WeightOffload(None, True)}
    Started(model, tmp_path / "kept", **options)
    started = Started(model, tmp_path / "kept", **options)
    expected = started.tokens()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **rest: empty(*sizes, **rest))
    assert started.maps_its_file
    assert started.executor.change_memory(ChangeMemory(1, ("weights",))).error == ""
    assert not started.maps_its_file
    assert started.executor.change_memory(ChangeMemory(2, ())).error == ""
    assert started.tokens() == expected
