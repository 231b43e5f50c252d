"""Files for deployment, as far as they can be checked without a container engine and systemd as init."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.shape.source import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_made_of_what_exists(path: Path) -> None:
    """Extras are the package's, and what is copied is in the repository and not ignored."""
    text = path.read_text("utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"/src\[([\w,-]+)\]", text)
    assert set(wanted.split(",")) <= extras.keys()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)


def test_the_unit_is_one_for_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "runtime.service"
    text = (ROOT / "deploy" / "runtime.service").read_text("utf-8")
    unit.write_text(text.replace("/opt/runtime/bin/runtime", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    about_it = [line for line in done.stderr.splitlines() if "runtime.service" in line]
    assert not about_it
