"""The commands of docs/start.md, as far as they need neither a network nor a model: options that exist, lines
that are translated, files that are there. What its steps do is tested where it is done."""

import re
import shlex

import pytest

from runtime.cli import COMMANDS
from runtime.options.compat.translate import translate
from runtime.options.parse import from_argv
from tests.shape.source import ROOT

PAGE = (ROOT / "docs" / "start.md").read_text("utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]
OURS = [shlex.split(line)[1:] for line in LINES if line.startswith("./dev ")]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_commands(words: list[str]) -> None:
    assert words[0] in COMMANDS
    if words[0] == "serve":
        from_argv(words[1:])
    elif words[0] == "check":
        from_argv(words[2:])
    elif words[0] == "translate" and words[1] != "<":
        from_argv(translate(words[1:], only_working=True).words()[2:])


def test_the_page_has_them() -> None:
    assert {words[0] for words in OURS} == {"serve", "check", "translate"}


def test_files_and_pages_that_it_names_exist() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE)]
    named = [word for line in LINES for word in line.split() if word.startswith("examples/")]
    files = [ROOT / "docs" / link for link in links] + [ROOT / word.partition(":")[0] for word in named]
    assert all(file.exists() or file.with_suffix(".py").exists() for file in files)
    assert (ROOT / "examples" / "tool_loop.py").exists() and len(named) >= 2
