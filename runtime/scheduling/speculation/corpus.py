"""Texts of sequences that have ended, in a ring of bounded size, where other sequences of the same namespace
look up how theirs may go on."""

from array import array
from collections import deque
from hashlib import blake2b
from secrets import token_bytes

import numpy as np

from runtime.scheduling.speculation.windows import Windows, zeros

BLOCK = 64  # tokens; a block belongs to one namespace
END = -1  # stands behind each text
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
        self._at = 0  # the next block
        self._waiting: deque[tuple[int, array[int]]] = deque()
        self._num_waiting = 0
        self._offset = 0  # of the first that waits: its tokens that were taken in

    def owner(self, namespace: str) -> int:
        """What stands for a namespace; never 0."""
        digest = blake2b(namespace.encode(), key=self._key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 1) | 1

    def offer(self, owner: int, text: "array[int]") -> None:
        """A text to be taken in by the next calls of `take_in`."""
        if len(text) > self._longest and self._num_waiting + len(text) <= MOST_WAITING:
            self._waiting.append((owner, text))
            self._num_waiting += len(text)

    def take_in(self, most: int) -> None:
        """Takes in at most about `most` tokens of the texts that wait."""
        while most > 0 and self._waiting:
            owner, text = self._waiting[0]
            count = min(max(most, BLOCK), len(text) - self._offset, len(self._array) // 2)
            # windows reach back over the cut
            begin = max(0, self._offset - self._longest)
            self._write(owner, text[begin : self._offset + count])
            self._offset += count
            self._num_waiting -= count
            most -= count
            if self._offset == len(text):
                self._waiting.popleft()
                self._offset = 0

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

    def _write(self, owner: int, text: "array[int]") -> None:
        """One text behind the last one, or at the beginning where it fits no more."""
        num_blocks = (len(text) + BLOCK) // BLOCK  # with the mark behind it
        if self._at + num_blocks > self._num_blocks:
            self._at = 0
        begin = self._at * BLOCK
        end = begin + len(text)
        self._array[begin:end] = text
        self._array[end : (self._at + num_blocks) * BLOCK] = END
        for block in range(self._at, self._at + num_blocks):
            self._owners[block] = owner
        for windows in self.windows:
            windows.add(self.tokens[:end], begin + windows.length - 1, end)
        self._at = (self._at + num_blocks) % self._num_blocks
