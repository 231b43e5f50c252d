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


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    "name",
    ["PaliGemmaForConditionalGeneration", "Ovis2ForConditionalGeneration", "VoxtralForConditionalGeneration"],
)
def test_models_whose_images_and_sounds_have_no_encoder(name: str, impl: str, tmp_path: Path) -> None:
    """transformers has them, and its code computes models of text alone here."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(ModelError, match=f"{name} takes images, videos or sounds.*no encoder of it"):
        read_config(tmp_path, model_impl=impl)
