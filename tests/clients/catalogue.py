"""Scripts that exercise one client library each; their heads have the versions that they were tried with."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
# the inline metadata of scripts (Python packaging's "script" block), after # or //
HEAD = re.compile(r"^(?:#|//) /// script\n((?:(?:#|//).*\n)+?)(?:#|//) ///$", re.MULTILINE)
PINNED = re.compile(r"^(@?[\w./-]+(?:\[[\w,-]+\])?)(?:==|@)(\d[\w.]*)$")


@dataclass(frozen=True, kw_only=True)
class Client:
    """A script that exercises one client library against a server.

    `requirements` are pinned packages of pip (`name==1.2`), or of npm (`name@1.2`) for scripts of node;
    `server` names the options of the server that it wants (tests/clients/__main__.py).
    """

    name: str
    path: Path
    requirements: tuple[str, ...]
    server: str

    @property
    def is_python(self) -> bool:
        """Whether pip installs it, and not npm."""
        return self.path.suffix == ".py"

    @property
    def versions(self) -> dict[str, str]:
        """Package -> version. Raises ValueError for a requirement that is not pinned."""
        found = {}
        for requirement in self.requirements:
            if (pinned := PINNED.match(requirement)) is None:
                raise ValueError(f"{self.path.name}: {requirement} is not pinned to a version")
            found[pinned[1].split("[")[0]] = pinned[2]
        return found


def read(path: Path) -> Client:
    """The client of a script. Raises ValueError where its head is missing."""
    if (head := HEAD.search(path.read_text(encoding="utf-8"))) is None:
        raise ValueError(f"{path} has no script block with its dependencies")
    fields = tomllib.loads(re.sub(r"^(#|//) ?", "", head[1], flags=re.MULTILINE))
    return Client(
        name=path.stem,
        path=path,
        requirements=tuple(fields["dependencies"]),
        server=fields.get("server", "pocket"),
    )


@cache
def clients() -> dict[str, Client]:
    """All clients, by name."""
    paths = [*(FOLDER / "python").glob("*.py"), *(FOLDER / "node").glob("*.mjs")]
    found = {path.stem: read(path) for path in sorted(paths)}
    assert len(found) == len(paths), "two scripts have one name"
    return found
