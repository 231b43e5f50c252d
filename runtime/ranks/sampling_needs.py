"""How the slots of one attention group are sampled, as far as it decides which graph samples them.

The arrays are the host's. A rank has those of its own group, and where steps of groups are captured, those of
all groups: the choice of a graph must be the same on all ranks.
"""

import numpy as np

from runtime.layers.sampling.captured_edits import fits, has_edits
from runtime.layers.sampling.penalties import has_penalties
from runtime.messages.steps import Admit, StepPlan
from runtime.ranks.sample_rows import SampleRows


class SamplingNeeds:
    """By slot, what its rows ask for besides a greedy token."""

    def __init__(self, max_slots: int, vocab_size: int) -> None:
        """`max_slots`: sequences that run at once."""
        self.vocab_size = vocab_size
        self.is_random = np.zeros(max_slots, dtype=bool)
        self.top_k = np.zeros(max_slots, dtype=np.int64)  # 0: not filtered by rank
        self.has_top_p = np.zeros(max_slots, dtype=bool)
        self.is_plain = np.ones(max_slots, dtype=bool)
        self.is_read = np.zeros(max_slots, dtype=bool)
        self.is_penalised = np.zeros(max_slots, dtype=bool)

    def admit(self, admit: Admit) -> None:
        """A slot is taken by another sequence."""
        slot, sampling = admit.slot, admit.sampling
        self.is_random[slot] = sampling.temperature > 0
        self.top_k[slot] = sampling.top_k if sampling.top_k < self.vocab_size else 0
        self.has_top_p[slot] = sampling.top_p < 1
        self.is_plain[slot] = is_plain(admit)
        self.is_read[slot] = is_read(admit)
        self.is_penalised[slot] = has_penalties(sampling) or has_edits(sampling)

    def largest_only(self, plan: StepPlan, rows: SampleRows) -> bool:
        """Whether nothing is read of the step's rows of logits but where the largest is."""
        slots = rows.slots
        reads_more = self.is_random[slots] | self.is_penalised[slots] | ~self.is_plain[slots]
        return plan.blocks is None and rows.drafts is None and not reads_more.any()

    def filters(self, slots: np.ndarray) -> tuple[int, bool]:
        """The largest top_k of these slots, at least one, and whether one has top_p."""
        return int(self.top_k[slots].max()), bool(self.has_top_p[slots].any())


def is_plain(admit: Admit) -> bool:
    """Whether a sequence's tokens are sampled from logits as the model gives them but for penalties, biases
    and banned stop ids, without log probabilities."""
    return not (admit.grammar_constraint or is_read(admit))


def is_read(admit: Admit) -> bool:
    """Whether something other than a mask, penalties, few biases and banned stop ids, and the sampler reads
    or changes a sequence's logits."""
    sampling = admit.sampling
    return bool(sampling.processor or sampling.token_bans or sampling.top_logprobs >= 0 or not fits(sampling))
