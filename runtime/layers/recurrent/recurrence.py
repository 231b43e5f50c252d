"""Runs a recurrence over the rows of a step: one token of decode rows, chunks of extend rows, and rows of
drafts, whose states move on when it is known how many of them are accepted.

A row of drafts is computed token by token, as decoding would, so acceptance does not depend on how a chunk
rounds. No state is written then: a token's inputs are far smaller than a state, so they are kept, and what
is accepted is computed again from the state of the row's beginning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.devices.state_rows import StateRows, VerifyRows

# inputs of one token of each of R sequences, [R, ...] each, and states [R, ...] -> outputs and new states;
# or inputs of T tokens of one sequence, [T, ...] each, and its state
Computes = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, Tensor]]

# inputs of one token of each of R sequences, all states and the slots of these -> outputs; states change
InPlace = Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor]


def state_rows(batch: ForwardBatch) -> StateRows:
    """The rows of a batch as recurrent layers see them."""
    assert batch.states is not None, "a recurrent layer in a batch without states"
    return batch.states


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A function of a token and a state. All tensors are float32."""

    step: Computes  # one token of each of R sequences
    chunks: Computes  # tokens of one sequence
    rates: tuple[int, ...]  # the inputs of which zeros leave a state as it is
    in_place: InPlace | None = None  # `step` on states where they lie; None: they are gathered and scattered

    def run(self, inputs: tuple[Tensor, ...], state: Tensor, rows: StateRows) -> Tensor:
        """`inputs` [T, ...] of the step's tokens -> outputs [T, ...]. `state` [state slots, ...] is read, and
        written for all rows but those of drafts."""
        outs, num_decodes = [], len(rows.decodes)
        if num_decodes:
            outs.append(self._decode(tuple(x[:num_decodes] for x in inputs), state, rows.decodes))
        if rows.verifies is not None:
            outs.append(self._verify(inputs, state, rows.verifies))
        for slot, begin, count in rows.extends:
            out, after = self.chunks(tuple(x[begin : begin + count] for x in inputs), state[slot].float())
            state[slot] = after
            outs.append(out)
        return in_order(outs, rows)

    def _decode(self, inputs: tuple[Tensor, ...], state: Tensor, slots: Tensor) -> Tensor:
        if self.in_place is not None:
            return self.in_place(inputs, state, slots)
        out, after = self.step(inputs, state[slots].float())
        state.index_put_((slots,), after.to(state.dtype))
        return out

    def _verify(self, inputs: tuple[Tensor, ...], state: Tensor, rows: VerifyRows) -> Tensor:
        kept = tuple(x[rows.places] for x in inputs)  # [V, N, ...]
        outs, after = [], state[rows.slots].float()
        for node in range(rows.places.shape[1]):
            out, after = self.step(tuple(x[:, node] for x in kept), after)
            outs.append(out)

        def advance(counts: Tensor, slots: Tensor) -> None:
            moved = state[rows.slots].float()
            for node in range(rows.places.shape[1]):
                is_taken = node < counts
                parts = [x[:, node] for x in kept]
                for rate in self.rates:
                    parts[rate] = parts[rate] * is_taken.view(-1, *[1] * (parts[rate].dim() - 1))
                moved = self.step(tuple(parts), moved)[1]
            state.index_put_((slots,), moved.to(state.dtype))

        rows.advances.append(advance)
        return torch.stack(outs, dim=1).flatten(0, 1)[rows.nodes]


def in_segments(
    compute: Computes, inputs: tuple[Tensor, ...], state: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence, `size` of them at a time: what `compute` makes of more would take too much
    memory."""
    outs = []
    for begin, end in pairwise([*range(0, len(inputs[0]), size), len(inputs[0])]):
        out, state = compute(tuple(x[begin:end] for x in inputs), state)
        outs.append(out)
    return torch.cat(outs), state


def in_order(outs: list[Tensor], rows: StateRows) -> Tensor:
    """Outputs of decode rows, of rows of drafts and of each other row, joined in the order of the step's
    tokens."""
    joined = outs[0] if len(outs) == 1 else torch.cat(outs)
    if rows.verifies is None:
        return joined
    # rows of drafts and rows of forced tokens may stand in any order
    num_decodes, verified = len(rows.decodes), rows.verifies.tokens
    line = torch.empty_like(joined)
    line[:num_decodes] = joined[:num_decodes]
    line[verified] = joined[num_decodes : num_decodes + len(verified)]
    at = num_decodes + len(verified)
    for _, begin, count in rows.extends:
        line[begin : begin + count] = joined[at : at + count]
        at += count
    return line
