"""The table and the classes agree."""

import pytest

from runtime.errors import ModelError
from runtime.models.config.encoder_config import ENCODERS
from runtime.models.config.registry import FAMILIES, MODELS, model_class
from runtime.models.config.tasks import family_of


@pytest.mark.parametrize("name", MODELS)
def test_every_row_has_a_class_and_a_family(name: str) -> None:
    assert isinstance(model_class(name), type) and (
        family_of(name) in FAMILIES or family_of(name) in ENCODERS
    )


def test_unknown() -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM"):
        model_class("Nothing")
