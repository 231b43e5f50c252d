"""Drafts that are looked up in past text."""

from array import array
from random import Random

import pytest

from runtime.cache.sequence import Sequence
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.scheduling.pausing import flush
from runtime.scheduling.speculation.corpus import BLOCK, Corpus
from runtime.scheduling.speculation.ngram import LOOK_S, SHORT_LOOKS, NgramDrafter, tree
from runtime.scheduling.speculation.pace import FEW, LOOKING, LOOP_ROW_S, LOOP_STEP_S, MOST_LOOKING_S, Pace
from runtime.scheduling.speculation.windows import Windows, scanned
from tests.scheduling.guessing import Eager, Guesser, looking_up
from tests.scheduling.world import World


def sequence(tokens: list[int], id: int = 0, namespace: str = "") -> Sequence:
    request = Request(
        id=f"r{id}", prompt_ids=tokens, params=SamplingParams(), seed=1, arrival_s=0, namespace=namespace
    )
    return Sequence(id, request, 0, 1000, frozenset())


def proposed(ngram: NgramDrafter, one: Sequence, last: int | None = None, most: int = 7) -> list[int]:
    ngram.begin(1)
    at = len(one.tokens) - 1
    draft = ngram.propose(one, at, at if last is None else last, most)
    return [] if draft is None else draft.tokens


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_windows_find_where_tokens_stood(length: int) -> None:
    """One by one or many at once, the latest first, and whatever the hash, all of them."""
    random = Random(length)
    tokens = array("i", [random.randrange(4) for _ in range(400)])
    few, many = Windows(length, 400), Windows(length, 400)
    for end in range(0, 399, 7):
        few.add(tokens, end, min(end + 7, 399))
    many.add(tokens, 0, 399)
    tail = tokens[-length:]
    expected = [i for i in range(length - 1, 399) if tokens[i - length + 1 : i + 1] == tail][::-1]
    for windows in (few, many):
        found = windows.places(tokens, tail.tolist(), 400)
        assert [i for i in found if tokens[i - length + 1 : i + 1] == tail] == expected[: len(found)]
        assert found[:2] == windows.places(tokens, tail.tolist(), 2) and len(found) >= min(len(expected), 8)
    assert scanned(tokens, length, 400) == expected and scanned(tokens, length, 3) == expected[:3]


def test_scans_find_whole_tokens() -> None:
    """The bytes of a token may stand across two others, and those of repeated ones overlap."""
    assert scanned(array("i", [1, 256, 65536, 0, 1, 7, 0, 256]), 1, 5) == [1]
    assert scanned(array("i", [0] * 5), 1, 9) == [3, 2, 1, 0]
    assert scanned(array("i", [0] * 5), 3, 9) == [3, 2]
    assert scanned(array("i", [4]), 1, 9) == []


def test_drafts_are_what_followed_before() -> None:
    ngram = looking_up()
    text = [*range(10, 30), 5, 6, 10, 11, 12]
    one = sequence(text)
    assert proposed(ngram, one)[:3] == [13, 14, 15]
    one.tokens.extend([13, 14])
    assert proposed(ngram, one)[:2] == [15, 16], "the match is followed"
    one.tokens.append(99)
    assert proposed(ngram, one) == [], "nothing like it was seen"


def test_what_is_in_flight_is_taken_to_be_right() -> None:
    one = sequence([*range(10, 30), 5, 6, 10, 11, 12])
    assert proposed(looking_up(), one, last=len(one.tokens) + 1, most=2) == [15, 16]


def test_a_text_that_repeats_itself_is_continued() -> None:
    assert proposed(looking_up(), sequence([9, 8, *[1, 2, 3] * 3])) == [1, 2, 3, 1, 2, 3, 1][:7]


def test_texts_that_ended_are_found_within_their_namespace() -> None:
    """Across namespaces nothing is, or times would tell what others wrote."""
    ngram = looking_up()
    old = sequence([*range(100, 160)], namespace="a")
    old.tokens.append(160)
    old.first_cached_len = 0
    ngram.ended(old)
    for id, (namespace, expected) in enumerate((("a", [104, 105, 106]), ("b", []), ("", [])), 1):
        assert proposed(ngram, sequence([1, 101, 102, 103], id, namespace))[:3] == expected


def test_a_flush_forgets_texts() -> None:
    world = World(num_pages=200, drafter=looking_up(min_window=3))
    (ngram,) = [world.scheduler.planner.drafts.drafter]
    world.add([1, 2, 3, 4], max_new_tokens=20, ignore_eos=True)
    world.run()
    assert isinstance(ngram, NgramDrafter) and not ngram._readers
    text = [1, 2, 3, 4, *world.seen[0]]
    assert proposed(ngram, sequence(text[:12], 7))[:3] == text[12:15]
    assert flush(world.scheduler) is not None
    assert proposed(ngram, sequence(text[:12], 8)) == []


def test_a_corpus_forgets_the_oldest_and_never_reads_into_another_text() -> None:
    corpus = Corpus(BLOCK * 8, (3, 1))
    random = Random(3)
    texts = {owner: [owner * 1000 + i for i in range(random.randrange(20, 150))] for owner in range(1, 30)}
    for owner, text in texts.items():
        corpus.offer(owner, array("i", text))
        corpus.take_in(10_000)
    for text in texts.values():
        for place in corpus.windows[0].places(corpus.tokens, list(text[5:8]), 8):
            for other in texts:
                after, before = corpus.after(other, place + 1, 500), corpus.before(other, place, 500)
                assert all(token // 1000 == other for token in after)
                assert all(token // 1000 == other for token in before if token >= 0)
    found = [
        owner
        for owner, text in texts.items()
        if any(
            corpus.after(owner, p + 1, 2) == text[8:10]
            for p in corpus.windows[0].places(corpus.tokens, list(text[5:8]), 8)
        )
    ]
    assert found and found == list(range(found[0], 30)), "the latest are there"


def test_large_texts_are_taken_in_by_slices() -> None:
    corpus = Corpus(BLOCK * 1000, (3,))
    text = array("i", [*range(20_000)])
    corpus.offer(1, text)
    corpus.take_in(1024)
    assert corpus.after(1, corpus.windows[0].places(corpus.tokens, list(text[997:1000]), 1)[0] + 1, 3) == [
        1000,
        1001,
        1002,
    ]
    assert not corpus.windows[0].places(corpus.tokens, list(text[4997:5000]), 1)
    while corpus._waiting:
        corpus.take_in(1024)
    at = corpus.windows[0].places(corpus.tokens, list(text[1023:1026]), 1)[0] + 1
    assert corpus.after(1, at, 2) == [1026, 1027], "windows reach over the cut"


def test_branches_form_a_tree() -> None:
    ways = [[1, 2, 3], [1, 4], [5, 2], [1, 4]]
    by_depth = tree(ways, 4, by_depth=True)
    assert by_depth is not None and by_depth.tokens == [1, 2, 4, 5] and by_depth.parents == [0, 1, 1, 0]
    by_use = tree(ways, 2, by_depth=False)
    assert by_use is not None and by_use.tokens == [1, 4] and by_use.parents == [0, 1]
    one = sequence([*[1, 2, 3, 4, 5], 9, *[1, 2, 3, 7, 8], 6, 1, 2, 3])
    ngram = looking_up(has_trees=True, min_breadth=2)
    ngram.begin(1)
    draft = ngram.propose(one, len(one.tokens) - 1, len(one.tokens) - 1, 7)
    assert draft is not None and draft.parents is not None
    assert {token for token, parent in zip(draft.tokens, draft.parents, strict=True) if not parent} == {4, 7}


@pytest.mark.parametrize(("match_type", "expected"), [("BFS", 5), ("PROB", 4)])
def test_match_types_prefer_the_latest_or_the_usual(match_type: str, expected: int) -> None:
    one = sequence([*[1, 2, 3, 4] * 3, 9, *[1, 2, 3, 5], 6, 7, 1, 2, 3])
    assert proposed(looking_up(match_type=match_type, max_window=3), one)[0] == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_those_without_drafts(depth: int) -> None:
    """Answers that were given before are found again, in fewer steps."""
    counts = []
    for _ in range(2):
        world = World(depth=depth, num_pages=200, drafter=looking_up(), shares=False)
        for round in range(3):
            before = world.scheduler.totals.steps
            for head in range(3):
                world.add([head, 1, 2, 3], max_new_tokens=60, ignore_eos=True)
            world.run()
            counts.append(world.scheduler.totals.steps - before)
            assert all(tokens == world.expected(i) for i, tokens in world.seen.items())
            assert round == 0 or counts[-1] < counts[-1 - round]


class Dear(Eager):
    """Only guesses that are right more often than not pay."""

    def pays(self, chance: float) -> bool:
        """Whether one does."""
        return chance > 0.5


def test_short_windows_are_tried_seldom_where_their_guesses_do_not_pay() -> None:
    """Neither looked up, but for one look in SHORT_LOOKS, nor indexed."""
    ngram = looking_up()
    ngram.pace = Dear()
    old = sequence([*range(100, 160)])
    old.tokens.append(160)
    old.first_cached_len = 0
    ngram.ended(old)
    shortest = ngram.corpus.windows[-1]
    results = []
    for id in range(1, 2 * SHORT_LOOKS + 1):
        results.append(proposed(ngram, sequence([7, 8, 9, 7], id)))  # 7 alone stood there before
    assert results.count([8, 9, 7, 8, 9, 7, 8][:7]) == 2 and results.count([]) == 2 * SHORT_LOOKS - 2
    assert proposed(ngram, sequence([1, 101, 102, 103], 99))[:2] == [104, 105], "long ones are"
    assert not ngram.corpus.num_waiting and shortest.places(ngram.corpus.tokens, [103], 4) == []


def test_steps_without_drafts_are_learnt_ever_more_seldom() -> None:
    pace = Pace()
    learnt = []
    for step in range(1, 2049):
        pace.learn(1, 0, 0.01)
        if step % 1024 == 0:
            learnt.append(pace._costs.num_learnt)
    assert learnt[1] - learnt[0] == 1024 // FEW and learnt[0] > 64
    pace.learn(1, 3, 0.02)
    before = pace._costs.num_learnt
    for _ in range(64):
        pace.learn(1, 0, 0.01)
    assert pace._costs.num_learnt - before == 8, "again more often where there are drafts"


def looks(step_s: float, rows: int, steps: int = 2000) -> tuple[int, int]:
    """Steps of sequences in which nothing is found. -> looks, and steps in which drafts were asked for"""
    ngram = looking_up()
    ngram.pace = Pace()
    every = [sequence([5000 * i + k for k in range(20)], i) for i in range(rows)]
    asked = rested = 0
    for step in range(steps):
        if rested:
            rested -= 1
        elif rests := ngram.begin(rows):
            rested = rests - 1
        else:
            asked += 1
            for one in every:
                if (last := len(one.tokens) - 1) >= one.draft_from:
                    assert ngram.propose(one, last, last, 7) is None
        for i, one in enumerate(every):
            one.tokens.append(5000 * i + 20 + step)
        ngram.passed(rows, 1, step_s)
    return ngram._looks, asked


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_looks_that_find_nothing_take_one_part_in_a_hundred(rows: int) -> None:
    """Where steps take what the event loop needs for them; where a model is computed, none is left out."""
    count, asked = looks(0.0, rows)
    step_s = LOOP_STEP_S + rows * LOOP_ROW_S
    assert count * LOOK_S <= LOOKING * 2000 * step_s + MOST_LOOKING_S + rows * LOOK_S
    assert rows == 1 or asked < 400, "the drafter is left alone in the others"
    slow, _ = looks(0.02, rows)
    assert slow > 25 * rows and slow >= count


class Resting(Guesser):
    """Wants to be left alone for nine steps of ten."""

    def __init__(self) -> None:
        super().__init__(3, 1.0, has_trees=False)
        self.asked = self.reported = 0

    def begin(self, rows: int) -> int:
        self.asked += 1
        return 9 if self.asked % 2 else 0

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        self.reported += 1

    def passed(self, rows: int, steps: int, seconds: float) -> None:
        self.reported += steps


def test_a_drafter_is_left_alone_for_as_long_as_it_wants() -> None:
    """And is told afterwards how many steps it has missed."""
    drafter = Resting()
    plain, world = World(num_pages=200, max_running=2), World(num_pages=200, max_running=2, drafter=drafter)
    for one in (plain, world):
        for prompt in ([3, 1, 4], [2, 7]):
            one.add(prompt, max_new_tokens=150, ignore_eos=True)
        one.run()
    assert world.seen == plain.seen
    steps = world.scheduler.totals.steps
    assert steps < plain.scheduler.totals.steps and drafter.proposed > 0
    assert drafter.asked <= 2 * steps / 10 + 4 and steps - 20 <= drafter.reported <= steps


def test_a_drafter_is_left_alone_until_its_only_sequence_may_have_drafts() -> None:
    ngram = looking_up()
    ngram.pace = Pace()
    world = World(num_pages=200, drafter=ngram)
    world.add([3, 1, 4], max_new_tokens=180, ignore_eos=True)
    rests = 0
    for _ in range(120):
        world.submit()
        world.receive()
        rests += world.scheduler.planner.drafts._rests > 0
    assert ngram._looks > 2 and 40 < rests < 118
