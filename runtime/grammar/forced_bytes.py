"""The bytes that every continuation of a text begins with, found by the masks of its grammar: one byte after
the other, up to a bound. Libraries have functions for it that do not end where no text does."""

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from runtime.grammar.backend import GrammarVocabulary, Matcher

M = TypeVar("M", bound=Matcher)
MAX_BYTES = 256


class ForcedBytes(Generic[M]):
    """Finds the forced bytes of matchers over one vocabulary."""

    def __init__(self, terms: GrammarVocabulary, allows: Callable[[M, bytes], bool]) -> None:
        """`allows(matcher, byte)`: whether the byte may come next, for bytes that are no tokens; it may
        change the matcher."""
        self._allows = allows
        self._firsts = np.array([token[0] if token else -1 for token in terms.tokens], np.int16)
        self._firsts[list(terms.special.values())] = -1
        self._by_byte = {token[0]: id for id, token in enumerate(terms.tokens) if len(token) == 1}
        self._absent = [bytes([byte]) for byte in range(256) if byte not in self._by_byte]
        self._ids = np.array(sorted(self._by_byte.values()), np.int64)
        self._words, self._shifts = self._ids >> 5, (self._ids & 31).astype(np.uint32)
        self._others: dict[int, np.ndarray] = {}
        self._bits = np.empty(-(-len(terms.tokens) // 32), np.int32)
        self._tokens = terms.tokens

    def find(self, matcher: M) -> bytes:
        """The forced bytes after what `matcher` has accepted; at most MAX_BYTES. `matcher` stays where it
        is."""
        found = bytearray()
        matcher = matcher.fork()
        while len(found) < MAX_BYTES and (token := self._only_byte(matcher)) is not None:
            if not matcher.accept(token):
                break
            found += self._tokens[token]
        return bytes(found)

    def _only_byte(self, matcher: M) -> int | None:
        """The token of the byte that all tokens begin with which may come next; None: there is no such
        byte, or the text may end."""
        if not matcher.fill(self._bits):
            return None
        allowed = np.flatnonzero((self._bits[self._words].view(np.uint32) >> self._shifts) & 1)
        if len(allowed) != 1:
            return None
        token = int(self._ids[allowed[0]])
        if (self._bits & self._beginning_otherwise(token)).any():
            return None
        return None if any(self._allows(matcher.fork(), byte) for byte in self._absent) else token

    def _beginning_otherwise(self, token: int) -> np.ndarray:
        """A mask of the tokens that do not begin with this byte."""
        if (mask := self._others.get(token)) is None:
            ones = np.zeros(len(self._bits) * 32, np.uint8)
            ones[: len(self._firsts)] = self._firsts != self._tokens[token][0]
            mask = self._others[token] = np.packbits(ones, bitorder="little").view(np.int32)
        return mask
