"""What a step changes of its slots: lengths, last tokens and, where drafts are accepted, states and pages.

Two halves, because a stage of a pipeline learns the step's tokens later than it launches the step: what is
known with the plan (`advance`), and what follows from the tokens (`take`).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from runtime.layers.sampling.verify import Accepted, accept
from runtime.layers.upload import upload_int64
from runtime.messages.steps import StepPlan
from runtime.ranks.recurrent_states import RecurrentStates
from runtime.ranks.sample_rows import SampleRows
from runtime.ranks.slots import Slots
from runtime.ranks.step_inputs import StepInputs
from runtime.ranks.transfers import Transfers


class StepEffects:
    """Changes the slots of one rank."""

    def __init__(
        self,
        slots: Slots,
        inputs: StepInputs,
        states: RecurrentStates | None,
        transfers: Transfers,
        pools: Sequence[int],
    ) -> None:
        """`pools`: of each layer with keys and values, which page table is its own."""
        self.slots = slots
        self.inputs = inputs
        self.states = states
        self.transfers = transfers
        self.pools = list(pools)

    def advance(self, plan: StepPlan, starts: np.ndarray, rows: SampleRows) -> None:
        """Lengths of the rows of which the plan says how many tokens they add. `starts`, int64 [R]: the
        lengths before."""
        lengths = self.slots.lengths
        if rows.drafts is None:
            packed = None if rows.packed is None else rows.packed.ends
            return lengths.advance(plan.slots, starts, plan.kept_counts(), packed)
        others = np.setdiff1d(np.arange(len(plan.slots)), rows.rows[rows.verified])
        return lengths.advance(plan.slots[others], starts[others], plan.counts[others])

    def take(self, plan: StepPlan, starts: np.ndarray, rows: SampleRows, tokens: Tensor) -> Accepted | None:
        """Last tokens, and drafts that are accepted. `tokens`, int64 [N]: what was sampled at `rows`. ->
        what is accepted of verify rows; None: there are none"""
        slots, torch_device = self.slots, self.slots.torch_device
        if rows.drafts is None:
            if slots.host is None:
                packed = rows.packed
                index = upload_int64(rows.slots, torch_device) if packed is None else packed.slots.tensor
                slots.last_token.index_copy_(0, index, tokens)
            else:
                slots.host.set_last_tokens(rows.slots, tokens)
            return None
        accepted = accept(tokens, rows.drafts, torch_device)
        last = tokens[upload_int64(rows.first_rows(), torch_device)]
        last[upload_int64(rows.verified, torch_device)] = accepted.last
        verified = rows.rows[rows.verified]
        if self.states is not None:
            self.states.accept(accepted.num, starts[verified], plan.states)
        if accepted.path is not None:
            self.inputs.keep_paths(self.pools, plan.slots[verified], starts[verified], accepted)
        slots.last_token[upload_int64(plan.slots[rows.rows], torch_device)] = last
        slots.lengths.accept(plan.slots[verified], accepted.num, self.transfers.fetch([accepted.num]))
        return accepted
