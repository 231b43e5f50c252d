"""Text that arrives in deltas, read by generators.

A reading function is a generator that yields, with nothing, where it needs more text. It does not notice
where the deltas were cut.
"""

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Read = Generator[None, None, T]

SPACE = " \t\r\n"
MAX_NAME = 256  # characters of a function's or a parameter's name


class Malformed(Exception):
    """The text does not follow the format."""


class Markers:
    """Several strings that are searched together."""

    __slots__ = ("texts", "firsts", "_search", "_longest")

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = texts
        self.firsts = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts), default=0)
        # longest first, so that of two markers at one place the longer is seen
        ordered = sorted(texts, key=len, reverse=True)
        self._search = re.compile("|".join(map(re.escape, ordered)) if texts else r"(?!)").search

    def find(self, text: str, start: int, is_final: bool) -> tuple[int, str]:
        """-> where the first marker stands, and the marker; or up to where the text cannot be part of a
        marker, and ""."""
        match = self._search(text, start)
        held = len(text) if is_final else self.held(text, start)
        if match is None or held < match.start():
            return held, ""
        marker = match[0]
        longer = (
            not is_final
            and len(text) - match.start() < self._longest
            and any(m != marker and m.startswith(text[match.start() :]) for m in self.texts)
        )
        return (match.start(), "") if longer else (match.start(), marker)

    def held(self, text: str, start: int) -> int:
        """Where the longest end of `text` begins that is a proper beginning of a marker; the text's length if
        there is none."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self.firsts:
                rest = text[at:]
                if any(len(m) > len(rest) and m.startswith(rest) for m in self.texts):
                    return at
        return len(text)


@lru_cache(maxsize=512)
def markers(*texts: str) -> Markers:
    """A cached Markers of these texts."""
    return Markers(texts)


class Reader:
    """The text so far, and how much of it has been read."""

    __slots__ = ("text", "at", "is_final")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_final = False  # no more pieces come

    def add(self, piece: str) -> None:
        """Adds a delta. Only `forget` discards read text: a failed attempt goes back to where it began."""
        self.text += piece

    def forget(self) -> None:
        """Discards the text that has been read."""
        if self.at:
            self.text = self.text[self.at :]
            self.at = 0

    def peek(self) -> Read[str]:
        """The next character; "" at the end."""
        while self.at == len(self.text):
            if self.is_final:
                return ""
            yield
        return self.text[self.at]

    def space(self, more: str = "") -> Read[None]:
        """Skips white space, and the characters of `more`."""
        while (char := (yield from self.peek())) and (char in SPACE or char in more):
            self.at += 1

    def sees(self, literal: str) -> Read[bool]:
        """Whether `literal` is next; reads it if so."""
        while not self.text.startswith(literal, self.at):
            if self.is_final or not literal.startswith(self.text[self.at :]):
                return False
            yield
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> Read[None]:
        """Reads `literal`. Raises Malformed where it is not next."""
        if not (yield from self.sees(literal)):
            raise Malformed

    def piece(self, ends: Markers) -> Read[tuple[str, str]]:
        """Reads text as far as it is known. -> (text, "") when more comes, or (text, marker) when the marker
        has been read as well.

        At the end of the text: raises Malformed, with the rest unread.
        """
        while True:
            at, marker = ends.find(self.text, self.at, self.is_final)
            if at > self.at or marker:
                break
            if self.is_final:
                raise Malformed
            yield
        text = self.text[self.at : at]
        self.at = at + len(marker)
        return text, marker

    def until(self, ends: Markers, most: int) -> Read[tuple[str, str]]:
        """Reads up to a marker and the marker. -> (text before it, marker). Raises Malformed where there is
        none within `most` characters."""
        begin = self.at
        while True:
            _, marker = yield from self.piece(ends)
            text = self.text[begin : self.at - len(marker)]
            if len(text) > most:
                self.at = begin + most  # wherever the text was cut
                raise Malformed
            if marker:
                return text, marker
