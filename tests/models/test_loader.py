"""Strict loading: what is refused, and with which words."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.devices import progress
from runtime.errors import ModelError, StartError
from runtime.models.config.weight_files import INDEX_FILE
from runtime.models.llama import Llama
from runtime.models.loader import target_name
from runtime.ranks.open_executor import open_executor
from tests.devices.drive import Planner, sampling, start, start_rank
from tests.models.make import make_checkpoint

FILE = "model.safetensors"


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """A damage done to the tensors of an unsharded checkpoint."""

    def damage(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
        change(tensors)
        save_file(tensors, folder / FILE)

    return damage


def index(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": file}}))


def cut(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[: len(content) // 2])


def rename(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")


def twice(folder: Path) -> None:
    save_file(load_file(folder / FILE), folder / "a.safetensors")
    (folder / FILE).rename(folder / "b.safetensors")


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (edit(lambda t: t.pop(Q)), ["lacks 1 ", "layers.1.self_attn.q_proj.weight", "config.json"]),
    "missing head": (edit(lambda t: t.pop("lm_head.weight")), ["lacks 1 ", "lm_head.weight"]),
    "extra": (
        edit(lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(3)})),
        ["1 weights", "layers.0.extra.weight", FILE],
    ),
    "more layers": (
        edit(lambda t: t.update({Q.replace(".1.", ".2."): t[Q].clone()})),
        ["model.layers.2", "config.json"],
    ),
    "shape": (edit(lambda t: t.update({Q: torch.zeros(8, 8)})), [Q, FILE, "[8, 8]", "[64, 64]"]),
    "dtype": (edit(lambda t: t.update({Q: torch.zeros(64, 64, dtype=torch.int8)})), [Q, FILE, "I8"]),
    "truncated": (cut, [FILE, "download"]),
    "garbage": (lambda folder: (folder / FILE).write_bytes(b"<html>not found</html>"), [FILE, "download"]),
    "empty": (lambda folder: (folder / FILE).write_bytes(b""), [FILE, "download"]),
    "other format": (rename, ["pytorch_model.bin", "torch.save"]),
    "no weights": (lambda folder: (folder / FILE).unlink(), ["no weights", "dummy"]),
    "in two files": (twice, ["is in both a.safetensors and b.safetensors"]),
    "index broken": (lambda folder: (folder / INDEX_FILE).write_text("{}"), [INDEX_FILE, "weight_map"]),
    "index names no file": (index("y.safetensors"), ["y.safetensors", "1 of 1"]),
    "index leaves the folder": (index(f"../{FILE}"), [INDEX_FILE]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_refuses(damage: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    do, words = DAMAGES[damage]
    do(folder)
    with pytest.raises(ModelError) as caught:
        start(folder)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_redundant_weights_are_tolerated(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / FILE)
    assert "lm_head.weight" not in tensors
    save_file(
        tensors
        | {"lm_head.weight": torch.zeros(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)},
        folder / FILE,
    )
    start(folder)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As many as config.json says, behind the others; one more is an error."""
    folder = make_checkpoint("deepseek_v3", tmp_path)  # 3 layers; num_nextn_predict_layers is 1
    tensors = load_file(folder / FILE)
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(3)}, folder / FILE)
    start(folder)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(3)}, folder / FILE)
    with pytest.raises(ModelError, match=r"model\.layers\.4"):
        start(folder)


def test_names_of_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    folder = make_checkpoint("ernie4_5_moe", tmp_path)
    tensors = load_file(folder / FILE)
    save_file(tensors | {"model.mtp_block.0.mlp.up_proj.weight": torch.zeros(3)}, folder / FILE)
    start(folder)


STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t[STACK].new_zeros(7, *t[STACK].shape[1:]),
            ["lacks 2 weights", "experts.7.gate_proj.weight"],
        ),
        (
            lambda t: t[STACK].new_zeros(9, *t[STACK].shape[1:]),
            ["has 2 weights", "experts.8.gate_proj.weight"],
        ),
        (lambda t: t[STACK][:, :40].clone(), ["experts.0.gate_proj.weight", "[20, 64]", "[24, 64]"]),
    ],
)
def test_stacks_of_experts_are_read_as_strictly(
    change: Callable[[dict[str, torch.Tensor]], torch.Tensor], words: list[str], tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path, stacked=True)
    edit(lambda tensors: tensors.update({STACK: change(tensors)}))(folder)
    with pytest.raises(ModelError) as caught:
        start(folder)
    assert all(word in str(caught.value) for word in words), caught.value


def test_progress_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "GAP_S", 0.0)
    folder = make_checkpoint("llama", tmp_path, shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    seen: list[tuple[str, int, int]] = []
    message = start_rank(folder)
    ready = open_executor(0, message, lambda *report: seen.append(report)).ready
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    weights = [done for phase, done, total in seen if phase == "weights" and total == size]
    assert weights == sorted(weights) and weights[0] == 0 and weights[-1] == size and len(weights) > 10
    phases = [phase for phase, _, _ in seen]
    assert list(dict.fromkeys(phases)) == ["device", "weights", "packing", "profile", "pages"]
    packed = [(done, total) for phase, done, total in seen if phase == "packing"]
    assert packed[0][0] == 0 < packed[-1][0] == packed[-1][1]
    on_disk = sum(
        tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values()
    )
    assert ready.weights_bytes == on_disk


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / FILE).unlink()
    answers = []
    for seed in (1, 1, 2):
        executor, ready = start(folder, load_format="dummy", seed=seed)
        planner = Planner(executor, ready, 4)
        answers.append(planner.generate(planner.row(0, [1, 2, 3], sampling(temperature=1.0, seed=5)), 12))
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float64"}, ["float64", "--dtype"]),
        ({"memory_fraction": 1e-9}, ["--mem-fraction-static"]),
        ({"max_total_tokens": 3}, ["--max-total-tokens", "--page-size 4"]),
    ],
)
def test_refuses_to_start(options: dict[str, object], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(StartError) as caught:
        start(make_checkpoint("llama", tmp_path), **options)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", ("layers.0.self_attn.qkv_proj.weight", "q")),
        ("model.layers.11.mlp.up_proj.bias", ("layers.11.mlp.gate_up_proj.bias", "up")),
        ("model.layers.0.mlp.down_proj.weight", ("layers.0.mlp.down_proj.weight", "")),
        ("model.embed_tokens.weight", ("embed_tokens.weight", "")),
        ("lm_head.weight", ("lm_head.weight", "")),
        ("strange", ("strange", "")),
    ],
)
def test_target_name(name: str, expected: tuple[str, str]) -> None:
    assert target_name(name, Llama.packed_modules) == expected
