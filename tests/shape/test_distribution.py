"""The wheel that strangers install: its name is ours, it holds all that the repository has, and every install
line of the docs and of error texts names what it offers."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from runtime.devices.cpu.kernels.levels import LEVELS
from runtime.errors import DISTRIBUTION, install_line
from tests.shape.source import ROOT

PARTS = ("runtime", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def install_lines() -> dict[str, str]:
    """Each install line of this project's own package, and a file that has it."""
    files = [
        path
        for pattern in ("*.md", "docs/*.md", "runtime/**/*.py", "docker/*", "examples/*")
        for path in ROOT.glob(pattern)
        if path.is_file()
    ]
    lines = {
        line: path.relative_to(ROOT).as_posix()
        for path in files
        for line in re.findall(rf"pip install '?({DISTRIBUTION}(?:\[[\w,-]+\])?)'?", path.read_text("utf-8"))
    }
    extras = {
        install_line(extra).split("'")[1]: path.relative_to(ROOT).as_posix()
        for path in files
        for extra in re.findall(r"install_line\(['\"]([\w-]+)['\"]\)", path.read_text("utf-8"))
    }
    return lines | extras


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, for setuptools leaves files behind."""
    copy = tmp_path_factory.mktemp("copy")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(copy))
    (built,) = out.glob("*.whl")
    return built


# Zig's compiler, as far as a build sees it: an object is a line that says for what it was compiled
COMPILER = """
import sys
if "-o" in sys.argv:
    open(sys.argv[sys.argv.index("-o") + 1], "w").write(" ".join(sys.argv[1:]))
"""


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
def test_a_wheel_for_a_named_machine_has_its_kernels(machine: str, copy: Path, tmp_path: Path) -> None:
    """And none of this machine's, which lie in the source tree."""
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(COMPILER)
    here = copy / "runtime/devices/cpu/kernels/lib"
    here.mkdir(exist_ok=True)
    (here / "kernels-other-level.so").touch()
    named = {"RUNTIME_WHEEL_MACHINE": machine, "PYTHONPATH": str(tmp_path)}
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path / "dist"))
    _pip("wheel", *options, str(copy), **named)
    (here / "kernels-other-level.so").unlink()
    (built,) = (tmp_path / "dist").glob(f"*-py3-none-manylinux_2_28_{machine}.whl")
    with zipfile.ZipFile(built) as opened:
        found = {Path(name).name: name for name in opened.namelist() if "/kernels/lib/" in name}
        assert found.keys() == {level.path.name for level in LEVELS if level.machine == machine}
        for name in found.values():
            assert f"-target {machine}-linux-gnu.2.28" in opened.read(name).decode()


def test_it_has_every_file_of_the_package(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "runtime"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    with zipfile.ZipFile(wheel) as opened:
        assert set(tracked) - set(opened.namelist()) == set()
        assert any(name.endswith("licenses/LICENSE") for name in opened.namelist())


def test_install_lines_name_what_the_wheel_offers(wheel: Path, tmp_path: Path) -> None:
    """Extras are looked up in its metadata: of one that is not there pip warns, and not with --no-deps."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        offered = set(message_from_bytes(opened.read(name)).get_all("Provides-Extra", ()))
    wrong = {
        line: file
        for line, file in install_lines().items()
        if not set(re.findall(r"[\w-]+", line.removeprefix(DISTRIBUTION))) <= offered
    }
    assert len(install_lines()) > 5 and wrong == {}
    _pip(
        *("install", "--no-deps", "--no-index", "--find-links", str(wheel.parent)),
        *("--target", str(tmp_path), "--no-compile", DISTRIBUTION),
    )
    assert (tmp_path / "runtime" / "py.typed").exists()


def test_it_runs_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    for command, shows in ((["--version"], "runtime "), (["options"], "--model-path")):
        done = subprocess.run(
            [sys.executable, "-m", "runtime", *command],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        assert shows in done.stdout


def test_no_line_installs_the_package_of_a_stranger() -> None:
    """PyPI's `runtime` is not ours."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("runtime/**/*.py")]
    wrong = [
        path.name
        for path in files
        if re.search(r"\bruntime\[|install '?runtime\b(?!-)", path.read_text("utf-8"))
    ]
    assert not wrong


def _pip(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
