"""What steps cost, learnt from the times that ranks report, and how many prompt tokens fit a bound of time
(`--max-step-ms`).

The time of a step is taken to be a sum of two parts, each fitted by least squares in which older steps count
less:

    decode rows   = a + b rows + c positions that they attend to            from steps of nothing else
    other tokens  = d tokens + e times the positions that each attends to   from what other steps take above
                    + f in steps without decode rows

Tokens to verify are tokens of the second part: speculation can ask what it costs as prompts do.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from msgspec import Struct

FORGET = 0.99  # weight of older steps, at each new one
MIN_STEPS = 8  # of a kind, before a fit counts as known
OUTLIER = 4.0  # times longer than expected: what a step counts for at most
FIRST_TOKENS = 32  # prompt tokens of the first step with a bound, before anything is known
LEAST_SHARE = 0.5  # of the time of decode rows: what prompts get where the bound leaves them less


class Work(Struct, frozen=True):
    """What a step computes: decode rows, the positions that they attend to, other tokens, and those times the
    positions that each attends to."""

    decodes: int
    tokens: int
    attended: int
    context: int = 0


class LeastSquares:
    """Coefficients, none of them negative, by which features add up to seconds."""

    def __init__(self, scales: Sequence[float], ridges: Sequence[float]) -> None:
        """`scales`: what is large for each feature; `ridges`: how strongly each coefficient is held at 0
        where the data do not decide."""
        self.num_learnt = 0
        self._scales = np.array(scales)
        self._ridges = np.diag(ridges)
        self._squares = np.zeros((len(scales), len(scales)))
        self._products = np.zeros(len(scales))
        self._fit = np.zeros(len(scales))
        self._is_solved = True

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Something of these features took so long; what took far longer than expected counts for less."""
        seconds = min(seconds, self._most(features))
        scaled = np.array(features) / self._scales
        self._squares = self._squares * FORGET + np.outer(scaled, scaled)
        self._products = self._products * FORGET + scaled * seconds
        self.num_learnt += 1
        self._is_solved = False

    @property
    def coefficients(self) -> np.ndarray:
        """Seconds for one of each feature."""
        if not self._is_solved:
            left = np.ones(len(self._scales), bool)
            solved = np.zeros(len(self._scales))
            while left.any():
                squares = (self._squares + self._ridges)[np.ix_(left, left)]
                part = np.linalg.solve(squares, self._products[left])
                if (part >= 0).all():
                    solved[left] = part
                    break
                left[np.flatnonzero(left)[part < 0]] = False
            self._fit, self._is_solved = solved / self._scales, True
        return self._fit

    def _most(self, features: Sequence[float]) -> float:
        """Seconds that these features may count for. Solves now and then only, as every step asks."""
        if self.num_learnt < MIN_STEPS:
            return float("inf")
        fit = self.coefficients if self.num_learnt % MIN_STEPS == 0 else self._fit
        return OUTLIER * float(fit @ np.array(features)) or float("inf")

    def seconds(self, features: Sequence[float]) -> float:
        """What these features are expected to take."""
        return float(self.coefficients @ np.array(features))


class StepCosts:
    """Costs of the steps of one generation of ranks after another."""

    def __init__(self) -> None:
        self._base = LeastSquares((1.0, 64.0, 1e5), (1e-9, 1e-9, 1e-9))
        # the constant explains nothing that tokens explain as well: else they would seem to cost nothing
        self._prompts = LeastSquares((1.0, 1024.0, 1e6), (1e-3, 1e-9, 1e-9))
        self._largest = 0.0  # number of tokens of recent steps

    def learn(self, work: Work, seconds: float) -> None:
        """A step of this work took `seconds`."""
        if not work.tokens:
            return self._base.learn((1.0, work.decodes, work.context), seconds)
        above = max(seconds - self._decodes_s(work), 0.0)
        self._prompts.learn((float(work.decodes == 0), work.tokens, work.attended), above)
        self._largest = max(self._largest * FORGET, float(work.tokens))

    def prompt_s(self, start: int, count: int) -> float:
        """Seconds that `count` tokens from position `start` add to a step which has other tokens already."""
        return self._prompts.seconds((0.0, count, count * start + count * count / 2))

    def expected_s(self, work: Work) -> float:
        """Seconds of a step."""
        if not work.tokens:
            return self._decodes_s(work)
        features = (float(work.decodes == 0), work.tokens, work.attended)
        return self._decodes_s(work) + self._prompts.seconds(features)

    def _decodes_s(self, work: Work) -> float:
        return self._base.seconds((1.0, work.decodes, work.context)) if work.decodes else 0.0

    def room_s(self, bound_s: float, work: Work) -> float:
        """Seconds for prompts in a step that computes `work` besides. Where that alone takes about as long as
        the bound, prompts get some time all the same."""
        besides = self.expected_s(work)
        return max(bound_s - besides, besides * LEAST_SHARE)

    @property
    def most_tokens(self) -> int:
        """Prompt tokens that may be planned by the fit: twice as many as have been seen lately."""
        return max(FIRST_TOKENS, int(2 * self._largest))

    def tokens_within(self, seconds: float, start: int, full: int) -> int:
        """How many of `full` tokens from position `start` take so long at most."""
        _, token_s, attended_s = self._prompts.coefficients.tolist()
        slope = token_s + attended_s * start  # attended_s / 2 n² + slope n = seconds
        if slope * full + attended_s * full * full / 2 <= seconds:
            return full
        if seconds <= 0:
            return 0
        if attended_s * seconds < 1e-6 * slope * slope:
            return int(seconds / slope)
        return int((sqrt(slope * slope + 2 * attended_s * seconds) - slope) / attended_s)

    def equal_tokens(self, start: int, full: int) -> int:
        """Tokens from position `start` that take as long as `full` tokens from the beginning of a prompt."""
        if self._prompts.num_learnt < MIN_STEPS:
            return full
        return self.tokens_within(self.prompt_s(0, full), start, full)
