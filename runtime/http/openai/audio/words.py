"""Times of words: tokens are brought in line with the sound by dynamic time warping, and tokens become words,
both with the results of transformers' Whisper."""

import string
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from runtime.gil import give_way

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages without spaces between words
OPENING = "\"'“¡¿([{-"  # marks that belong to the word behind them
CLOSING = "\"'.。,，!！?？:：”)]}、"  # marks that belong to the word before them
NO_CHARACTER = "\ufffd"  # of a token that ends within a character

Decode = Callable[[list[int]], str]


class Word(Struct, frozen=True):
    """A word of a transcription, in the words of OpenAI's API."""

    word: str
    start: float  # seconds
    end: float


class Piece(Struct, frozen=True):
    """A text and the places of its tokens."""

    text: str
    places: tuple[int, ...]

    def followed_by(self, other: "Piece") -> "Piece":
        """Both as one."""
        return Piece(self.text + other.text, self.places + other.places)


def first_positions(scores: np.ndarray) -> np.ndarray:
    """The position of the sound with which each token begins, int64 [tokens]. `scores`: float32 [tokens,
    positions], how well these go together. For a worker thread.

    The path with the best sum goes from the first token and position to the last ones, by one token, one
    position, or both at a time (Sakoe and Chiba, 1978). Costs of a diagonal depend on the two before it.
    """
    tokens, positions = scores.shape
    # back to the best place before: by both 0, by a token 1, by a position 2
    step = np.empty((tokens + 1, positions + 1), np.int8)
    step[0], step[:, 0] = 2, 1
    price = -scores.astype(np.float64)
    cost = np.full((tokens + 1, positions + 1), np.inf, np.float32)
    cost[0, 0] = 0
    for diagonal in range(2, tokens + positions + 1):
        i = np.arange(max(1, diagonal - positions), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, position = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        is_both = (both < token) & (both < position)
        is_token = (token < both) & (token < position)
        cost[i, j] = price[i - 1, j - 1] + np.where(is_both, both, np.where(is_token, token, position))
        step[i, j] = np.where(is_both, 0, np.where(is_token, 1, 2))
        give_way()
    return _begins(step)


def _begins(step: np.ndarray) -> np.ndarray:
    """The first position of each token on the path that ends at the last place of `step`."""
    i, j = step.shape[0] - 1, step.shape[1] - 1
    begins = np.zeros(i, np.int64)
    while i > 0 or j > 0:
        if i > 0:
            begins[i - 1] = max(j - 1, 0)
        taken = step[i, j]
        i, j = i - (taken != 2), j - (taken != 1)
    return begins


def words_of(ids: list[int], decode: Decode, language: str) -> list[Piece]:
    """The words of a text. Tokens without text, special ones, belong to none."""
    shown = [place for place, id in enumerate(ids) if decode([id])]
    pieces = characters([ids[place] for place in shown], decode)
    pieces = [Piece(one.text, tuple([shown[place] for place in one.places])) for one in pieces]
    if language not in UNSPACED:
        pieces = _by_spaces(pieces)
    return _with_marks(pieces)


def characters(ids: list[int], decode: Decode) -> list[Piece]:
    """The shortest runs of tokens that are whole characters."""
    whole, found = decode(ids), list[Piece]()
    current: list[int] = []
    length = begin = 0  # characters, and tokens, of what was found
    for place, id in enumerate(ids):
        current.append(id)
        text = decode(current)
        at = length + text.find(NO_CHARACTER)
        if NO_CHARACTER not in text or at >= len(whole) or whole[at] == NO_CHARACTER:
            found.append(Piece(text, tuple(range(begin, place + 1))))
            length, begin, current = length + len(text), place + 1, []
    return found


def _by_spaces(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that begin with a space, and punctuation, begin a word."""
    found: list[Piece] = []
    for one in pieces:
        if not found or one.text.startswith(" ") or one.text.strip() in string.punctuation:
            found.append(one)
        else:
            found[-1] = found[-1].followed_by(one)
    return found


def _with_marks(pieces: Sequence[Piece]) -> list[Piece]:
    """Marks become a part of the word that they open or close."""
    opened: list[Piece] = []
    for one in reversed(pieces):
        if opened and one.text.startswith(" ") and one.text.strip() in OPENING:
            opened[-1] = one.followed_by(opened[-1])
        else:
            opened.append(one)
    found: list[Piece] = []
    for one in reversed(opened):
        if found and not found[-1].text.endswith(" ") and one.text in CLOSING:
            found[-1] = found[-1].followed_by(one)
        else:
            found.append(one)
    return found


def timed(
    pieces: Sequence[Piece], first: int, times_s: Sequence[float], begin_s: float, end_s: float
) -> list[Word]:
    """Words with their times in the sound. `first`: the place of the text's first token in `times_s`, where a
    token lasts from the time of the one before it to its own; `begin_s`, `end_s`: of the window."""

    def time_s(place: int) -> float:
        return round(min(begin_s + (times_s[place] if place >= 0 else 0.0), end_s), 2)

    return [
        Word(one.text.strip(), time_s(first + one.places[0] - 1), time_s(first + one.places[-1]))
        for one in pieces
        if one.text.strip()
    ]
