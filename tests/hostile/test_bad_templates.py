"""Chat templates that would fill the memory or never end are refused, with the reason, before they do."""

import json
import subprocess
import sys

import pytest

from tests.hostile.templates import BOMBS, NESTED


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    command = [sys.executable, "-m", "tests.hostile.templates"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_makes_too_much_is_refused(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name].startswith("refused: the c"), outcomes[name]


@pytest.mark.parametrize("name", NESTED)
def test_a_template_that_is_too_long_stops_the_start(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name].startswith("at start: the chat template 'default' of the model is "), outcomes[name]
