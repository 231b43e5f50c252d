"""Texts of sequences that have ended, in a ring of bounded size, where other sequences of the same namespace
look up how theirs may go on."""

from array import array
from collections import deque
from functools import lru_cache
from hashlib import blake2b
from secrets import token_bytes

import numpy as np

from runtime.scheduling.speculation.windows import Windows, zeros

BLOCK = 64  # tokens; a block belongs to one namespace
END = -1  # stands behind each text
OWNERS = 1024  # namespaces whose hash is kept
MOST_WAITING = 1 << 20  # tokens that wait to be taken in; texts beyond that are not remembered


class Corpus:
    """A ring of blocks. The oldest are overwritten; each use compares the namespace of the block.

    Namespaces are told apart by a keyed hash of 63 bits, so that their number needs no memory.
    """

    def __init__(self, capacity: int, windows: tuple[int, ...]) -> None:
        """`capacity` in tokens; `windows`: lengths of the ends of a text that are looked up, longest
        first."""
        self._longest = max(windows)
        self._num_blocks = max(capacity, 4 * (self._longest + BLOCK)) // BLOCK
        size = self._num_blocks * BLOCK
        self._array = zeros(size, np.int32)
        self.tokens = self._array.data
        self._owners = zeros(self._num_blocks, np.int64).data
        self.windows = [Windows(length, size) for length in windows]
        self._key = token_bytes(16)
        self.owner = lru_cache(OWNERS)(self._owner)  # of a namespace
        self._at = 0  # the next block
        self._waiting: deque[tuple[int, array[int]]] = deque()
        self.num_waiting = 0  # tokens
        self._offset = 0  # of the first that waits: its tokens that were taken in

    def _owner(self, namespace: str) -> int:
        """What stands for a namespace; never 0."""
        digest = blake2b(namespace.encode(), key=self._key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 1) | 1

    def offer(self, owner: int, text: "array[int]") -> None:
        """A text to be taken in by the next calls of `take_in`."""
        if len(text) > self._longest and self.num_waiting + len(text) <= MOST_WAITING:
            self._waiting.append((owner, text))
            self.num_waiting += len(text)

    def take_in(self, most: int, num_windows: int | None = None) -> None:
        """Takes in at most about `most` tokens of the texts that wait. `num_windows`: how many of the windows
        find them, the longest ones; by default all."""
        first = end = self._at * BLOCK
        while most > 0 and self._waiting:
            owner, text = self._waiting[0]
            count = min(max(most, BLOCK), len(text) - self._offset, len(self._array) // 2)
            # windows reach back over the cut
            part = text[max(0, self._offset - self._longest) : self._offset + count]
            if self._at + blocks_of(part) > self._num_blocks:
                self._index(first, end, num_windows)
                first = self._at = 0
            end = self._write(owner, part)
            self._offset += count
            self.num_waiting -= count
            most -= count
            if self._offset == len(text):
                self._waiting.popleft()
                self._offset = 0
        self._index(first, end, num_windows)

    def after(self, owner: int, place: int, count: int) -> list[int]:
        """Up to `count` tokens from `place` on, as far as they are one text of that owner."""
        stop = min(place + count, len(self._array))
        for block in range(place // BLOCK, (stop + BLOCK - 1) // BLOCK):
            if self._owners[block] != owner:
                stop = min(stop, block * BLOCK)
                break
        found = self.tokens[place:stop].tolist() if stop > place else []
        return found[: found.index(END)] if END in found else found

    def before(self, owner: int, place: int, count: int) -> list[int]:
        """Up to `count` tokens that end with the one at `place`, as far as they are that owner's."""
        begin = max(0, place + 1 - count)
        for block in range(place // BLOCK, begin // BLOCK - 1, -1):
            if self._owners[block] != owner:
                begin = (block + 1) * BLOCK
                break
        return self.tokens[begin : place + 1].tolist()

    def _write(self, owner: int, text: "array[int]") -> int:
        """One text behind the last one. -> where it ends"""
        begin = self._at * BLOCK
        end = begin + len(text)
        after = self._at + blocks_of(text)
        self._array[begin:end] = text
        self._array[end : after * BLOCK] = END
        for block in range(self._at, after):
            self._owners[block] = owner
        self._at = after
        return end

    def _index(self, begin: int, end: int, num_windows: int | None) -> None:
        """Indexes texts that stand there one behind the other. Windows that reach from one into the next hold
        END, which no text has."""
        for windows in self.windows[:num_windows]:
            windows.add(self.tokens[:end], begin + windows.length - 1, end)


def blocks_of(text: "array[int]") -> int:
    """Blocks that a text takes, with the mark behind it."""
    return (len(text) + BLOCK) // BLOCK
