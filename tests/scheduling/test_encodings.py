"""Which encodings the ranks keep, against a rank that does as Encode says."""

import numpy as np
import pytest

from runtime.cache.media_keys import FIRST_KEY, cache_ids, media_keys
from runtime.cache.sequence import Sequence
from runtime.messages.media import Encode, MediaInput, MediaKind
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.scheduling.draft_planner import num_of_text
from runtime.scheduling.drafts import Draft
from runtime.scheduling.encodings import EncodingConfig, Encodings, RowsBuilder, charge, encoded_for

ROWS = 4
PLACEHOLDER = 9


def image(digest: bytes, start: int, gap: bool = False) -> MediaInput:
    offsets = [0, 1, 3, 4] if gap else range(ROWS)
    return MediaInput(
        kind=MediaKind.IMAGE,
        digest=digest,
        start=start,
        positions=np.array(offsets, dtype=np.int32),
        values=np.zeros((3, 2, 2), np.float32),
    )


def sequence(*media: MediaInput, namespace: str = "", length: int = 20) -> Sequence:
    ids = [1] * length
    for one in media:
        for offset in one.positions:
            ids[one.start + int(offset)] = PLACEHOLDER
    request = Request(
        id="r",
        prompt_ids=ids,
        params=SamplingParams(),
        seed=0,
        arrival_s=0.0,
        media=media,
        namespace=namespace,
    )
    return Sequence(0, request, 0, 100, frozenset())


def encodings_of(max_rows: int, **config: bool) -> Encodings:
    return Encodings(EncodingConfig(max_rows=max_rows, **config))


class Rank:
    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.begun: dict[int, float] = {}  # how far

    def obey(self, command: Encode | None) -> int:
        """-> how many encodings were made"""
        if command is None:
            return 0
        known = self.kept | set(self.begun)
        assert known >= set(command.dropped)
        self.kept -= set(command.dropped)
        self.begun = {id: part for id, part in self.begun.items() if id not in command.dropped}
        assert not known & {one.id for one in command.media}
        self.kept |= {one.id for one in command.media if one.id not in command.until}
        self.begun |= {one.id: 0.0 for one in command.media if one.id in command.until}
        for id, part in command.until.items():
            assert 0 <= self.begun[id] < part <= 1
            self.begun[id] = part
        complete = {id for id, part in self.begun.items() if part == 1}
        self.kept |= complete
        self.begun = {id: part for id, part in self.begun.items() if part < 1}
        return sum(one.id in self.kept for one in command.media) + len(
            complete - {one.id for one in command.media}
        )


def step(encodings: Encodings, rank: Rank, one: Sequence, start: int, count: int) -> tuple[int, int]:
    """-> tokens that the step computes, and encodings that it made"""
    encodings.begin()
    count = encodings.cut(one, start, count, count)
    made = rank.obey(encodings.take_command())
    for _, id, _ in encodings.rows_of(one, start, start + count):
        assert id in rank.kept
    return count, made


def test_an_image_is_encoded_once_and_its_rows_are_taken_in_chunks() -> None:
    encodings, rank = encodings_of(100), Rank()
    one = sequence(image(b"a", 5))
    assert step(encodings, rank, one, 0, 5) == (5, 0)
    assert step(encodings, rank, one, 5, 2) == (2, 1)
    (positions, id, first), *rest = encodings.rows_of(one, 6, 20)
    assert (positions.tolist(), id, first, rest) == ([6, 7, 8], 0, 1, [])
    assert step(encodings, rank, one, 7, 13) == (13, 0)
    assert step(encodings, rank, one, 9, 11) == (11, 0) and not encodings.rows_of(one, 9, 20)
    assert step(encodings, rank, sequence(image(b"a", 0)), 0, 20) == (20, 0), "of another request as well"
    assert step(encodings, rank, sequence(image(b"a", 0), namespace="n"), 0, 20) == (20, 1)
    assert (encodings.num_encoded, encodings.num_reused) == (2, 2)


def test_what_is_forgotten_is_encoded_again() -> None:
    """After new weights, whose encodings are others."""
    encodings, rank, one = encodings_of(100), Rank(), sequence(image(b"a", 5))
    assert step(encodings, rank, one, 0, 20) == (20, 1)
    encodings.forget(is_lost=False)
    rank.obey(encodings.take_dropped())
    assert not rank.kept and encodings.num_rows == 0
    assert step(encodings, rank, one, 0, 20) == (20, 1)


def test_tokens_between_rows_take_none() -> None:
    encodings, one = encodings_of(100), sequence(image(b"a", 5, gap=True))
    encodings.begin()
    assert encodings.cut(one, 0, 20, 20) == 20
    ((positions, _, first),) = encodings.rows_of(one, 7, 20)
    assert (positions.tolist(), first) == ([8, 9], 2)
    assert [token >= FIRST_KEY for token in one.tokens[5:10]] == [True, True, False, True, True]


def test_the_least_recently_used_is_dropped_and_made_again() -> None:
    encodings, rank = encodings_of(2 * ROWS), Rank()
    a, b, c = (sequence(image(digest, 0)) for digest in (b"a", b"b", b"c"))
    assert [step(encodings, rank, one, 0, 20)[1] for one in (a, b, a, c, a, b)] == [1, 1, 0, 1, 0, 1]
    assert len(rank.kept) == 2


def test_a_step_takes_no_more_than_there_is_room_for() -> None:
    encodings, rank = encodings_of(ROWS), Rank()
    both = sequence(image(b"a", 2), image(b"b", 10))
    assert step(encodings, rank, both, 0, 20) == (10, 1)
    assert step(encodings, rank, both, 10, 10) == (10, 1)
    small = encodings_of(1)
    assert step(small, Rank(), both, 0, 20) == (10, 1), "one that is larger than all room runs alone"


def test_what_was_never_sent_is_not_dropped() -> None:
    encodings, rank = encodings_of(ROWS), Rank()
    encodings.begin()
    encodings.cut(sequence(image(b"a", 0)), 0, 20, 20)  # and the step came to nothing
    assert step(encodings, rank, sequence(image(b"b", 0)), 0, 20) == (20, 1) and rank.kept == {1}


def test_new_ranks_encode_again() -> None:
    encodings, one = encodings_of(100), sequence(image(b"a", 0))
    assert step(encodings, Rank(), one, 0, 20) == (20, 1)
    encodings.forget(is_lost=True)
    assert step(encodings, Rank(), one, 0, 20) == (20, 1)


def test_rows_of_a_step_are_packed() -> None:
    builder = RowsBuilder()
    assert builder.build() is None
    builder.add(np.array([3, 4]), 7, 2)
    builder.add(np.array([9]), 8, 0)
    rows = builder.build()
    assert rows is not None
    assert [x.tolist() for x in (rows.places, rows.ids, rows.begins, rows.counts)] == [
        [3, 4, 9],
        [7, 8],
        [2, 0],
        [2, 1],
    ]


def test_media_keys_are_of_the_image_and_never_of_the_vocabulary() -> None:
    same, other = media_keys(image(b"a", 0)), media_keys(image(b"b", 0))
    assert (same == media_keys(image(b"a", 7))).all() and not (same == other).any()
    assert min(same) >= FIRST_KEY and same.dtype == np.int32
    one = sequence(image(b"a", 5))
    assert cache_ids(one.request)[5:9].tolist() == same.tolist() == one.tokens[5:9].tolist()
    assert one.text_ids(0, 20).tolist() == one.request.prompt_ids
    one.tokens.append(3)
    assert one.text_ids(8, 21).tolist() == [PLACEHOLDER, *[1] * 11, 3] and one.text_ids(20, 21).tolist() == [
        3
    ]


@pytest.mark.parametrize(("tokens", "count"), [([1, 2], 2), ([1, FIRST_KEY + 5, 2], 1), ([FIRST_KEY], 0)])
def test_drafts_end_before_an_image(tokens: list[int], count: int) -> None:
    assert num_of_text(Draft(tokens)) == count


@pytest.mark.parametrize(
    ("start", "count", "most", "expected"),
    [
        (0, 5, 20, 5),  # before the first image, which is tokens 5 to 8
        (0, 7, 20, 5),  # within it
        (0, 9, 20, 9),  # behind it
        (5, 2, 20, 4),  # it is the first, and all of it may be computed
        (5, 2, 3, 0),  # or not
        (7, 1, 20, 2),  # what is before is cached
        (9, 4, 20, 3),  # the second one is tokens 12 to 15
    ],
)
def test_whole_images_are_not_divided(start: int, count: int, most: int, expected: int) -> None:
    encodings = encodings_of(100, keeps_whole=True)
    one = sequence(image(b"a", 5), image(b"b", 12))
    encodings.begin()
    assert encodings.cut(one, start, count, most) == expected


def test_the_encoder_s_time_is_shared_out_by_rows() -> None:
    encodings, rank = encodings_of(100), Rank()
    one, other = sequence(image(b"a", 0), image(b"b", 8)), sequence(image(b"a", 0), image(b"c", 8))
    encodings.begin()
    for each in (one, other):
        encodings.cut(each, 0, 20, 20)
    made = encodings.take_made()
    assert rank.obey(encodings.take_command()) == 3 and not encodings.take_made()
    charge(made, 0.3)
    assert encoded_for([one]) == {0: (2, pytest.approx(0.2))}
    assert encoded_for([other, sequence()]) == {0: (1, pytest.approx(0.1))}, "none where there are no media"
