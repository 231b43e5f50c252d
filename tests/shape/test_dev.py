"""The two commands of the README, as far as they can be tested without installing anything."""

import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shape.source import ROOT

# An interpreter that makes environments of itself, and installs until the test says that it is done.
PYTHON = """#!/bin/sh
case "$*" in
*"import torch"* | *urllib*) exit 1 ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" &&
    printf '#!/bin/sh\\necho served "$@"\\n' >"$3/bin/runtime" && chmod +x "$3/bin/runtime" ;;
"-m pip "*)
    echo "Collecting torch==2 (from x)"
    echo "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.3 MB)"
    echo $$ >pip.pid
    until [ -e done ]; do /bin/sleep 0.02; done
    [ -e fails ] && echo "ERROR: No matching distribution found for torch" && exit 1 ;;
esac
exit 0
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with ./dev, an interpreter that installs nothing, and a `sleep` that is soon over."""
    shutil.copy(ROOT / "dev", tmp_path)
    kernels = tmp_path / "runtime" / "devices" / "cpu" / "kernels"
    kernels.mkdir(parents=True)
    for path in (tmp_path / "pyproject.toml", tmp_path / "setup.py", kernels / "library.cpp"):
        path.write_text("")
    (tmp_path / "bin").mkdir()
    for name, text in (("python", PYTHON), ("sleep", "#!/bin/sh\nexec /bin/sleep 0.02\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def start(clone: Path, stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["./dev", "serve"],
        cwd=clone,
        env=os.environ
        | {"PATH": f"{clone / 'bin'}:{os.environ['PATH']}", "PYTHON": str(clone / "bin" / "python")},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def lines_of(stream: int) -> Iterator[str]:
    """What a script writes, in pieces that end with a line or a carriage return."""
    rest = ""
    while True:
        try:
            piece = os.read(stream, 1024).decode()
        except OSError:  # the terminal has no writer any more
            piece = ""
        if not piece:
            return
        *whole, rest = re.split(r"[\r\n]+", rest + piece)
        yield from whole


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_installation_shows_how_far_it_is(is_terminal: bool, clone: Path) -> None:
    """What is installed, the time, the bytes and pip's last step; on a terminal in one line."""
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    with start(clone, theirs) as process:
        os.close(theirs)
        shown = []
        for line in lines_of(ours):
            shown.append(line)
            if "downloading torch-2.13.0" in line:
                (clone / "done").touch()
        assert process.stdout is not None and process.stdout.read() == "served serve\n"
    os.close(ours)
    text = "\n".join(shown)
    assert re.search(r"installing torch 2\.\d+\.\d+: \d+ s, \d+ MB, downloading torch-2", text)
    torch = re.findall(r"^TORCH=(.*)$", (ROOT / "dev").read_text(), re.MULTILINE)[0]
    assert re.findall(r"dev: installed (.*): \d+ s, \d+ MB", text) == [f"torch {torch}", "runtime for serve"]
    assert ("\x1b[K" in text) == is_terminal


@pytest.mark.skipif(shutil.which("flock") is None, reason="this machine has no flock")
def test_two_commands_install_one_after_the_other(clone: Path) -> None:
    """The second one says that it waits, and then installs nothing."""
    with start(clone, subprocess.PIPE) as first:
        wait_until((clone / "pip.pid").exists)
        with start(clone, subprocess.PIPE) as second:
            assert second.stderr is not None
            assert second.stderr.readline() == "dev: another ./dev is installing; waiting for it\n"
            (clone / "done").touch()
            assert second.communicate() == ("served serve\n", "")
        out, shown = first.communicate()
    assert out == "served serve\n" and "installed runtime for serve" in shown


def test_an_installation_that_fails_shows_the_errors_of_pip(clone: Path) -> None:
    (clone / "done").touch()
    (clone / "fails").touch()
    with start(clone, subprocess.PIPE) as process:
        _, shown = process.communicate()
    assert process.returncode == 2
    assert "ERROR: No matching distribution found for torch\n" in shown and "cannot be installed" in shown
    assert "Downloading" not in shown


def test_a_signal_ends_the_installation(clone: Path) -> None:
    with start(clone, subprocess.PIPE) as process:
        wait_until(lambda: (clone / "pip.pid").exists() and (clone / "pip.pid").read_text().endswith("\n"))
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 130
    pip = Path("/proc") / (clone / "pip.pid").read_text().strip()
    wait_until(lambda: not pip.exists())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("shell", "script"),
    [("sh", "dev"), ("bash", ".ci/run"), ("bash", "tests/cuda/run.sh"), ("sh", "tests/cuda/wheels.sh")],
)
def test_scripts_can_be_parsed_and_run(shell: str, script: str) -> None:
    subprocess.run([shell, "-n", ROOT / script], check=True)
    assert os.access(ROOT / script, os.X_OK)


def test_a_missing_python_is_named_with_its_remedy(tmp_path: Path) -> None:
    shutil.copy(ROOT / "dev", tmp_path)
    done = subprocess.run(
        ["./dev", "serve"],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("dev: no Python 3.11 or newer; install one")
    assert not (tmp_path / ".venv").exists()


def test_continuous_integration_runs_the_same_command() -> None:
    assert "./dev test" in (ROOT / ".ci" / "run").read_text()
