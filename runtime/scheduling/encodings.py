"""Which encodings of images, videos and sounds the ranks keep, and which of them a step needs.

Ranks take commands and steps in order, so what Encode brings is there for every step that is planned after
it, and the scheduler knows what the ranks keep without asking. A sequence needs an encoding only in steps
that compute tokens of it: these take its rows, and one that was dropped between two such steps is made again.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.messages.media import Encode, MediaInput, MediaRows, MediaValues

LEARNS = 0.2  # weight of the latest step in the time that a row takes


class Kept(Struct):
    """An encoding on the ranks."""

    id: int
    num_rows: int
    step: int  # the latest that takes rows of it


Key = tuple[str, bytes]  # namespace of the prefix cache, and MediaInput.digest


class Encodings:
    """The encodings that the ranks keep: up to `max_rows` rows, of which those are dropped first whose use is
    longest ago. A step may use more than that: then it uses one encoding alone.

    Requests share an encoding where they share pages: within a namespace.
    """

    def __init__(self, max_rows: int, *, keeps_whole: bool = False) -> None:
        """`keeps_whole`: tokens of an image attend to those behind them in it, so no step ends within one. A
        step may begin within one, where the tokens before it are cached: they have attended to the rest."""
        self.keeps_whole = keeps_whole
        self.max_rows = max_rows
        self.num_rows = 0
        self.num_encoded = 0  # encodings that were made
        self.num_reused = 0  # encodings that sequences found made
        # seconds of the encoder that the planned step has; one encoding may take longer. None: any
        self.most_s: float | None = None
        self._row_s = 0.0  # seconds that a row takes, as measured
        self._kept: dict[Key, Kept] = {}  # the least recently used first
        self._next_id = 0
        self._step = 0
        self._made: list[tuple[Sequence, int]] = []  # for whom this step encodes, and how many rows
        self._dropped: list[int] = []
        self._new: list[MediaValues] = []

    def begin(self) -> None:
        """A step is about to be planned."""
        self._step += 1
        self._made, self.most_s = [], None

    def cut(self, sequence: Sequence, start: int, count: int, most: int) -> int:
        """How many of `count` tokens of a sequence, from `start` on, this step may compute: those before the
        first encoding for which there is no room, or no time, beside the others. Those that the tokens need
        are there for the step. Where images are kept whole it may be up to `most` for a whole one."""
        if self.keeps_whole:
            count = whole_images(sequence.request.media, start, count, most)
        for media in reached(sequence, start, start + count):
            if not self._take(sequence, media):
                return max(media.start - start, 0)
        return count

    def rows_of(self, sequence: Sequence, start: int, stop: int) -> list[tuple[np.ndarray, int, int]]:
        """What the tokens [start, stop) of a sequence take of encodings: positions in the sequence, the id of
        the encoding, and its first row. `cut` has taken them."""
        found = []
        for media in reached(sequence, start, stop):
            first, end = np.searchsorted(media.positions, (start - media.start, stop - media.start)).tolist()
            if first < end:
                kept = self._kept[sequence.request.namespace, media.digest]
                found.append((media.start + media.positions[first:end], kept.id, first))
        return found

    def take_command(self) -> Encode | None:
        """What the ranks must do before the planned step; None: nothing."""
        if not self._new and not self._dropped:
            return None
        command = Encode(dropped=self._dropped, media=self._new)
        self._dropped, self._new = [], []
        return command

    def learn(self, num_rows: int, encode_s: float) -> None:
        """Encoding so many rows took so many seconds."""
        row_s = encode_s / num_rows
        self._row_s = row_s if not self._row_s else self._row_s + LEARNS * (row_s - self._row_s)

    def take_made(self) -> list[tuple[Sequence, int]]:
        """The sequences for which the planned step encodes something, and its rows."""
        made, self._made = self._made, []
        return made

    def find(self, namespace: str, digest: bytes) -> int | None:
        """The id of an encoding that the ranks keep, or will have before any later command; None: there is
        none."""
        kept = self._kept.get((namespace, digest))
        return None if kept is None else kept.id

    def restart(self) -> None:
        """The ranks died, and all that they kept is gone."""
        self._kept, self.num_rows = {}, 0
        self._dropped, self._new = [], []

    def _take(self, sequence: Sequence, media: MediaInput) -> bool:
        """The step that is planned uses an encoding. False: there is no room for it."""
        key = sequence.request.namespace, media.digest
        kept = self._kept.pop(key, None)
        if kept is None:
            size = len(media.positions)
            if self._is_late(size) or not self._make_room(size):
                return False
            kept = Kept(self._next_id, size, self._step)
            self._next_id += 1
            self.num_rows += size
            self.num_encoded += 1
            sequence.num_encoded += 1
            self._made.append((sequence, size))
            self._new.append(
                MediaValues(
                    id=kept.id,
                    values=media.values.ravel(),
                    shape=media.values.shape,
                    grid=media.grid,
                    num_rows=size,
                )
            )
        elif kept.step != self._step:
            self.num_reused += 1
        kept.step = self._step
        self._kept[key] = kept
        return True

    def _is_late(self, size: int) -> bool:
        """Whether the planned step, which encodes something already, has no time for `size` more rows."""
        rows = sum([made for _, made in self._made])
        return self.most_s is not None and rows > 0 and (rows + size) * self._row_s > self.most_s

    def _make_room(self, size: int) -> bool:
        """Drops encodings that this step does not use until `size` more rows fit, or nothing is left."""
        while self.num_rows + size > self.max_rows and self._kept:
            key, oldest = next(iter(self._kept.items()))
            if oldest.step == self._step:
                return False
            del self._kept[key]
            self.num_rows -= oldest.num_rows
            waiting = [one for one in self._new if one.id != oldest.id]
            if len(waiting) == len(self._new):
                self._dropped.append(oldest.id)
            self._new = waiting  # what was not sent yet need not be dropped
        return True


def encode_for_step(encodings: Encodings | None) -> Encode | None:
    """What the ranks encode before the step that was planned last; None: nothing."""
    return None if encodings is None else encodings.take_command()


def charge(made: list[tuple[Sequence, int]], encode_s: float) -> None:
    """Shares the encoder's seconds of a step out among the sequences for which it has encoded, by rows."""
    num_rows = sum([rows for _, rows in made])
    for sequence, rows in made:
        sequence.encode_s += encode_s * rows / num_rows


def encoded_for(sequences: Iterable[Sequence]) -> dict[int, tuple[int, float]]:
    """`StepTokens.encoded` of sequences."""
    return {one.id: (one.num_encoded, one.encode_s) for one in sequences if one.request.media}


def whole_images(media: tuple[MediaInput, ...], start: int, count: int, most: int) -> int:
    """How many of `count` tokens from `start` on end within no image: without the one that they end in, or
    with all of it where it is the first and not more than `most` are computed."""
    for one in media:
        first, end = one.start + int(one.positions[0]), one.start + int(one.positions[-1]) + 1
        if first < start + count < end:
            if first > start:
                return first - start
            return end - start if end - start <= most else 0
    return count


def reached(sequence: Sequence, start: int, stop: int) -> Iterator[MediaInput]:
    """The images, videos and sounds of a sequence of which tokens in [start, stop) take rows, in order."""
    for media in sequence.request.media:
        first, last = media.start + int(media.positions[0]), media.start + int(media.positions[-1])
        if first < stop and last >= start:
            yield media


def token_grids(media: tuple[MediaInput, ...]) -> np.ndarray:
    """`Admit.grids` of these images, videos and sounds."""
    return np.array(
        [
            number
            for one in media
            for grid in one.token_grids
            for number in (
                one.start + grid.offset,
                grid.frames,
                grid.rows,
                grid.columns,
                one.frame_step,
                grid.back,
                grid.time,
                grid.advance,
            )
        ],
        np.float64,
    )


class RowsBuilder:
    """Collects the rows of encodings that one step takes."""

    def __init__(self) -> None:
        self._places: list[np.ndarray] = []
        self._parts: list[tuple[int, int, int]] = []  # id, first row, number of rows

    def add(self, places: np.ndarray, id: int, begin: int) -> None:
        """Tokens of the step, int [n], take the `n` rows from `begin` on of an encoding."""
        self._places.append(places.astype(np.int32))
        self._parts.append((id, begin, len(places)))

    def build(self) -> MediaRows | None:
        """The rows; None: there are none."""
        if not self._parts:
            return None
        return MediaRows(np.concatenate(self._places), *np.array(self._parts, dtype=np.int32).T.copy())
