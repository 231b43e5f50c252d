"""Completion scripts: what the shells themselves complete with them."""

import shutil
import subprocess

import pytest

from runtime.cli import COMMANDS
from runtime.cli.completion import SHELLS, script
from runtime.options.table import rows


def complete(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in words)
    called = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _runtime"
    source = f'{script("bash")}\n{called}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", source], check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["runtime", "se"], ["serve"]),
        (["runtime", ""], list(COMMANDS)),
        (["runtime", "serve", "--page-s"], ["--page-size"]),
        (["runtime", "serve", "--log-format", "j"], ["json"]),
        (["runtime", "check", "--model-p"], ["--model-path"]),
        (["runtime", "serve", "--no-such"], []),
    ],
)
def test_bash(words: list[str], offered: list[str]) -> None:
    assert complete(*words) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_every_option_that_works_is_in_it(shell: str) -> None:
    text = script(shell)
    missing = [row.flag for row in rows() if row.acts and row.flag.removeprefix("--") not in text]
    assert not missing


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_it(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=script(shell), check=True, capture_output=True, text=True)
