"""How long a matcher takes: a grammar of a few bytes can keep a library busy for minutes, also when it has
been compiled, if a text can be read in ever more ways.

A grammar is tried in the compile process before a rank gets it; the rank counts what is slow all the same
(layers/sampling/grammar_masks.py). Time is that of the processor, which a busy machine does not change.
"""

from collections.abc import Sequence
from time import perf_counter, thread_time

import numpy as np

from runtime.grammar.backend import GrammarError, Matcher

SLOW_S = 0.05  # of one operation on a rank
MAX_SLOW = 3  # of them in one sequence
MAX_STEP_S = 0.25  # of one token in a trial
NUM_TOKENS = 48  # of each text that is tried
TRIAL_S = 1.0  # for each of them; more is too slow, unless most of its tokens were forced
STRIDES = (1, 7919)  # which of the allowed tokens is taken, in each of the texts
NO_TEXT = (
    "no text can follow this rule; look for parts that need themselves, and for parts that contradict each "
    "other"
)
TOO_SLOW = (
    "the grammar takes too long to follow: a text can be read in too many ways; look for repetitions within "
    "repetitions, and for parts that may be empty"
)


class Stopwatch:
    """Counts the slow operations of one sequence."""

    __slots__ = ("num_slow",)

    def __init__(self) -> None:
        self.num_slow = 0

    def is_over(self, began_s: float, at_s: float) -> bool:
        """Notes an operation that began at this `thread_time` and this `perf_counter`. -> whether the
        sequence has taken too long

        The time of the processor, a call of the system, is asked for only where the other one says that the
        operation may have been slow.
        """
        if perf_counter() - at_s > SLOW_S and (took_s := thread_time() - began_s) > SLOW_S:
            self.num_slow += 1 if took_s < MAX_STEP_S else MAX_SLOW
        return self.num_slow >= MAX_SLOW


def try_grammar(matcher: Matcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
    """Generates two texts up to where they may end, up to NUM_TOKENS or for TRIAL_S. Raises GrammarError for
    a grammar that no text matches (`{"$ref": "#"}` compiles without errors), and for one that takes too
    long."""
    bits = np.zeros(-(-vocab_size // 32), np.int32)
    if not matcher.fill(bits) or not bits.any():
        raise GrammarError(NO_TEXT)
    for stride in STRIDES:
        _generate(matcher.fork(), bits, stride, list(eos_ids))


def _generate(matcher: Matcher, bits: np.ndarray, stride: int, eos_ids: list[int]) -> None:
    end_s, num_forced = thread_time() + TRIAL_S, 0
    for index in range(NUM_TOKENS):
        began_s = thread_time()
        run = [token for token in matcher.jump_forward() if token not in eos_ids]
        num_forced += len(run)
        goes_on = all([matcher.accept(token) for token in run])
        goes_on = goes_on and matcher.fill(bits)
        ones = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        allowed = ones[~np.isin(ones, eos_ids)]
        goes_on = goes_on and len(allowed) > 0
        goes_on = goes_on and matcher.accept(int(allowed[(index * stride) % len(allowed)]))
        if thread_time() - began_s > MAX_STEP_S:
            raise GrammarError(TOO_SLOW)
        if thread_time() > end_s and num_forced < NUM_TOKENS:
            raise GrammarError(TOO_SLOW)
        if not goes_on or thread_time() > end_s:
            return
