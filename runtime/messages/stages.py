"""Stages of a pipeline: consecutive layers of a model on ranks of their own.

    rank = stage * tensor-parallel size + tensor-parallel rank

The first stage embeds tokens, the last one has the last norm and the head, and samples.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Which of the `count` stages a rank is in."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this stage, of all. Numbers differ by one at most; the later stages have fewer, as
        the last one has the head."""
        fewest, more = divmod(num_layers, self.count)
        begin = self.index * fewest + min(self.index, more)
        return range(begin, begin + fewest + (self.index < more))
