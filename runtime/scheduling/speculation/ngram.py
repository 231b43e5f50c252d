"""Drafts that are looked up: how a text went on where its last tokens stood before.

Looked up are the sequence's own tokens, prompt and answer, and texts of sequences of the same namespace that
have ended (corpus.py). Where a match is found it is followed from token to token, which tells at no cost how
often it is right; only when it is wrong another is looked for. While tokens are in flight they are taken to
be the match's next ones, and drafts are those behind them.
"""

from array import array
from collections import Counter
from collections.abc import Iterator

from runtime.cache.sequence import Sequence
from runtime.messages.speculation import Speculation
from runtime.scheduling.drafts import Draft, Drafter
from runtime.scheduling.speculation.corpus import Corpus
from runtime.scheduling.speculation.pace import Chances, Pace, Record
from runtime.scheduling.speculation.windows import Windows, scanned

LONG = 3  # tokens of the window that is looked up first
CANDIDATES = 5  # places that are compared for one window
FEW_CANDIDATES = 2  # for one of less than LONG tokens, which says little
SCANNED = 2048  # tokens of a text that has no index: reading it through takes less than keeping one
INDEXED = 4096  # tokens that one plan indexes, at most: half a millisecond
TAKEN_IN = 1024  # tokens of ended texts that are indexed at once while many sequences run, which costs less
FEW_ROWS = 4  # while no more run, texts are found as soon as they have ended
# tokens between two looks at a text of which nothing is found, at most: so many, or of long answers a part
PAUSE, LONGEST_PAUSE = 16, 64
PAUSED_PART = 8
SHORT_LOOKS = (
    16  # where guesses of windows of less than LONG tokens do not pay, one look in so many tries them
)
# what a look takes, texts that are taken in for an index of one window, and a token of it
LOOK_S, TAKE_S, INDEX_S = 40e-6, 30e-6, 0.35e-6
MOST_UNSEEN = 64  # tokens since the last look; after more a match is looked for again


class Reader:
    """One sequence: the index of its tokens if they are many, and the match that is followed."""

    __slots__ = (
        "tokens",
        "owner",
        "windows",
        "indexed",
        "seen",
        "is_own",
        "at",
        "matched",
        "ahead",
        "ahead_from",
        "record",
        "pause",
    )

    def __init__(self, tokens: "array[int]", owner: int, pause: int = 1) -> None:
        self.tokens = tokens
        self.owner = owner  # its namespace in the corpus
        self.windows: list[Windows] = []  # []: there is no index
        self.indexed = 0  # places
        self.seen = len(tokens)  # tokens that the match was compared with
        self.is_own = True  # the match is in these tokens, else in the corpus
        self.at = -1  # where the match's next token stands; -1: there is no match
        self.matched = 0  # its length
        self.ahead: list[int] = []  # the match's tokens behind the first `ahead_from`, as last proposed
        self.ahead_from = -1
        self.record = Record()
        self.pause = pause  # tokens until the next look, if the last one found nothing

    def index(self, lengths: tuple[int, ...], most: int) -> int:
        """Indexes at most `most` more tokens, the last one excepted, by windows of these lengths. -> how
        many"""
        if not self.windows:
            self.windows = [Windows(length, 2 * len(self.tokens)) for length in lengths]
        end = min(len(self.tokens) - 1, self.indexed + most)
        if end <= self.indexed:
            return 0
        count = end - self.indexed
        for windows in self.windows:
            if end > windows.num_places:
                windows.grow(2 * end)
            windows.add(self.tokens, self.indexed, end)
        self.indexed = end
        return count


class NgramDrafter(Drafter):
    """Looks drafts up."""

    def __init__(self, speculation: Speculation, *, has_trees: bool, pace: Pace | None = None) -> None:
        """`has_trees`: the device attends to drafts that form trees."""
        options = speculation.ngram
        self.options = options
        self.most_nodes = speculation.max_drafts
        self.most = min(speculation.max_drafts, options.branch_length)  # of a chain
        self.breadth = options.max_breadth if has_trees and options.min_breadth > 1 else 1
        lengths = (min(max(LONG, options.min_window), options.max_window), options.min_window)
        self.lengths = tuple(dict.fromkeys(lengths))
        self.corpus = Corpus(options.capacity, self.lengths)
        self.chances = Chances()
        self.pace = pace or Pace()
        self._readers: dict[int, Reader] = {}
        self._following: set[int] = set()  # ids of sequences whose last drafts paid
        self._left = INDEXED  # tokens that this plan may still index
        self._looks = 0
        self._misses = 0  # looks that led to no drafts; each that does halves them

    def begin(self, rows: int) -> int:
        """Some more text is taken in. -> steps until there is time to look for drafts, where none are
        followed"""
        self.pace.begin(rows)
        self._left = INDEXED
        waiting = self.corpus.num_waiting
        if waiting and self.pace.has_time and (rows <= FEW_ROWS or waiting >= TAKEN_IN):
            num_windows = len(self.lengths) if self.pace.pays(self.chances.usual(self.lengths[-1])) else 1
            self.corpus.take_in(TAKEN_IN, num_windows)
            self.pace.spend(num_windows * (TAKE_S + min(waiting, TAKEN_IN) * INDEX_S))
        return 0 if self.pace.has_time or self._following else self.pace.rests()

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """A step of so many rows, verified drafts among their tokens, took `seconds`."""
        self.pace.learn(rows, drafts, seconds)

    def passed(self, rows: int, steps: int, seconds: float) -> None:
        """Such steps, of which nothing is learnt, took `seconds`."""
        self.pace.passed(rows, steps, seconds)

    def propose(self, sequence: Sequence, first: int, last: int, most: int) -> Draft | None:
        """The tokens behind a match; what is in flight is taken to be right."""
        reader = self._readers.get(sequence.id)
        if reader is None:
            reader = self._open(sequence)
        if reader.seen < len(reader.tokens):
            self._compare(reader)
        looks = reader.at < 0
        if looks:
            self._following.discard(sequence.id)
            if not self.pace.has_time:
                return None
            if not self._look_up(reader):
                self.pace.spend(LOOK_S)
                self._wait(sequence, reader, last)
                return None
        skipped = last + 1 - len(reader.tokens)
        chance = self.chances.of(reader.matched, reader.record)
        count = self.pace.count(chance, skipped, min(most, self.most))
        if not count:
            self._following.discard(sequence.id)
            if looks:
                self.pace.spend(LOOK_S)
            if skipped <= 1:
                self._wait(sequence, reader, last)
            return None
        self._following.add(sequence.id)
        reader.pause = 1
        self._misses //= 2
        if self.breadth > 1:
            return self._tree(reader, skipped, min(most, self.most_nodes))
        known = len(reader.tokens)
        reader.ahead, reader.ahead_from = self._guesses(reader, known, skipped + count), known
        tokens = reader.ahead[skipped:]
        return Draft(tokens) if tokens else None

    def ended(self, sequence: Sequence) -> None:
        """Remembers the tokens of a sequence that has ended, but for those from the prefix cache, which were
        remembered before."""
        reader = self._readers.pop(sequence.id, None)
        self._following.discard(sequence.id)
        known = max(0, sequence.first_cached_len - self.options.max_window)
        if sequence.first_cached_len >= 0 and sequence.num_generated:
            owner = reader.owner if reader is not None else self.corpus.owner(sequence.request.namespace)
            self.corpus.offer(owner, sequence.tokens[known:])

    def forget(self) -> None:
        """An empty corpus; matches in the old one are lost."""
        self.corpus = Corpus(self.options.capacity, self.lengths)
        self._readers.clear()
        self._following.clear()

    def _open(self, sequence: Sequence) -> Reader:
        owner = self.corpus.owner(sequence.request.namespace)
        reader = self._readers[sequence.id] = Reader(sequence.tokens, owner, patience(self._misses))
        return reader

    def _compare(self, reader: Reader) -> None:
        """Follows the match along the tokens that have come."""
        tokens, seen = reader.tokens, reader.seen
        count = len(tokens) - seen
        reader.seen = len(tokens)
        if reader.at < 0:
            return
        if count > MOST_UNSEEN:
            reader.at = -1
            return
        if reader.ahead_from == seen and len(reader.ahead) >= count:
            guesses = reader.ahead[:count]
        else:
            guesses = self._guesses(reader, seen, count)
        reader.ahead_from = -1
        come = tokens[seen:].tolist()
        if guesses == come:
            num_right = count
        else:
            num_right = next(
                (i for i, (a, b) in enumerate(zip(guesses, come, strict=False)) if a != b), len(guesses)
            )
        is_wrong = num_right < len(guesses)
        reader.record.add(num_right, is_wrong)
        self.chances.add(reader.matched, num_right, is_wrong)
        reader.at = reader.at + num_right if num_right == count else -1
        reader.matched += num_right

    def _guesses(self, reader: Reader, end: int, count: int) -> list[int]:
        """The next `count` tokens of the match, when the sequence had `end` tokens."""
        if not reader.is_own:
            return self.corpus.after(reader.owner, reader.at, count)
        found = reader.tokens[reader.at : min(reader.at + count, end)].tolist()
        while found and len(found) < count:  # it repeats itself
            found += found[: count - len(found)]
        return found

    def _wait(self, sequence: Sequence, reader: Reader, last: int) -> None:
        """Asks for no drafts for a while, which is longer each time."""
        self._misses += 1
        sequence.draft_from = last + reader.pause
        longest = max(PAUSE, patience(self._misses), sequence.num_generated // PAUSED_PART)
        reader.pause = min(2 * reader.pause, longest, LONGEST_PAUSE)

    def _look_up(self, reader: Reader) -> bool:
        """Begins to follow a match, if there is one."""
        if len(reader.tokens) > SCANNED and self._left > 0:
            count = reader.index(self.lengths, self._left)
            self._left -= count
            self.pace.spend(count * len(self.lengths) * INDEX_S)
        found = self._matches(reader, CANDIDATES)
        if not found:
            return False
        matched, is_own, at = found[0]
        if self.options.match_type == "PROB" and len(found) > 1:
            longest = [one for one in found if one[0] == matched]
            heads = [self._head(reader, own, place) for _, own, place in longest]
            usual, _ = Counter(heads).most_common(1)[0]
            matched, is_own, at = longest[heads.index(usual)]
        reader.matched, reader.is_own, reader.at = matched, is_own, at
        return True

    def _matches(self, reader: Reader, most: int) -> list[tuple[int, bool, int]]:
        """Matches of the longest window that has any: length, whether it is in the sequence's own tokens, and
        where the next token stands. The longest first, of equal ones the latest, own ones before others."""
        length = self.options.max_window
        tail = reader.tokens[-length:].tolist()
        is_first = self.options.match_type == "BFS" and self.breadth == 1
        self._looks += 1
        chance = self.chances.usual(self.lengths[-1])
        tries_short = self._looks % SHORT_LOOKS == 0 or self.pace.pays(chance)
        for number in range(len(self.lengths) if tries_short else 1):
            size = self.lengths[number]
            if len(tail) < size:
                continue
            found: list[tuple[int, bool, int]] = []
            for is_own, place in candidates(self.corpus, reader, number, tail[-size:], most):
                matched = _common(self._before(reader, is_own, place, length), tail)
                if matched >= size:
                    found.append((matched, is_own, place + 1))
                    if is_first and matched == length:
                        return found[-1:]
            if found:
                return sorted(found, key=lambda one: -one[0])
        return []

    def _before(self, reader: Reader, is_own: bool, place: int, count: int) -> list[int]:
        if is_own:
            return reader.tokens[max(0, place + 1 - count) : place + 1].tolist()
        return self.corpus.before(reader.owner, place, count)

    def _head(self, reader: Reader, is_own: bool, place: int) -> int:
        """The token at a place; -1 where there is none."""
        if is_own:
            return reader.tokens[place]
        after = self.corpus.after(reader.owner, place, 1)
        return after[0] if after else -1

    def _tree(self, reader: Reader, skipped: int, count: int) -> Draft | None:
        """The ways that several matches go on, as one tree: the followed one first."""
        known = len(reader.tokens)
        ways = [self._guesses(reader, known, skipped + self.most)]
        head = ways[0][:skipped]
        for _, is_own, at in self._matches(reader, 2 * self.breadth)[: self.breadth]:
            other = Reader(reader.tokens, reader.owner)
            other.is_own, other.at = is_own, at
            way = self._guesses(other, known, skipped + self.most)
            if way[:skipped] == head:
                ways.append(way)
        return tree([way[skipped:] for way in ways], count, by_depth=self.options.match_type == "BFS")


def patience(misses: int) -> int:
    """Tokens between two looks at a sequence, at first: more while no look leads to drafts. `misses`: looks
    that led to none."""
    return min(LONGEST_PAUSE, 1 << (2 * misses.bit_length() // 3))


def tree(ways: list[list[int]], count: int, *, by_depth: bool) -> Draft | None:
    """The first `count` nodes of the tree that these ways form: level by level, or the most used first."""
    tokens, uses, depths, parents = [0], [0], [0], [-1]
    children: dict[tuple[int, int], int] = {}
    for way in ways:
        node = 0
        for token in way:
            child = children.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                uses.append(0)
                depths.append(depths[node] + 1)
                parents.append(node)
            uses[child] += 1
            node = child
    # parents come first: they are used at least as often, are less deep, and were made earlier
    order = sorted(range(1, len(tokens)), key=lambda i: (depths[i] if by_depth else -uses[i], i))[:count]
    if not order:
        return None
    order.sort()
    places = {0: 0} | {node: place for place, node in enumerate(order, 1)}
    return Draft([tokens[node] for node in order], [places[parents[node]] for node in order])


def candidates(
    corpus: Corpus, reader: Reader, number: int, window: list[int], most: int
) -> Iterator[tuple[bool, int]]:
    """Where `window`, the last tokens, may have stood before: whether in the sequence's own tokens, and the
    place of its last token. `number`: of the window's length."""
    count = most if len(window) >= LONG else min(most, FEW_CANDIDATES)
    if reader.windows:
        own = reader.windows[number].places(reader.tokens, window, count)
    elif len(reader.tokens) <= SCANNED:
        own = scanned(reader.tokens, len(window), count)
    else:
        own = []
    for place in own:
        yield True, place
    for place in corpus.windows[number].places(corpus.tokens, window, count):
        yield False, place


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens at their ends are the same."""
    if one == other:
        return len(one)
    count = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        count += 1
    return count
