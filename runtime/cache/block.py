"""A block of a diffusion model, whose tokens are filled in over several steps."""

from msgspec import Struct


class Block(Struct):
    """The tokens of one block of a sequence, the mask where none is known yet.

    It belongs to the sequence, not to the ranks: a sequence that was preempted, or whose ranks died, goes on
    with it.
    """

    tokens: list[int]
    num_given: int  # the first tokens, which are the end of the prompt
    num_edits: int = 0  # steps since the block had no mask

    @staticmethod
    def begin(given: list[int], size: int, mask_id: int) -> "Block":
        """A block of `size` tokens that begins with `given`."""
        return Block([*given, *[mask_id] * (size - len(given))], len(given))
