"""What encodings take, learnt from the times that ranks report, and how much of one a step has time for.

An encoding of `n` rows is taken to need a n + b n² seconds, fitted for each kind of media by least squares in
which older ones count less: attention within an image grows with the square. What was measured of an encoding
on its way counts more than the fit.
"""

from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.media_kind import MediaKind
from runtime.scheduling.step_costs import LeastSquares

ENCODE_S = (
    0.1  # for encodings in a step of sequences that decode, where steps have no bound (--max-step-ms 0)
)
BOUND_SHARE = 0.5  # of what a bound leaves a step for prompts: what encodings get of it
FIRST_PART = 1 / 16  # of an encoding that a step makes where nothing is known of its time
BLIND_ROWS = 256  # that a step makes of one encoding where ranks report no time
LEAST_PART = 1 / 64  # of an encoding: what a step makes of one at least, so that none stands still


class Making(Struct):
    """An encoding on its way."""

    kind: MediaKind
    num_rows: int
    planned: float = 0.0  # part of the whole, up to 1, that was planned
    measured: float = 0.0  # part of the whole whose time is known
    spent_s: float = 0.0  # that this part has taken


class MadePart(Struct, frozen=True):
    """The part of an encoding that one step makes."""

    sequence: Sequence  # for whom
    making: Making
    part: float  # of the whole, up to 1

    @property
    def rows(self) -> float:
        """Its share of the encoding's rows."""
        return self.part * self.making.num_rows


class EncodeCosts:
    """Costs of the encodings of one generation of ranks after another."""

    def __init__(self) -> None:
        self._fits: dict[MediaKind, LeastSquares] = {}
        self._is_blind = False  # ranks report no time: others than the one that answers encode

    def learn(self, parts: list[MadePart], encode_s: float) -> None:
        """A step has made these parts, in so many seconds together; 0: ranks report no time."""
        self._is_blind = not encode_s
        num_rows = sum([one.rows for one in parts])
        for one in parts:
            making = one.making
            making.spent_s += encode_s * one.rows / num_rows
            making.measured += one.part
            if making.spent_s and making.measured > 1 - LEAST_PART:
                fit = self._fits.setdefault(making.kind, LeastSquares((1024.0, 1048576.0), (1e-9, 1e-9)))
                fit.learn((making.num_rows, making.num_rows**2), making.spent_s)

    def expected_s(self, making: Making) -> float | None:
        """Seconds of the whole encoding; None: nothing is known of it."""
        if making.spent_s:
            return making.spent_s / making.measured
        if (fit := self._fits.get(making.kind)) is None:
            return None
        return fit.seconds((making.num_rows, making.num_rows**2)) or None

    def part_within(self, making: Making, seconds: float, *, is_first: bool) -> float:
        """How much of an encoding, as a part of the whole, a step makes in so many seconds; 0: nothing.
        `is_first`: the step makes no other."""
        rest, whole_s = 1 - making.planned, self.expected_s(making)
        if whole_s is not None:
            part = seconds / whole_s
        elif is_first:
            part = BLIND_ROWS / making.num_rows if self._is_blind else FIRST_PART
        else:
            part = 0.0
        if part < LEAST_PART:
            part = LEAST_PART if is_first else 0.0
        return rest if part > rest - LEAST_PART else part
