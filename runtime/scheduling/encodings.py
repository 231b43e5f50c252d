"""Which encodings of images, videos and sounds the ranks keep, and which of them a step needs.

Ranks take commands and steps in order, so what Encode brings is there for every step that is planned after
it, and the scheduler knows what the ranks keep without asking. A sequence needs an encoding only in steps
that compute tokens of it: these take its rows, and one that was dropped between two such steps is made again.

While sequences decode, an encoding for which one step has no time is made in slices, by one step after the
other (encode_costs.py): the tokens that take its rows wait, and all other sequences go on. One is under way
at a time.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.messages.media import Encode, MediaInput, MediaRows, MediaValues
from runtime.scheduling.encode_costs import EncodeCosts, MadePart, Making


class Kept(Struct):
    """An encoding on the ranks."""

    id: int
    num_rows: int
    step: int  # the latest that takes rows of it, or waits for them
    making: Making | None = None  # None: it is complete


class EncodingConfig(Struct, frozen=True, kw_only=True):
    """What is known of a model's encodings."""

    max_rows: int  # that the ranks keep
    # tokens of an image attend to those behind them in it, so no step ends within one. A step may begin
    # within one, where the tokens before it are cached: they have attended to the rest
    keeps_whole: bool = False
    is_cut: bool = True  # the encoder stops between its layers: an encoding may be made by several steps


Key = tuple[str, bytes]  # namespace of the prefix cache, and MediaInput.digest


class Encodings:
    """The encodings that the ranks keep: up to `max_rows` of the configuration, of which those are dropped
    first whose use is longest ago. A step may use more than that: then it uses one encoding alone.

    Requests share an encoding where they share pages: within a namespace.
    """

    def __init__(self, config: EncodingConfig) -> None:
        self.config = config
        self.num_rows = 0
        self.num_encoded = 0  # encodings that were made
        self.num_reused = 0  # encodings that sequences found made
        self.planned_s = 0.0  # what the planned step encodes is expected to take
        self.costs = EncodeCosts()
        self._bound_s: float | None = None  # for encodings of the planned step; None: any
        self._is_held = False  # the planned step encodes nothing
        self._kept: dict[Key, Kept] = {}  # the least recently used first
        self._under_way: tuple[Key, Sequence] | None = None  # what is made in slices, and for whom
        self._next_id = 0
        self._step = 0
        self._made: list[MadePart] = []  # what this step encodes
        self._dropped: list[int] = []
        self._new: list[MediaValues] = []
        self._until: dict[int, float] = {}  # as in Encode

    def begin(self) -> None:
        """A step is about to be planned. What was under way for a sequence that ended, or gave way, is
        dropped."""
        self._step += 1
        self._made, self._bound_s, self._is_held, self.planned_s = [], None, False, 0.0
        if self._under_way is not None and self._under_way[1].slot < 0:
            self._drop(self._under_way[0])

    def bound(self, seconds: float | None) -> None:
        """The step that is planned has so many seconds for encodings: some sequences decode in it. None: it
        encodes nothing, as steps before and behind it have sequences that decode."""
        self._bound_s, self._is_held = seconds, seconds is None

    def cut(self, sequence: Sequence, start: int, count: int, most: int) -> int:
        """How many of `count` tokens of a sequence, from `start` on, this step may compute: those before the
        first encoding that is not complete then, or for which there is no room beside the others. Those that
        the tokens need are there for the step. Where images are kept whole it may be up to `most` for a whole
        one."""
        if self.config.keeps_whole:
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
        if not self._new and not self._dropped and not self._until:
            return None
        command = Encode(dropped=self._dropped, media=self._new, until=self._until)
        self._dropped, self._new, self._until = [], [], {}
        return command

    def take_dropped(self) -> Encode | None:
        """What the ranks should free although no step is planned; None: nothing."""
        dropped, self._dropped = self._dropped, []
        return Encode(dropped=dropped, media=[]) if dropped else None

    def take_made(self) -> list[MadePart]:
        """What the planned step encodes."""
        made, self._made = self._made, []
        return made

    def find(self, namespace: str, digest: bytes) -> int | None:
        """The id of an encoding that the ranks keep, or will have before any later command; None: there is
        none."""
        kept = self._kept.get((namespace, digest))
        return None if kept is None or kept.making is not None else kept.id

    def forget(self, *, is_lost: bool) -> None:
        """All encodings are dropped, while no sequence uses one. `is_lost`: the ranks died, and have none."""
        for key in [*self._kept]:
            self._drop(key)
        if is_lost:
            self._dropped = []

    def _take(self, sequence: Sequence, media: MediaInput) -> bool:
        """The step that is planned wants an encoding. False: there is no room for it, or it is not complete
        yet."""
        key = sequence.request.namespace, media.digest
        kept = self._kept.get(key) or self._begin(sequence, media, key)
        if kept is None:
            return False
        if kept.making is None and kept.step != self._step:
            self.num_reused += 1
        elif kept.making is not None:
            self._under_way = key, sequence
            if kept.step != self._step:
                self._make(kept, key, sequence, self._part(kept.making))
        kept.step = self._step
        self._kept[key] = self._kept.pop(key)
        return kept.making is None

    def _begin(self, sequence: Sequence, media: MediaInput, key: Key) -> Kept | None:
        """Begins to make an encoding. None: there is no room for it, or no time."""
        making = Making(media.kind, len(media.positions))
        part = self._part(making)
        is_later = part < 1 and self._under_way is not None
        if part == 0 or is_later or not self._make_room(making.num_rows):
            return None
        kept = Kept(self._next_id, making.num_rows, self._step, making)
        self._kept[key] = kept
        self._next_id += 1
        self.num_rows += making.num_rows
        self.num_encoded += 1
        sequence.num_encoded += 1
        self._new.append(
            MediaValues(
                id=kept.id,
                values=media.values.ravel(),
                shape=media.values.shape,
                grid=media.grid,
                num_rows=making.num_rows,
            )
        )
        self._make(kept, key, sequence, part)
        return kept

    def _part(self, making: Making) -> float:
        """How much of an encoding the planned step makes, as a part of the whole."""
        if self._is_held:
            return 0.0
        rest, is_first = 1 - making.planned, not self._made
        if self._bound_s is None:
            return rest
        left_s = max(self._bound_s - self.planned_s, 0.0)
        part = self.costs.part_within(making, left_s, is_first=is_first)
        if self.config.is_cut or part == rest:
            return part
        return rest if is_first else 0.0

    def _make(self, kept: Kept, key: Key, sequence: Sequence, part: float) -> None:
        """The planned step makes a part of an encoding, perhaps none."""
        making = kept.making
        assert making is not None, "an encoding that is complete"
        if not part:
            return
        is_complete = part == 1 - making.planned
        self._made.append(MadePart(sequence, making, part))
        self.planned_s += part * (self.costs.expected_s(making) or 0.0)
        if making.planned or not is_complete:
            self._until[kept.id] = 1.0 if is_complete else making.planned + part
        making.planned = 1.0 if is_complete else making.planned + part
        kept.making = None if is_complete else making
        if not is_complete:
            self._under_way = key, sequence
        elif self._under_way is not None and self._under_way[0] == key:
            self._under_way = None

    def _make_room(self, size: int) -> bool:
        """Drops encodings that this step does not use until `size` more rows fit, or nothing is left."""
        while self.num_rows + size > self.config.max_rows and self._kept:
            key, oldest = next(iter(self._kept.items()))
            if oldest.step == self._step:
                return False
            self._drop(key)
        return True

    def _drop(self, key: Key) -> None:
        """The ranks keep an encoding no more."""
        kept = self._kept.pop(key)
        self.num_rows -= kept.num_rows
        self._until.pop(kept.id, None)
        waiting = [one for one in self._new if one.id != kept.id]
        if len(waiting) == len(self._new):
            self._dropped.append(kept.id)
        self._new = waiting  # what was not sent yet need not be dropped
        if self._under_way is not None and self._under_way[0] == key:
            self._under_way = None


def charge(made: list[MadePart], encode_s: float) -> None:
    """Shares the encoder's seconds of a step out among the sequences for which it has encoded, by rows."""
    num_rows = sum([one.rows for one in made])
    for one in made:
        one.sequence.encode_s += encode_s * one.rows / num_rows


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
