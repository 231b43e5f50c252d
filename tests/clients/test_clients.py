"""Client libraries that the `test` extra installs, run against a server; what the heads of all scripts say.

The others run with `./dev test-clients`, in environments of their own.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.__main__ import SERVERS, run
from tests.clients.catalogue import clients, read
from tests.e2e.serving import Server, serve
from tests.shape.source import ROOT

TABLE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
LIGHT = (
    "anthropic_client",
    "huggingface_hub_client",
    "langchain_openai_client",
    "ollama_client",
    "openai_client",
    "plain_http",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(*SERVERS["pocket"], "--file-storage-path", str(tmp_path_factory.mktemp("files"))) as running:
        yield running


@pytest.mark.parametrize("name", LIGHT)
def test_a_client(name: str, server: Server) -> None:
    client = clients()[name]
    outcome = run(client, [sys.executable, "-P", str(client.path)], server.url)
    assert not outcome.error, outcome.error


def test_each_is_pinned_documented_and_wants_a_known_server() -> None:
    for name, client in clients().items():
        assert client.server in SERVERS, name
        row = re.search(rf"^\| .*\| `{name}` \|.*$", TABLE, re.MULTILINE)
        assert row is not None, f"docs/clients.md has no row of {name}"
        for package, version in client.versions.items():
            assert version in row[0], f"docs/clients.md: {name} was tried with {package} {version}"


def test_the_table_names_no_other() -> None:
    assert set(re.findall(r"^\| [^|]+ \| `(\w+)` \|", TABLE, re.MULTILINE)) == set(clients())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)\n", "no script block"),
        ('# /// script\n# dependencies = ["openai"]\n# ///\n', "openai is not pinned"),
    ],
)
def test_a_head_that_lacks_something(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some_client.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        _ = read(path).versions


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('print("ok: chat")', ""),
        ('print("chat")', "it exercised nothing"),
        ('print("ok: chat"); raise SystemExit("refused")', "refused"),
    ],
)
def test_what_counts_as_passed(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "some_client.py"
    path.write_text(text)
    outcome = run(clients()["plain_http"], [sys.executable, str(path)], "")
    assert outcome.error == error
