"""How decoding sequences are shared out to the steps that a pipeline of stages has in flight at a time.

A sequence's next token follows from its last one, so a step of all sequences would pass through the stages
alone. With `count` micro-batches, each step has about one in `count` of the sequences that run; a sequence
takes part in a step again when its last token is known, or when `count` steps have been planned since: then
the last stage is done with it about when the first one begins.
"""

from collections.abc import Iterator

from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.scheduling.roster import Roster


class MicroBatches(Struct, frozen=True):
    """`count` micro-batches, each of at most `most` sequences (None: an even share)."""

    count: int = 1
    most: int | None = None

    def size(self, num_running: int, step: int) -> int:
        """Sequences of a step, of so many that run; those of `count` steps in a row differ by one at most."""
        least, more = divmod(num_running, self.count)
        share = max(1, least + (step % self.count < more))
        return share if self.most is None else min(share, self.most)

    def decoding(self, roster: Roster, step: int) -> Iterator[Sequence]:
        """The sequences that may decode in `step`, by precedence: of those that can, the ones that have
        waited longest. They may be preempted meanwhile."""
        if self.count == 1:
            return as_it_shrinks(roster.decoding)
        ready = [s for s in roster.decoding if not s.in_flight or step - s.sampled_at >= self.count]
        ready.sort(key=lambda sequence: sequence.sampled_at)
        chosen = {sequence.id for sequence in ready[: self.size(roster.num_running, step)]}
        return (sequence for sequence in as_it_shrinks(roster.decoding) if sequence.id in chosen)


def as_it_shrinks(sequences: list[Sequence]) -> Iterator[Sequence]:
    """Iterates while items behind the current one may be removed (the youngest stand last)."""
    index = 0
    while index < len(sequences):
        yield sequences[index]
        index += 1
