"""Rows that bring several tokens at once: those that a grammar forces, or a draft that was right.

A row of n tokens has computed none of them. Steps that were submitted before its result came go on as if it
had brought one, and what the rank samples in them it has told already: they are `repeated`, and their results
are dropped. What they do not compute becomes known tokens, as a prompt's are, and with the last of them the
sequence decodes on (planner.outrun).
"""

from collections.abc import Sequence as Items

import numpy as np

from runtime.messages.steps import StepResult
from runtime.scheduling.sequence import Sequence


def split_rows(result: StepResult) -> tuple[list[int], dict[int, list[int]]]:
    """The first token of each row that sampled, and by row what follows it."""
    tokens, counts = result.token_ids.tolist(), result.num_tokens
    if counts is None:
        return tokens, {}
    ends = counts.cumsum()
    more = {
        row: tokens[ends[row] - counts[row] + 1 : ends[row]] for row in np.flatnonzero(counts > 1).tolist()
    }
    return [tokens[at] for at in (ends - counts).tolist()], more


def take_run(sequence: Sequence, more: Items[int]) -> list[int]:
    """What the sequence takes of the tokens that follow the one it has just got: as many as come before its
    end."""
    taken: list[int] = []
    for token in more:
        if sequence.tokens[-1] in sequence.stop_ids or len(sequence.tokens) >= sequence.max_len:
            break
        sequence.tokens.append(token)
        taken.append(token)
    sequence.repeated = min(sequence.in_flight, len(taken))
    sequence.in_flight -= sequence.repeated
    return taken
