"""Stages of a pipeline: consecutive layers of a model on ranks of their own.

    rank = stage * tensor-parallel size + tensor-parallel rank

The first stage embeds tokens, the last one has the last norm and the head, and samples. A draft model is
whole, on the ranks of the last stage.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Which of the `count` stages a rank is in."""

    index: int = 0
    count: int = 1
    has_draft_heads: bool = False  # the model has heads that draft, which embed tokens in the last stage
    # layers of the model, all of its stages, whose inputs a head that drafts is given; the number of layers:
    # what the last one gives
    aux_layers: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens of a step."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1

    @property
    def embeds(self) -> bool:
        """Whether it has the embedding for what it computes; a tied head has one besides."""
        return self.is_first or (self.is_last and self.has_draft_heads)

    def layers(self, num_layers: int) -> range:
        """The layers of this stage, of all. Numbers differ by one at most; the later stages have fewer, as
        the last one has the head."""
        fewest, more = divmod(num_layers, self.count)
        begin = self.index * fewest + min(self.index, more)
        return range(begin, begin + fewest + (self.index < more))

    def own_aux(self, num_layers: int) -> tuple[int, ...]:
        """Those of the `aux_layers` whose inputs this stage computes, or is given, by their place in it."""
        own = self.layers(num_layers)
        end = own.stop + self.is_last
        return tuple(index - own.start for index in self.aux_layers if own.start <= index < end)

    def num_passed_aux(self, num_layers: int) -> int:
        """How many of the `aux_layers` are in the stages before this one."""
        return sum(index < self.layers(num_layers).start for index in self.aux_layers)

    def aux_places(self, num_layers: int) -> tuple[int, ...]:
        """The place of each of the `aux_layers` behind the last stage, where they have come stage by
        stage."""
        ends = [Stage(i, self.count).layers(num_layers).stop for i in range(self.count - 1)]
        stages = [sum(index >= end for end in ends) for index in self.aux_layers]
        order = sorted(range(len(stages)), key=stages.__getitem__)
        return tuple(order.index(number) for number in range(len(order)))
