"""The table and the classes agree."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from runtime.errors import ModelError
from runtime.models.config.dual_config import DUALS
from runtime.models.config.encoder_config import ENCODERS
from runtime.models.config.model_config import read_config
from runtime.models.config.registry import FAMILIES, MODELS, REFUSED, TRANSFORMERS, check_architecture
from runtime.models.config.tasks import family_of


@pytest.mark.parametrize("path", sorted({*MODELS.values(), TRANSFORMERS.model_class}))
def test_every_row_has_a_class(path: str) -> None:
    module, _, name = path.partition(":")
    assert isinstance(getattr(import_module(module), name), type)


@pytest.mark.parametrize("name", MODELS)
def test_every_row_has_a_family(name: str) -> None:
    assert family_of(name) in (*FAMILIES, *ENCODERS) or name in DUALS


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """With the reason, before anything else of the file is read, whatever computes it."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    for impl in ("auto", "runtime", "transformers"):
        with pytest.raises(ModelError, match=f"{name}, which is not supported: {REFUSED[name][:20]}"):
            read_config(tmp_path, model_impl=impl)
    assert name not in MODELS


def test_unknown() -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM"):
        check_architecture("Nothing")


@pytest.mark.parametrize(
    ("name", "model_type", "why"),
    [
        ("Florence2ForConditionalGeneration", "florence2", "an encoder and a decoder"),
        ("Gemma3nForConditionalGeneration", "gemma3n", "attend to those behind them"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe", "experts of images are apart"),
        ("GraniteSpeechForConditionalGeneration", "granite_speech", "an adapter of their own"),
        ("MllamaForConditionalGeneration", "mllama", "cross-attend to images"),
    ],
)
def test_media_that_transformers_cannot_encode_here(
    name: str, model_type: str, why: str, tmp_path: Path
) -> None:
    fields = {"architectures": [name], "model_type": model_type, "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=f"transformers does not serve {name}.*{why}"):
        read_config(tmp_path, model_impl="transformers")
