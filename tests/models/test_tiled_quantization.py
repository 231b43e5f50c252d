"""Checkpoints of Marlin and QoQ against transformers with the weights that they stand for, and the online
scheme with experts of 4 bits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.quantization.allocate import allocate_quantized, input_groups
from runtime.layers.quantization.layouts import module_tensors
from runtime.layers.quantization.module_shard import ModuleShard
from runtime.layers.weight import Shard
from runtime.models.config.model_config import read_config
from runtime.models.config.quantization_config import READERS
from runtime.models.config.quantization_schemes import Fp8, PackedInt
from runtime.models.torch_files import LoadedTensor
from tests.devices.drive import start
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise
from tests.models.quantise_tiles import SIZES, TILED
from tests.models.reference import Reference
from tests.models.test_quantised import log_probabilities, reference, wanted


@pytest.mark.parametrize("name", TILED)
def test_each_layout_means_what_its_tool_wrote(name: str, tmp_path: Path) -> None:
    plain = make_checkpoint("qwen2", tmp_path / "plain", **SIZES)
    rounds = quantise(plain, tmp_path, name)
    found, tokens = log_probabilities(tmp_path / "quantised")
    expected = wanted(reference(tmp_path / "meant", rounds), tokens)[: len(found)]
    is_rounded = name.startswith("qoq")
    torch.testing.assert_close(found, expected, atol=5e-2 if is_rounded else 1e-4, rtol=0)
    other = wanted(Reference(plain), tokens)[: len(found)]
    assert (found - other).abs().mean() > 10 * (found - expected).abs().mean()


def test_qoq_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    """config.json says nothing then, and --quantization qoq has it read."""
    quantise(make_checkpoint("qwen2", tmp_path / "plain", **SIZES), tmp_path, "qoq groups")
    folder = tmp_path / "quantised"
    before = log_probabilities(folder)[0]
    config = json.loads((folder / "config.json").read_text())
    fields = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quant_config.json").write_text(json.dumps(fields))
    assert torch.equal(log_probabilities(folder, quantization="qoq")[0], before)


def loaded(name: str, tensors: dict[str, Tensor], outputs: Shard, inputs: Shard) -> dict[str, Tensor]:
    """What a rank with these outputs and inputs holds of a weight."""
    rules = READERS[TILED[name][1]["quant_method"]](TILED[name][1])
    format = rules[0].format
    assert format is not None
    parts = allocate_quantized(format.scheme, outputs.size, inputs, torch.float32, torch.device("cpu"))
    groups = input_groups(format.scheme, inputs).ids
    module = ModuleShard(format, parts, outputs, inputs, groups, True, set())
    for leaf, source in module_tensors(module).sources.items():
        assert source.load is not None and tuple(tensors[leaf].shape) == source.shape
        source.load(LoadedTensor(tensors[leaf]))
    return parts


@pytest.mark.parametrize("name", TILED)
def test_a_rank_has_its_part_of_the_tiles(name: str) -> None:
    """Splits that are no whole tiles among them."""
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    tensors = TILED[name][0](weight, None).tensors
    whole = loaded(name, tensors, Shard(128, 0, 128), Shard(256, 0, 256))
    is_packed = whole["weight"].dtype == torch.uint8
    for begin, size in ((0, 64), (64, 64), (32, 48)):
        part = loaded(name, tensors, Shard(128, begin, size), Shard(256, 0, 256))
        assert torch.equal(part["weight"], whole["weight"][begin : begin + size])
        assert torch.equal(part["scale"], whole["scale"][begin : begin + size])
        part = loaded(name, tensors, Shard(128, 0, 128), Shard(256, 2 * begin, 2 * size))
        first, last = (number // (2 if is_packed else 1) for number in (2 * begin, 2 * (begin + size)))
        assert torch.equal(part["weight"], whole["weight"][:, first:last])


def test_zero_points_between_codes_are_refused(tmp_path: Path) -> None:
    quantise(make_checkpoint("qwen2", tmp_path / "plain", **SIZES), tmp_path, "qoq")
    path = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj."
    tensors[name + "s1_szeros"] += tensors[name + "s1_scales"] / 2
    save_file(tensors, path)
    with pytest.raises(ModelError, match="s1_szeros"):
        start(tmp_path / "quantised")


def test_weights_that_are_no_whole_tiles_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = TILED["marlin"][1]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="tiles of 64 outputs and 16 inputs"):
        start(folder, load_format="dummy")


@pytest.mark.parametrize("name", ["marlin channel", "qoq groups"])
def test_random_weights_need_no_files(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path, **SIZES)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = TILED[name][1]
    (folder / "config.json").write_text(json.dumps(config))
    assert bool(log_probabilities(folder, load_format="dummy")[0].isfinite().all())


def test_experts_of_4_bits_and_the_rest_of_8(tmp_path: Path) -> None:
    """--quantization quark_int4fp8_moe on a plain checkpoint."""
    folder = make_checkpoint("qwen3_moe", tmp_path, moe_intermediate_size=32)
    config = read_config(folder, quantization="quark_int4fp8_moe")
    assert config.quantization is not None
    of_expert = config.quantization.format_of("layers.0.mlp.experts.3.up_proj")
    of_heads = config.quantization.format_of("layers.0.self_attn.q_proj")
    assert of_expert is not None and isinstance(of_expert.scheme, PackedInt) and of_expert.scheme.bits == 4
    assert of_heads is not None and of_heads.scheme == Fp8()
    found, tokens = log_probabilities(folder, quantization="quark_int4fp8_moe")
    expected = wanted(Reference(folder), tokens)[: len(found)]
    assert 1e-4 < (found - expected).abs().mean() < 0.3 * expected.abs().mean()
