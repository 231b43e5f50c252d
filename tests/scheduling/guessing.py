"""A drafter for tests: it knows what the oracle will sample, and is right, wrong or partly right."""

from random import Random

from runtime.cache.sequence import Sequence
from runtime.messages.speculation import Ngram, Speculation
from runtime.scheduling.drafts import Draft, Drafter
from runtime.scheduling.speculation.ngram import NgramDrafter
from runtime.scheduling.speculation.pace import Pace
from tests.scheduling.answers import VOCAB, next_token


class Eager(Pace):
    """Drafts cost nothing, and neither does looking them up."""

    def count(self, chance: float, skipped: int, most: int) -> int:
        """All that are possible."""
        return most

    def worth(self, gains: tuple[float, ...]) -> int:
        """All that are possible."""
        return len(gains)

    def pays(self, chance: float) -> bool:
        """All do."""
        return True

    def spend(self, seconds: float) -> None:
        """There is always time."""


def looking_up(*, has_trees: bool = False, num_drafts: int = 7, **ngram: object) -> NgramDrafter:
    """Looks drafts up, as many as are found."""
    options = Speculation(
        algorithm="NGRAM",
        num_steps=0,
        topk=1,
        num_draft_tokens=num_drafts + 1,
        ngram=Ngram(**{"capacity": 4096} | ngram),
    )
    return NgramDrafter(options, has_trees=has_trees, pace=Eager())


class Guesser(Drafter):
    """Chains and trees of up to `longest` guesses, each right with probability `luck`."""

    def __init__(self, longest: int, luck: float, *, has_trees: bool, seed: int = 0) -> None:
        self.longest = longest
        self.luck = luck
        self.has_trees = has_trees
        self.random = Random(seed)
        self.proposed = 0  # tokens

    def propose(self, sequence: Sequence, first: int, last: int, most: int) -> Draft | None:
        """Guesses what follows a token at some position between the bounds."""
        assert len(sequence.tokens) - 1 <= first <= last < sequence.max_len and most > 0
        random = self.random
        known = sequence.tokens.tolist()
        at = random.randint(first, last)
        while len(known) <= at:
            known.append(next_token(known))
        count = random.randint(0, min(most, self.longest))
        if not count:
            return None
        self.proposed += count
        tokens: list[int] = []
        parents: list[int] = []
        for i in range(count):
            parent = random.randint(max(0, i - 2), i) if self.has_trees else i
            way, node = [], parent
            while node:
                way.append(tokens[node - 1])
                node = parents[node - 1]
            is_right = random.random() < self.luck
            tokens.append(next_token([*known, *reversed(way)]) if is_right else random.randrange(VOCAB))
            parents.append(parent)
        return Draft(tokens, parents if self.has_trees else None)
