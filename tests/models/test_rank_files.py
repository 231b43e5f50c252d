"""--load-format sharded_state: files of `runtime shard` give each rank the weights of the whole
checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.cli import main
from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.progress import without_progress
from runtime.errors import ModelError
from runtime.layers.weight import named_weights
from runtime.models.checkpoint import Checkpoint
from runtime.models.config.model_config import read_config
from runtime.models.config.registry import model_class
from runtime.models.kept_weights import quantized_weights
from runtime.models.loader import allocate, fill
from runtime.ranks.write_rank_files import RankOf, write_rank_files
from tests.devices.drive import Planner, sampling, start, start_rank
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

PROMPT = [5, 9, 200, 31, 7]


def weights_of(folder: Path, rank: int, size: int, ep_size: int) -> dict[str, torch.Tensor]:
    """All weights of one rank, before they are packed for a device."""
    alone: Device = open_device(start_rank(folder), 0, torch.float32)
    device = replace(alone, collectives=RankOf(rank, size), ep_size=ep_size, programs=None)
    config = read_config(folder)
    model = model_class(config)(device, torch.float32, config)
    checkpoint = Checkpoint(folder=folder, rank=rank, num_ranks=size)
    allocate(model, config, checkpoint)
    found = {name: weight.tensor for name, weight in named_weights(model)}
    found |= {
        f"{prefix}{name}": tensor
        for prefix, weight in quantized_weights(model)
        for name, tensor in weight.tensors.items()
    }
    packed = {name: tensor.clone() for name, tensor in found.items()}
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("runtime.models.loader._pack", lambda model, progress: None)
        fill(model, config, checkpoint, 0, without_progress)
    assert any(not torch.equal(packed[name], tensor) for name, tensor in found.items())
    return found


@pytest.mark.parametrize(
    ("family", "num_ranks", "ep_size"), [("llama", 2, 1), ("qwen3_moe", 4, 2), ("deepseek_v3", 2, 1)]
)
def test_each_rank_has_its_weights(family: str, num_ranks: int, ep_size: int, tmp_path: Path) -> None:
    own = {"num_key_value_heads": 4, "num_hidden_layers": 1} if family == "qwen3_moe" else {}
    folder, output = make_checkpoint(family, tmp_path / "hf", **own), tmp_path / "shards"
    message = start_rank(folder, tp_size=num_ranks, ep_size=ep_size)
    write_rank_files(message, output, 40_000, without_progress)
    assert len(list(output.glob("model-rank-1-part-*.safetensors"))) > 1
    for rank in range(num_ranks):
        whole = weights_of(folder, rank, num_ranks, ep_size)
        found = weights_of(output, rank, num_ranks, ep_size)
        assert whole.keys() == found.keys()
        assert all(torch.equal(whole[name], found[name]) for name in whole)


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, output = make_checkpoint("llama", tmp_path / "hf"), tmp_path / "shards"
    words = ["shard", "--output", str(output), "--model-path", str(folder), "--device", "cpu"]
    assert main(words) == 0 and "--load-format sharded_state" in capfd.readouterr().out
    executor, ready = start(output, load_format="sharded_state", dtype="float32")
    planner = Planner(executor, ready, 4)
    tokens = planner.generate(planner.row(0, PROMPT, sampling()), 8)
    assert tokens == Reference(folder).greedy(PROMPT, 8)
    assert {path.name for path in output.iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert main(words) == 2 and "name another one" in capfd.readouterr().err


def test_refuses_files_of_another_start(tmp_path: Path) -> None:
    folder, output = make_checkpoint("llama", tmp_path / "hf"), tmp_path / "shards"
    write_rank_files(start_rank(folder, tp_size=2), output, 10**9, without_progress)
    with pytest.raises(ModelError, match="is for rank 0 of 2, and this is rank 0 of 1"):
        start(output, load_format="sharded_state")
    (output / "model-rank-0-part-0.safetensors").rename(output / "model-rank-0-part-1.safetensors")
    with pytest.raises(ModelError, match="model-rank-0-part-.* not complete"):
        start(output, load_format="sharded_state")
