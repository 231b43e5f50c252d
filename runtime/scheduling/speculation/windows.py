"""Where a few tokens stood before: an index of the places of a text by the tokens that end there."""

import mmap
from array import array
from collections.abc import Iterable

import numpy as np

_BASE = 2_097_169  # above every token id that there is, so that up to three tokens have a number of their own
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
SMALL = 1 << 20  # bytes; larger arrays take memory as they are written to
_FEW = 128  # places; fewer are added one by one, more with numpy


def mixed(tokens: Iterable[int]) -> int:
    """A number of 64 bits, of which the highest ones are as good as random."""
    number = 0
    for token in tokens:
        number = number * _BASE + token
    return number * _MULTIPLIER & _MASK


def zeros(count: int, dtype: type[np.int32] | type[np.int64]) -> np.ndarray:
    """An array of zeros that takes memory page by page as it is written to: with huge pages a thousand writes
    to random places would clear hundreds of megabytes, and hold the event loop for as long."""
    size = count * np.dtype(dtype).itemsize
    if size < SMALL:
        return np.zeros(count, dtype)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(area, dtype)


class Windows:
    """Places by a hash of the `length` tokens that end there, each linked to the one before it.

    A place may be listed for other tokens of the same hash, or for tokens that are not there any more: who
    asks compares the tokens. Memory is bounded: 4 bytes a place and 4 a head, whatever is added.
    """

    def __init__(self, length: int, num_places: int) -> None:
        """`num_places`: that can be indexed."""
        self.length = length
        bits = max(8, num_places.bit_length())
        self._shift = 64 - bits
        # 1 + place, 0 for none; memoryviews are faster than arrays to read and write one by one
        self._heads = zeros(1 << bits, np.int32)
        self._before = zeros(num_places, np.int32)
        self._head, self._link = self._heads.data, self._before.data

    def add(self, tokens: "array[int] | memoryview[int]", begin: int, end: int) -> None:
        """Indexes the places `begin` to `end` of `tokens`, where a whole window ends."""
        begin = max(begin, self.length - 1)
        if end - begin > _FEW:
            self._add_many(np.array(tokens[begin - self.length + 1 : end], np.int32), begin)
            return
        head, link, shift = self._head, self._link, self._shift
        cut = _BASE ** (self.length - 1)
        number = 0  # as of `mixed`, of the tokens of a window but for the last one
        for token in tokens[begin - self.length + 1 : begin]:
            number = number * _BASE + token
        for place, token in enumerate(tokens[begin:end], begin):
            number = number * _BASE + token
            key = (number * _MULTIPLIER & _MASK) >> shift
            link[place] = head[key]
            head[key] = place + 1
            number %= cut

    def places(self, window: int, most: int) -> list[int]:
        """Up to `most` places, the latest first, where tokens may have ended whose `mixed` is `window`."""
        found: list[int] = []
        place = self._head[window >> self._shift]
        while place and len(found) < most:
            found.append(place - 1)
            place = self._link[place - 1]
        return found

    def grow(self, num_places: int) -> None:
        """Room for more places; there are no more heads, so that lists become longer."""
        grown = zeros(num_places, np.int32)
        grown[: len(self._before)] = self._before
        self._before, self._link = grown, grown.data

    @property
    def num_places(self) -> int:
        """Places that can be indexed."""
        return len(self._before)

    def _add_many(self, tokens: np.ndarray, begin: int) -> None:
        """Adds all windows that end at `tokens[length - 1]` and later, the first at place `begin`, as adding
        one token after the other would."""
        count = len(tokens) - self.length + 1
        wide = tokens.astype(np.uint64)
        numbers = np.zeros(count, np.uint64)
        for offset in range(self.length):
            numbers = numbers * np.uint64(_BASE) + wide[offset : offset + count]
        keys = (numbers * np.uint64(_MULTIPLIER) >> np.uint64(self._shift)).astype(np.int64)
        order = np.argsort(keys, kind="stable")
        sorted_keys, places = keys[order], (begin + order).astype(np.int32)
        is_first = np.ones(count, bool)
        is_first[1:] = sorted_keys[1:] != sorted_keys[:-1]
        links = np.empty(count, np.int32)
        links[1:] = places[:-1] + 1
        links[is_first] = self._heads[sorted_keys[is_first]]
        self._before[places] = links
        is_last = np.ones(count, bool)
        is_last[:-1] = is_first[1:]
        self._heads[sorted_keys[is_last]] = places[is_last] + 1
