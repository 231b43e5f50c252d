"""Files that docstrings, comments and docs mention exist: what moved is mentioned where it is."""

import re
from pathlib import Path

import pytest

from tests.shape import source

# a file of this project, from the root or from runtime/: `runtime/cache/host.py`, `cache/host.py`, `host.py`
_FILE = re.compile(r"(?<![\w/.<*])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b(?!\w)")
FOREIGN = {
    "conftest.py",
    "sitecustomize.py",
    "mine.py",
    "_op_plugin_docs.py",
    "torch_npu/_op_plugin_docs.py",
    "attention_v1.py",
}
# a class or its member: `StepPlan`, `Planner.plan`; a function: `give_way()`
_NAME = re.compile(
    r"`((?:[A-Z][a-z0-9]+){2,}(?:\.\w+)*|[A-Z][a-z]\w*(?:\.[a-z_]\w*)+|[a-z_]+(?=\(\)))(?:\(.*?\))?`"
)
FOREIGN_NAMES = {"InferencePool", "DynamicUser", "NoNewPrivileges", "PrivateTmp"}
PAGES_OF_OTHERS = {"models.md", "CHANGELOG.md"}  # names of transformers, and of what there was
CODE = [path for folder in ("runtime", "tests", "bench") for path in source.files(folder)]
PAGES = sorted(
    [*(source.ROOT / "docs").glob("*.md"), *source.ROOT.glob("*.md"), *source.ROOT.glob("examples/*.md")]
)
KNOWN = {
    path.as_posix()
    for folder in ("runtime", "tests", "bench", "pocket", "docs", "examples")
    for path in source.files(folder)
}


def is_known(mention: str) -> bool:
    """Whether a mention means a file: from the root, from runtime/, or by its last parts."""
    return any(name == mention or name.endswith("/" + mention) for name in KNOWN)


def mentions(path: Path) -> list[str]:
    """Files that the docstrings and comments of a source file mention."""
    if not _FILE.search(source.text(path)):
        return []
    return [name for token in source.prose(path) for name in _FILE.findall(token.string)]


def test_files_that_code_mentions_exist() -> None:
    missing = [
        f"{path} mentions {name}"
        for path in CODE
        for name in mentions(path)
        if name not in FOREIGN and not is_known(name)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_docs_mention_exist(page: Path) -> None:
    text = re.sub(r"\]\([^)]*\)", "", page.read_text("utf-8"))
    missing = [name for name in _FILE.findall(text) if name not in FOREIGN and not is_known(name)]
    assert not missing, f"{page.name} mentions {missing}, which do not exist"


def test_names_that_docs_mention_exist() -> None:
    """Classes, their members and functions: `Planner.plan`, `StepPlan`, `give_way()`."""
    words = {word for path in CODE for word in re.findall(r"\w+", source.text(path))}
    missing = [
        f"{page.name} mentions {name}"
        for page in PAGES
        if page.name not in PAGES_OF_OTHERS
        for name in _NAME.findall(re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S))
        if name not in FOREIGN_NAMES and not words.issuperset(name.split("."))
    ]
    assert not missing, "\n".join(missing)


def test_rooms_of_the_architecture_are_those_of_the_package() -> None:
    """Each folder and file of runtime/ has its row in docs/architecture.md, and each row is there."""
    page = (source.ROOT / "docs" / "architecture.md").read_text("utf-8")
    _, _, table = page.partition("| room | what is in it |")
    rows = re.findall(r"^\| (`.*?) \|", table.partition("\n\n")[0], re.M)
    there = {path.name + "/" * path.is_dir() for path in source.PACKAGE.iterdir()}
    there = {name for name in there if not name.startswith("_") and name.endswith(("/", ".py"))}
    assert set(re.findall(r"`(.*?)`", " ".join(rows))) == there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_docs_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}, which do not exist"


def test_no_merge_is_left_half_done() -> None:
    files = [*PAGES, *(source.ROOT / path for path in CODE)]
    mark = re.compile(r"^(<{7} |>{7} )", re.MULTILINE)
    assert not [path.name for path in files if mark.search(path.read_text("utf-8"))]
