"""Weights of GGUF files that a start finds packed as an earlier one left them."""

import os
from pathlib import Path
from typing import Any

import pytest

from runtime.devices.cpu import kept_matrices
from runtime.devices.cpu.self_check import load_library
from runtime.layers.quantization.ggml_rows import GgmlRows
from runtime.ranks import checkpoint_key
from tests.devices.cpu.test_ggml import mixed
from tests.devices.cpu.test_kept_weights import Started, same
from tests.models.make import make_checkpoint
from tests.models.make_gguf import write_gguf

pytestmark = pytest.mark.skipif(load_library() is None, reason="no kernels are built")


@pytest.fixture(autouse=True)
def keeps_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_matrices, "MIN_BYTES", 0)
    monkeypatch.setattr(checkpoint_key, "SETTLED_NS", 0)


def gguf(family: str, root: Path, **sizes: Any) -> Path:
    """A file of several types."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, **sizes}
    write_gguf(make_checkpoint(family, root / "plain", **sizes), root / "model.gguf", family, mixed)
    return root / "model.gguf"


@pytest.mark.parametrize(
    ("family", "sizes", "dtype"),
    [
        ("llama", {}, "bfloat16"),
        ("qwen2", {"tie_word_embeddings": True}, "bfloat16"),
        ("qwen3", {}, "float32"),  # dequantized
        ("qwen3_moe", {}, "bfloat16"),
    ],
    ids=str,
)
def test_the_second_start_has_the_same_bits(
    family: str, sizes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    model, folder = gguf(family, tmp_path, **sizes), tmp_path / "kept"
    first = Started(model, folder, dtype=dtype)
    assert first.writes and not first.maps_its_file
    second = Started(model, folder, dtype=dtype)
    assert not second.writes and second.maps_its_file
    assert same(first, second) and first.tokens() == second.tokens()


def test_blocks_of_a_file_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start makes its weights of the kept file alone."""
    model = gguf("qwen3_moe", tmp_path)
    first = Started(model, tmp_path / "kept", dtype="bfloat16")

    def packed(self: GgmlRows, rows: slice, columns: slice) -> None:
        raise AssertionError("a weight was read that is kept")

    monkeypatch.setattr(GgmlRows, "packed", packed)
    assert same(first, Started(model, tmp_path / "kept", dtype="bfloat16"))
    os.utime(model)
    with pytest.raises(AssertionError, match="that is kept"):
        Started(model, tmp_path / "kept", dtype="bfloat16")
