"""Files of a model against a list of checksums."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from runtime.core import Core
from runtime.errors import OptionsError, StartError
from runtime.models.config.checksums import check_files
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from tests.test_core import running

FILES = {"a.safetensors": b"first", "b.safetensors": b"second", "config.json": b"{}"}
SUMS = {name: sha256(content).hexdigest() for name, content in FILES.items()}
LINES = "".join(f"{entry}  {name}\n" for name, entry in SUMS.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name, content in FILES.items():
        (tmp_path / "model" / name).write_bytes(content)
    return tmp_path / "model"


@pytest.mark.parametrize(
    "text",
    [
        LINES,
        LINES.replace("  ", " *"),
        json.dumps(SUMS),
        json.dumps({"files": {name: {"sha256": entry.upper(), "size": 5} for name, entry in SUMS.items()}}),
        json.dumps({name: "sha256:" + entry for name, entry in SUMS.items()}),
    ],
    ids=["lines", "binary", "json", "nested", "marked"],
)
def test_files_that_are_as_listed(text: str, folder: Path) -> None:
    (listed := folder.parent / "sums").write_text(text)
    assert check_files(folder, listed) == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LINES.replace(SUMS["b.safetensors"], "0" * 64), "b.safetensors is not what"),
        (LINES + f"{'1' * 64}  c.safetensors\n", "no such file"),
        (LINES.splitlines()[0], "does not name b.safetensors"),
        ("hello", "no list of SHA-256 checksums"),
        ("", "no list"),
        ("{", "no list"),
        ('{"a": 3}', "no list"),
        ('{"files": [1]}', "no list"),
        (f"{'1' * 64}  ../outside\n", "no list"),
        (f"{'1' * 40}  a.safetensors\n", "no list"),
    ],
)
def test_what_is_not_as_listed_is_named(text: str, reason: str, folder: Path) -> None:
    (listed := folder.parent / "sums").write_text(text)
    with pytest.raises(StartError, match=reason):
        check_files(folder, listed)


def test_without_a_file_the_hub_is_asked() -> None:
    with pytest.raises(OptionsError, match="takes the checksums of the hub, and --model-path is a folder"):
        plan_for(from_values({"device": "null", "model_checksum": ""}))


@pytest.mark.anyio
async def test_a_server_checks_before_it_loads(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"device": "null", "model_checksum": str(tmp_path / "sums")}
    folder = Path(plan_for(from_values({"device": "null"})).model.model_path)
    sums = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    (tmp_path / "sums").write_text(json.dumps(sums))
    async with running(**plan) as core:
        assert core.health().state == "ready"
    (tmp_path / "sums").write_text(json.dumps(dict.fromkeys(sums, "0" * 64)))
    core = Core(plan_for(from_values(plan)))
    await core.run()
    assert (
        core.health().state == "failed"
        and isinstance(core.failure, StartError)
        and "is not what" in str(core.failure)
    )


def test_weights_in_pickles_must_be_listed(folder: Path) -> None:
    (listed := folder.parent / "sums").write_text(LINES)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(StartError, match=r"does not name pytorch_model\.bin"):
        check_files(folder, listed)
