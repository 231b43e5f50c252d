"""Incremental detokenization: tokens to text, one at a time and exactly. The texts of a stream, joined, are
the text of all its tokens.

Each token costs O(1): nothing is decoded twice, and at most three bytes wait for the rest of their character.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Container, Sequence
from typing import Protocol

from runtime.text.token_text import TokenTexts

REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """The text of one sequence, as its tokens come."""

    def add(self, token_id: int) -> str:
        """The text that is complete with this token."""
        ...

    def flush(self) -> str:
        """The rest, at the end of the sequence: U+FFFD for characters that are not complete."""
        ...


class Utf8:
    """Decodes bytes as they come. `pending`: the beginning of a character, at most three bytes."""

    __slots__ = ("pending", "_replaces_each_byte", "_errors")

    def __init__(self, replaces_each_byte: bool) -> None:
        self.pending = b""
        self._replaces_each_byte = replaces_each_byte
        # Python's "replace" is one U+FFFD for each maximal part
        self._errors = "strict" if replaces_each_byte else "replace"

    def feed(self, data: bytes) -> str:
        """The text that is complete with these bytes."""
        data = self.pending + data
        text = ""
        while True:
            try:
                decoded, used = utf_8_decode(data, self._errors, False)
            except UnicodeDecodeError as error:
                text += data[: error.start].decode() + REPLACEMENT
                data = data[error.start + 1 :]
                continue
            self.pending = data[used:]
            return text + decoded

    def flush(self) -> str:
        """U+FFFD for the pending bytes, as at the end of a text."""
        rest, self.pending = self.pending, b""
        # decoded, not counted: Python also holds back the first two bytes of an encoded surrogate, which are
        # two maximal parts
        return REPLACEMENT * len(rest) if self._replaces_each_byte else rest.decode(errors="replace")


class TableStream:
    """A TextStream by table (token_text.py). `starts_text` is False where visible text stands before the
    first token."""

    __slots__ = ("_table", "_utf8", "_leading", "_is_plain")

    def __init__(self, texts: TokenTexts, starts_text: bool) -> None:
        self._table = texts.table
        self._utf8 = Utf8(texts.replaces_each_byte)
        self._leading = texts.leading_spaces if starts_text else 0
        # no bytes pending, no spaces to drop: a str piece is text as it stands
        self._is_plain = not self._leading

    def add(self, token_id: int) -> str:
        """See TextStream.add."""
        text_or_bytes = self._table[token_id]
        if self._is_plain and text_or_bytes.__class__ is str:
            return text_or_bytes
        if not text_or_bytes:
            return ""  # skipped: does not even end a half character
        text = (
            self._utf8.feed(text_or_bytes)
            if isinstance(text_or_bytes, bytes)
            else self._utf8.flush() + text_or_bytes
        )
        return self._strip(text)

    def flush(self) -> str:
        """See TextStream.flush."""
        return self._strip(self._utf8.flush())

    def _strip(self, text: str) -> str:
        if self._leading and text:
            kept = text.lstrip(" ")
            dropped = min(len(text) - len(kept), self._leading)
            text = text[dropped:]
            self._leading = 0 if text else self._leading - dropped
        self._is_plain = not (self._leading or self._utf8.pending)
        return text


class WindowStream:
    """A TextStream for any decoder, also for those that token_text.py cannot represent: decodes a few tokens
    together and takes what is new.

    A text that ends in U+FFFD may be half a character and waits, for `MAX_PENDING` tokens at most.
    """

    __slots__ = ("_decode", "_skipped", "_context", "_pending")

    MAX_PENDING = 8
    MAX_CONTEXT = 6

    def __init__(
        self, decode: Callable[[Sequence[int]], str], skipped: Container[int], prompt_ids: Sequence[int]
    ) -> None:
        """`skipped`: ids that decode to nothing wherever they stand. The prompt's last tokens decide how the
        stream joins on to the prompt."""
        self._decode = decode
        self._skipped = skipped
        self._context = [i for i in prompt_ids[-self.MAX_CONTEXT :] if i not in skipped]
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """See TextStream.add."""
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < self.MAX_PENDING:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """See TextStream.flush."""
        return self._take(self._new_text())

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _take(self, text: str) -> str:
        """A token without text of its own (a space mark at the start) still decides how the next one joins
        on."""
        self._context = self._pending if text else (self._context + self._pending)[-self.MAX_CONTEXT :]
        self._pending = []
        return text
