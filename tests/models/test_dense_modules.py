"""EmbeddingGemma and linear layers behind pooling, against sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import Gemma3TextConfig, Gemma3TextModel

from runtime.devices.progress import without_progress
from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from runtime.ranks.open_executor import open_executor
from runtime.settings import start_rank
from tests.models.make import SIZES, randomize
from tests.models.make_pooled import make_pooled, write_modules, write_tokenizer
from tests.models.test_pooled import vectors
from tests.options.test_footprint import planned

TEXTS = ["a", "the cat sat on the mat, and then it slept", "seven", "b c d e f g h i j k l m"]
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
    "pad_token_id": 0,
}


def make_embedding_gemma(folder: Path) -> None:
    torch.manual_seed(0)
    randomize(Gemma3TextModel(Gemma3TextConfig(**(SIZES | GEMMA))).eval()).save_pretrained(folder)
    write_tokenizer(folder)
    write_modules(folder, "mean", word_embedding_dimension=64)


def add_dense(folder: Path, sizes: list[tuple[int, int]], activation: str, *, bias: bool) -> None:
    """Writes linear layers behind pooling, as sentence-transformers does."""
    generator = torch.Generator().manual_seed(2)
    modules = json.loads((folder / "modules.json").read_text())
    dense = []
    for i, (inputs, outputs) in enumerate(sizes, 2):
        path = folder / f"{i}_Dense"
        path.mkdir()
        fields = {"in_features": inputs, "out_features": outputs, "bias": bias}
        (path / "config.json").write_text(json.dumps(fields | {"activation_function": activation}))
        tensors = {"linear.weight": torch.randn(outputs, inputs, generator=generator) * 0.2}
        if bias:
            tensors["linear.bias"] = torch.randn(outputs, generator=generator)
        save_file(tensors, path / "model.safetensors")
        dense.append(
            {"idx": i, "name": path.name, "path": path.name, "type": "sentence_transformers.models.Dense"}
        )
    (folder / "modules.json").write_text(json.dumps([*modules[:2], *dense, *modules[2:]]))


def check(folder: Path, size: int) -> None:
    reference = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    expected = reference.encode(TEXTS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = vectors(folder, [tokenizer.encode(text).ids for text in TEXTS])
    assert found.shape == (len(TEXTS), size)
    pooling = read_config(folder).pooling
    assert pooling is not None and pooling.is_normalised  # which is done in the process of the server
    found = found / np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_embedding_gemma(tmp_path: Path) -> None:
    make_embedding_gemma(tmp_path)
    add_dense(tmp_path, [(64, 80), (80, 48)], "torch.nn.modules.linear.Identity", bias=False)
    check(tmp_path, 48)


@pytest.mark.parametrize("activation", ["activation.Tanh", "activation.GELU"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_encoders_with_a_linear_layer(family: str, activation: str, tmp_path: Path) -> None:
    make_pooled(family, "embed", tmp_path)
    write_modules(tmp_path, "mean", word_embedding_dimension=32)
    add_dense(tmp_path, [(32, 24)], f"torch.nn.modules.{activation}", bias=True)
    check(tmp_path, 24)


def test_pickled_weights_of_a_linear_layer(tmp_path: Path) -> None:
    make_embedding_gemma(tmp_path)
    add_dense(tmp_path, [(64, 48)], "torch.nn.modules.linear.Identity", bias=True)
    file = tmp_path / "2_Dense" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    check(tmp_path, 48)
    file.with_name("pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="2_Dense has no model.safetensors"):
        vectors(tmp_path, [[1, 2]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_residual": True}, "use_residual"),
        ({"activation_function": "x.Swoosh"}, "Swoosh"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
        ({"in_features": 7}, "in_features 7"),
        ({"out_features": "wide"}, "out_features"),
    ],
)
def test_other_layers_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_embedding_gemma(tmp_path)
    add_dense(tmp_path, [(64, 48)], "torch.nn.modules.linear.Identity", bias=True)
    path = tmp_path / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def test_norms_before_linear_layers_are_refused(tmp_path: Path) -> None:
    make_embedding_gemma(tmp_path)
    add_dense(tmp_path, [(64, 48)], "torch.nn.modules.linear.Identity", bias=True)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([*modules[:2], modules[3], modules[2]]))
    with pytest.raises(ModelError, match="Normalize before Dense"):
        read_config(tmp_path)


def test_a_model_in_both_directions_generates_nothing(tmp_path: Path) -> None:
    make_embedding_gemma(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for name, message in (("Gemma3ForCausalLM", "--is-embedding"), ("Qwen3Model", "is not supported for")):
        (tmp_path / "config.json").write_text(json.dumps(fields | {"architectures": [name]}))
        with pytest.raises(ModelError, match=message):
            read_config(tmp_path)


def test_memory_is_as_planned(tmp_path: Path) -> None:
    """Such a model takes no memory for pages."""
    make_embedding_gemma(tmp_path)
    add_dense(tmp_path, [(64, 48)], "torch.nn.modules.linear.Identity", bias=True)
    plan, found = planned(tmp_path, max_total_tokens=4096)
    rank = open_executor(0, start_rank(plan, read_config(tmp_path)), without_progress)
    rank.close()
    assert (rank.ready.weights_bytes, rank.ready.pages_bytes) == (found.weights_bytes, 0)
    assert found.pages_bytes == 0
