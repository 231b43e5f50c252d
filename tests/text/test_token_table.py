"""Tables of tokens' texts that are kept in files: equal to what is made anew, and never one that is damaged,
another user's or of another tokenizer."""

import os
from pathlib import Path

import pytest

from runtime.text import token_table
from runtime.text.token_table import KEPT, keep_table, read_table
from runtime.text.vocabulary import Vocabulary, table_of
from tests.text import build

SIZE = 512


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model folder, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_table, "SMALLEST", 1)
    (tmp_path / "model").mkdir()
    return build.save(tmp_path / "model", build.byte_level())


def kept(folder: Path) -> Path:
    """The one file of the cache."""
    (path,) = (folder.parent / "cache" / "runtime" / "tokens").iterdir()
    return path


def texts(vocabulary: Vocabulary) -> list[str]:
    """What each token adds to a text that has begun, with and without special ones."""
    found = []
    for skip in (True, False):
        for i in range(vocabulary.size):
            stream = vocabulary.stream(vocabulary.encode("a"), skip_special=skip)
            found.append(stream.add(i) + stream.flush())
    return found


@pytest.mark.parametrize("make", [build.byte_level, build.sentencepiece])
def test_a_kept_table_is_the_one_that_is_made(folder: Path, make: object) -> None:
    build.save(folder, make())  # type: ignore[operator]
    first = Vocabulary.load(folder, SIZE)
    assert table_of(folder, SIZE) is None
    first.keep_table()
    again = Vocabulary.load(folder, SIZE)
    assert table_of(folder, SIZE) == again.token_table == first.token_table
    assert texts(again) == texts(first) and again.special_ids == first.special_ids
    assert again.size == first.size and again.token_bytes(again.encode("é")[0]) == first.token_bytes(
        first.encode("é")[0]
    )


@pytest.mark.parametrize("place", [3, 40, -1])
def test_a_damaged_file_is_made_again(folder: Path, place: int) -> None:
    vocabulary = Vocabulary.load(folder, SIZE)
    vocabulary.keep_table()
    whole = kept(folder).read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    for data in (bytes(damaged), whole[:-5], b""):
        kept(folder).write_bytes(data)
        assert table_of(folder, SIZE) is None
        again = Vocabulary.load(folder, SIZE)
        assert again.token_table == vocabulary.token_table
        again.keep_table()
        assert kept(folder).read_bytes() == whole


def test_ids_beyond_the_table_are_refused(folder: Path) -> None:
    """A file with a right digest that no writer of ours has made."""
    table = Vocabulary.load(folder, SIZE).token_table
    table.special_ids.append(SIZE)
    keep_table("0" * 64, table)
    assert kept(folder).exists() and read_table("0" * 64, SIZE) is None
    assert read_table("0" * 64, SIZE + 1) is None


def test_another_users_file_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Vocabulary.load(folder, SIZE).keep_table()
    monkeypatch.setattr(token_table, "TRUSTED", frozenset())
    monkeypatch.setattr(os, "geteuid", lambda: kept(folder).stat().st_uid + 1)
    assert table_of(folder, SIZE) is None
    monkeypatch.undo()


def test_a_link_is_not_followed(folder: Path) -> None:
    Vocabulary.load(folder, SIZE).keep_table()
    path = kept(folder)
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    assert table_of(folder, SIZE) is None


def test_another_tokenizer_has_another_file(folder: Path) -> None:
    Vocabulary.load(folder, SIZE).keep_table()
    assert table_of(folder, SIZE + 1) is None
    build.save(folder, build.byte_level(), extra_special_tokens=["<more>"])
    assert table_of(folder, SIZE) is None


def test_the_oldest_files_go(folder: Path) -> None:
    table = Vocabulary.load(folder, SIZE).token_table
    for index in range(KEPT + 3):
        keep_table(f"{index:064x}", table)
        os.utime(folder.parent / "cache/runtime/tokens" / f"{index:064x}.tokens", (index, index))
    keep_table("f" * 64, table)
    assert read_table("f" * 64, SIZE) == table and read_table(f"{3:064x}", SIZE) is None
    assert read_table(f"{KEPT + 2:064x}", SIZE) == table
