"""The table and the classes agree."""

from importlib import import_module

import pytest

from runtime.errors import ModelError
from runtime.models.config.encoder_config import ENCODERS
from runtime.models.config.registry import FAMILIES, MODELS, TRANSFORMERS, check_architecture
from runtime.models.config.tasks import family_of


@pytest.mark.parametrize("path", sorted({*MODELS.values(), TRANSFORMERS.model_class}))
def test_every_row_has_a_class(path: str) -> None:
    module, _, name = path.partition(":")
    assert isinstance(getattr(import_module(module), name), type)


@pytest.mark.parametrize("name", MODELS)
def test_every_row_has_a_family(name: str) -> None:
    assert family_of(name) in FAMILIES or family_of(name) in ENCODERS


def test_unknown() -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM"):
        check_architecture("Nothing")
