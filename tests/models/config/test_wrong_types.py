"""config.json with values of other types than a model's: read all the same, or refused with the field's name,
and never by a TypeError or its like."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from tests.models import make, make_pooled
from tests.models.matrix import architecture_of

WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    2**70,
    "x",
    [],
    ["x"],
    [None, 1],
    {},
    {"x": 1},
    {"rope_theta": "x"},
)
# fields of which an error may name the one that they are read as, or that they contradict
ALSO = {
    "activation": "hidden_act",
    "full_attention": "rope_parameters",
    "layer_types": "num_kv_shared_layers",
    "mlp_hidden_act": "hidden_activation",
    "sliding_attention": "rope_parameters",
}
ROPES = ("rope_parameters", "rope_scaling")


def decoder(family: str) -> dict[str, Any]:
    kind, own = make.FAMILIES[family]
    return json.loads(kind(**(make.SIZES | own)).to_json_string()) | {
        "architectures": [architecture_of(family)]
    }


def encoder(family: str) -> dict[str, Any]:
    kind, own = make_pooled.FAMILIES[family]
    config = json.loads(kind(**own).to_json_string())
    return config | {"architectures": [make_pooled.AutoModel.from_config(kind(**own)).__class__.__name__]}


def changed(config: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """(field, wrong value, the whole file) for each field at the top and of rotary positions."""
    found = [(name, value, config | {name: value}) for name in (*config, *ROPES) for value in WRONG]
    for name in ROPES:
        inner = config.get(name) or {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        for field, value in inner.items():
            if isinstance(value, dict):  # of one kind of layer
                found += [
                    (below, wrong, config | {name: inner | {field: value | {below: wrong}}})
                    for below in value
                    for wrong in WRONG
                ]
            found += [(field, wrong, config | {name: inner | {field: wrong}}) for wrong in WRONG]
    return found


def check(config: dict[str, Any], folder: Path) -> None:
    path, broken = folder / "config.json", []
    for field, value, whole in changed(config):
        path.write_text(json.dumps(whole))
        try:
            read_config(folder)
        except ModelError as error:
            names = (
                field.removesuffix("s"),
                ALSO.get(field, field),
                *(value if isinstance(value, dict) else ()),
            )
            if not any(name in str(error) for name in names):
                broken.append(f"{field} = {value!r}: not named in: {error}")
        except Exception as error:
            broken.append(f"{field} = {value!r}: {error!r}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("family", make.FAMILIES)
def test_decoders(family: str, tmp_path: Path) -> None:
    check(decoder(family), tmp_path)


@pytest.mark.parametrize("family", make_pooled.FAMILIES)
def test_encoders_and_poolers(family: str, tmp_path: Path) -> None:
    check(encoder(family), tmp_path)
