"""How attention divides the tensor-parallel ranks of a stage.

    rank = (group * number of parts + part) * ranks that share heads + rank among these

A group has requests, and pages, of its own (data-parallel attention); within a group, ranks of different
parts share each sequence (context parallelism); within a part, ranks share the attention heads. All other
layers are divided over all ranks. With one group and one part, which is the default, all ranks share the
heads.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Numbers of ranks; `num_groups` times `num_parts` divides `num_ranks`."""

    num_ranks: int
    num_groups: int = 1
    num_parts: int = 1

    @property
    def is_divided(self) -> bool:
        """Whether not all ranks share the heads."""
        return self.num_groups * self.num_parts > 1

    @property
    def num_head_ranks(self) -> int:
        """Ranks that share the heads of the same tokens."""
        return self.num_ranks // (self.num_groups * self.num_parts)

    @property
    def group_size(self) -> int:
        """Ranks of a group."""
        return self.num_ranks // self.num_groups

    def group_of(self, rank: int) -> int:
        """The group of a rank."""
        return rank // self.group_size

    def group_ranks(self) -> list[range]:
        """The ranks of each group, which have the same requests."""
        return [range(first, first + self.group_size) for first in range(0, self.num_ranks, self.group_size)]

    def head_ranks(self) -> list[range]:
        """Sets of ranks that share the heads of the same tokens."""
        size = self.num_head_ranks
        return [range(first, first + size) for first in range(0, self.num_ranks, size)]

    def part_ranks(self) -> list[range]:
        """Sets of ranks with the same heads of the same sequences, one for each part of these."""
        step = self.num_head_ranks
        return [
            range(own.start + place, own.stop, step) for own in self.group_ranks() for place in range(step)
        ]

    def peer_ranks(self) -> list[range]:
        """Sets of ranks at the same place of each group."""
        return [range(place, self.num_ranks, self.group_size) for place in range(self.group_size)]
