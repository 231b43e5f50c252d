"""The texts of a vocabulary's tokens, and the files in which they are kept from one start to the next.

To list 150,000 tokens and to make a table of their texts takes a quarter of a second, in every process that
needs it. A file's name is a digest of all that the table is made from; the file begins with a digest of the
rest of it. A file that is damaged, or another user's, is not used, and made again.
"""

import hashlib
import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec import Struct

from runtime.regular_file import read_regular
from runtime.storage.settings import cache_folder
from runtime.text.token_text import TokenText
from runtime.text.tokenizer_files import TokenizerFiles

VERSION = b"runtime token table 1\n"  # of what is kept and of how it is made: token_text.py, vocabulary.py
SMALLEST = 1 << 14  # tokens of a vocabulary whose table is kept
KEPT = 16  # files
TRUSTED = frozenset({0})  # users whose files are read, besides our own
_DIGEST_BYTES = 32


class TokenTable(Struct, frozen=True):
    """Texts by token id, as TokenTexts has them: of all tokens, special ones too."""

    texts: list[TokenText]
    special_ids: list[int]
    missing: list[int]  # ids without a token
    replaces_each_byte: bool
    leading_spaces: int


class _Kept(Struct, frozen=True, array_like=True):
    """A table as its file has it: texts that are whole characters, and by id the others."""

    texts: list[str]
    others: dict[int, bytes]
    special_ids: list[int]
    missing: list[int]
    replaces_each_byte: bool
    leading_spaces: int


_DECODER = msgspec.msgpack.Decoder(_Kept)


def key_of(tokenizer_json: bytes, files: TokenizerFiles, size: int) -> str:
    """The name of a table: a digest of what it is made from."""
    digest = hashlib.sha256(VERSION)
    rest = msgspec.json.encode((size, msgspec.structs.replace(files, templates={})), order="sorted")
    for part in (rest, tokenizer_json):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def read_table(key: str, size: int) -> TokenTable | None:
    """The table that is kept under a key, of at least `size` tokens. None: there is none that is whole and
    this user's or root's."""
    path = _path(key)
    try:
        found = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in TRUSTED | {os.geteuid()}:
            return None
        data = read_regular(path)
    except OSError:
        return None
    head, body = data[:_DIGEST_BYTES], memoryview(data)[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != head:
        return None
    try:
        kept = _DECODER.decode(body)
    except msgspec.DecodeError:
        return None
    ids = [*kept.others, *kept.special_ids, *kept.missing]
    if len(kept.texts) < size or not all(0 <= i < len(kept.texts) for i in ids):
        return None
    texts: list[TokenText] = list(kept.texts)
    for i, text in kept.others.items():
        texts[i] = text
    return TokenTable(texts, kept.special_ids, kept.missing, kept.replaces_each_byte, kept.leading_spaces)


def keep_table(key: str, table: TokenTable) -> None:
    """Writes the file of a key, unless the table is small, and removes those that were written before the
    latest ones. Raises OSError."""
    if len(table.texts) < SMALLEST:
        return
    others = {i: text for i, text in enumerate(table.texts) if isinstance(text, bytes)}
    texts = [text if isinstance(text, str) else "" for text in table.texts]
    rest = table.special_ids, table.missing, table.replaces_each_byte, table.leading_spaces
    body = msgspec.msgpack.encode(_Kept(texts, others, *rest))
    path = _path(key)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        written = Path(folder) / path.name
        written.write_bytes(hashlib.sha256(body).digest() + body)
        written.replace(path)
    _drop_oldest(path.parent)


def _path(key: str) -> Path:
    return cache_folder() / "tokens" / f"{key}.tokens"


def _drop_oldest(folder: Path) -> None:
    """Removes all files but the latest ones."""
    times = {path: path.stat().st_mtime for path in folder.glob("*.tokens")}
    for path in sorted(times, key=lambda path: times[path])[:-KEPT]:
        path.unlink(missing_ok=True)
