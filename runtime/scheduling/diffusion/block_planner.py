"""Rows that fill in the blocks of a diffusion model.

A sequence whose known blocks are computed has one row a step: the block that was completed last, if its keys
and values are still those of masks, and then the next one as far as it is filled in. So a block that is
complete costs no pass of its own. What a step found changes the next one, so a sequence has one row in
flight.
"""

from collections.abc import Callable

from runtime.cache.block import Block
from runtime.cache.sequence import Sequence
from runtime.messages.steps import BlockSampling
from runtime.scheduling.diffusion.algorithms import Diffusion
from runtime.scheduling.roster import Roster
from runtime.scheduling.step_builder import StepBuilder


class BlockPlanner:
    """Plans the rows of sequences whose known blocks are computed, or are so with this row."""

    def __init__(self, roster: Roster, diffusion: Diffusion) -> None:
        self.roster = roster
        self.diffusion = diffusion
        self.sampling = BlockSampling(
            size=diffusion.size, mask_id=diffusion.mask_id, repeat_penalty=diffusion.algorithm.repeat_penalty
        )

    def plan(self, builder: StepBuilder, grow: Callable[[Sequence], bool]) -> None:
        """A row for each such sequence that has none, in this step or in flight. `grow` takes a page for a
        sequence; False: it gave way. Pages are multiples of blocks, so a block takes one at most."""
        planned = {sequence.id for sequence in builder.sequences}
        for sequence in list(self.roster.decoding):
            if sequence.in_flight or sequence.slot < 0 or sequence.id in planned:
                continue
            if sequence.extend_len == len(sequence.pages) * self.roster.cache.page_size:
                if not grow(sequence):
                    continue
                builder.set_page(sequence.slot, len(sequence.pages) - 1, sequence.pages[-1])
            if not (sequence.index or sequence.num_generated) and sequence.request.params.n > 1:
                self.roster.follow(sequence)  # its prompt is computed, as far as others can share it
            block = sequence.block or self._begin(sequence)
            builder.add_block(sequence, block.tokens)
            sequence.computed_len = sequence.extend_len
            sequence.in_flight += 1

    def _begin(self, sequence: Sequence) -> Block:
        known = sequence.extend_len
        given = sequence.text_ids(known, len(sequence.tokens)).tolist()
        sequence.block = Block.begin(given, self.diffusion.size, self.diffusion.mask_id)
        return sequence.block
