"""One word for one thing, and it is the field's: words of this project that were retired stay away.

docs/glossary.md holds the words that are in use. A retired word is refused as a part of an identifier, and as
a word of a docstring, a comment or a page of docs where plain English has no use for it either.
"""

import re
import tokenize
from pathlib import Path

import pytest

from tests.shape import source

# retired word -> what to write; parts of identifiers, singular and plural
IN_NAMES = {
    "wish": "request, params, spec or command",
    "wishes": "requests, params or specs",
    "wished": "requested",
    "residence": "memory saver",
    "occupy": "resume",
    "renew": "update weights",
    "rehearse": "profile run",
    "rehearsal": "profile run",
    "hosted": "offloaded",
    "parked": "offloaded",
    "seat": "LoRA slot",
    "seats": "LoRA slots",
    "seated": "in a LoRA slot",
    "seating": "LoRA assignment",
    "moves": "page copies",
    "mixture": "MoE",
    "dialect": "API or answer format",
    "dialects": "APIs",
    "doors": "auth",
    "thoughts": "reasoning",
    "spelling": "alias",
    "spellings": "aliases",
    "trail": "resumable stream",
    "trails": "resumable streams",
    "told": "given or reported",
    "said": "options, or what was reported",
    "hear": "handle or receive",
    "heard": "received",
    "keeping": "request log",
    "beside": "side stream",
    "meeting": "rendezvous",
    "guides": "grammar masks",
    "guided": "with a grammar mask",
    "adjuster": "penalties",
    "drawn": "sampled",
    "rounding": "activation quantization",
    "spreading": "MoE permute",
}
IN_PROSE = (
    *(
        "wish",
        "wishes",
        "wished",
        "nobody",
        "whoever",
        "somebody",
        "rehearsal",
        "residence",
        "seated",
        "seats",
    ),
    *("dialect", "dialects", "mixture of ranks", "doors", "thoughts", "hears"),
)
ALLOWED = {
    # names of other systems that clients send, see their own documentation
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
}
FOLDERS = ("runtime", "tests", "bench", "docs")
CODE = [
    path for folder in FOLDERS for path in source.files(folder) if path != Path("tests/shape/test_words.py")
]
PAGES = sorted(
    [*(source.ROOT / "docs").glob("*.md"), *source.ROOT.glob("*.md"), *source.ROOT.glob("examples/*.md")]
)

_PART = re.compile(r"[A-Z]?[a-z]+")
# a retired word as _PART would find it: at the start of a part in lower case, or with its capital
_IN_SOME_NAME = re.compile(
    rf"((?<![a-z])({'|'.join(IN_NAMES)})|{'|'.join(word.capitalize() for word in IN_NAMES)})(?![a-z])"
)
_PROSE = re.compile(rf"\b({'|'.join(IN_PROSE)})\b", re.IGNORECASE)


def names(path: Path) -> list[str]:
    """Identifiers of a file that have a retired word in them, with their lines."""
    if not _IN_SOME_NAME.search(source.text(path)):
        return []  # nothing to look for among its tokens
    return [
        f"{path}:{token.start[0]}: {token.string}: write {IN_NAMES[part.lower()]}"
        for token in source.tokens(path)
        if token.type == tokenize.NAME and token.string not in ALLOWED
        for part in _PART.findall(token.string)
        if part.lower() in IN_NAMES
    ]


def prose(path: Path) -> list[str]:
    """Retired words in the docstrings and comments of a file, with their lines."""
    if not _PROSE.search(source.text(path)):
        return []
    return [
        f"{path}:{token.start[0]}: {word}"
        for token in source.prose(path)
        for word in _PROSE.findall(token.string)
    ]


def test_no_retired_words_in_names() -> None:
    retired = [name for path in CODE for name in names(path)]
    assert not retired, "\n".join(retired)


def test_no_retired_words_in_docstrings_and_comments() -> None:
    retired = [word for path in CODE for word in prose(path)]
    assert not retired, "\n".join(retired)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_retired_words_in_docs(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    assert not _PROSE.findall(text), f"{page.name}: {_PROSE.findall(text)}"


def test_a_retired_word_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "case.py").write_text('def take_wishes() -> None:\n    """Whoever comes."""\n')
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert names(Path("case.py")) and prose(Path("case.py"))
