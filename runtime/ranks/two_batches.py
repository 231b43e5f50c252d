"""Two-batch overlap (--enable-two-batch-overlap): a step's tokens as two micro-batches, which are computed in
turns (turns.py): the collectives of one go on while the other is computed.

A step is cut between two rows or, if that would leave one side much less than the other, within a row of
several tokens. The second part of such a row then sees the keys and values of the first as it sees those of a
prefix: in each layer the first micro-batch is computed before the second one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.base import AttentionPlan, Device, ForwardBatch
from runtime.messages.steps import StepPlan
from runtime.models.base import Model
from runtime.ranks.turns import Turns


def num_first(counts: np.ndarray, threshold: float) -> int:
    """Tokens of the first micro-batch of a step whose rows have `counts` tokens; 0: the step is not cut.
    `threshold`: the least share of the tokens that the smaller one has if the cut is between rows, else it is
    in the middle; 0: it always is between rows."""
    ends = counts.cumsum()
    total = int(ends[-1])
    smaller = np.minimum(ends, total - ends)
    best = int(smaller.argmax())
    if not threshold or smaller[best] >= threshold * total:
        return int(ends[best]) if smaller[best] else 0
    return total // 2


def can_cut_plan(plan: StepPlan) -> bool:
    """As `can_cut`, from a plan alone."""
    return (
        plan.draft_parents is None
        and plan.embed_places is None
        and plan.media is None
        and plan.page_copies is None
    )


def can_cut(batch: ForwardBatch, rows: AttentionRows) -> bool:
    """Whether a step can be cut: none with trees of drafts, with embeddings that are given or sounds, or with
    pages that come from host memory layer by layer."""
    is_plain = batch.embeds is None and batch.cross is None
    return rows.parents is None and is_plain and batch.page_loads is None


def cut_rows(rows: AttentionRows, first: int) -> tuple[AttentionRows, AttentionRows]:
    """The rows of the step's `first` tokens, and those of the others. A row that has both is in both."""
    ends = rows.counts.cumsum()
    last = int(np.searchsorted(ends, first))  # the row in which the first part ends
    left = int(ends[last]) - first  # its tokens in the second part
    head, tail = slice(0, last + 1), slice(last if left else last + 1, None)
    head_counts, tail_counts, starts = rows.counts[head].copy(), rows.counts[tail].copy(), rows.starts[tail]
    if left:
        head_counts[-1] -= left
        tail_counts[0] = left
        starts = starts.copy()
        starts[0] += head_counts[-1]
    return (
        AttentionRows(min(rows.num_decodes, last + 1), rows.slots[head], rows.starts[head], head_counts),
        AttentionRows(max(0, rows.num_decodes - tail.start), rows.slots[tail], starts, tail_counts),
    )


def in_two(
    batch: ForwardBatch,
    rows: AttentionRows,
    first: int,
    plan_attention: Callable[[AttentionRows], AttentionPlan],
) -> ForwardBatch:
    """The batch with its micro-batches. It has no plan of attention of its own then."""
    head, tail = (
        replace(
            batch,
            token_ids=batch.token_ids[part],
            positions=batch.positions[part],
            locations=tuple(locations[part] for locations in batch.locations),
            attention=plan_attention(own),
        )
        for part, own in zip((slice(0, first), slice(first, None)), cut_rows(rows, first), strict=True)
    )
    return replace(batch, micro_batches=(head, tail))


def forward_in_turns(device: Device, model: Model, batches: tuple[ForwardBatch, ForwardBatch]) -> Tensor:
    """Hidden states of both micro-batches, [T, hidden]."""
    turns, attention = Turns[Tensor](), device.attention
    exchanges = [device.collectives]
    if attention is not None:
        exchanges += [attention.heads, attention.group, attention.peers]
    for ranks in exchanges:
        ranks.meanwhile = turns.pass_on if ranks.size > 1 else None
    try:
        first, second = (partial(model.forward, batch) for batch in batches)
        return torch.cat(turns.run(first, as_here(device, second)))
    finally:
        for ranks in exchanges:
            ranks.meanwhile = None


def as_here(device: Device, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`compute` for another thread, with what torch knows of this one: its mode, device and stream."""
    streams, has_inference_mode = device.streams, torch.is_inference_mode_enabled()
    if streams is None:

        def run() -> Tensor:
            with torch.inference_mode(has_inference_mode):
                return compute()

        return run
    number, stream = streams.current_device(), streams.current_stream()

    def run_on_stream() -> Tensor:
        streams.set_device(number)
        with torch.inference_mode(has_inference_mode), streams.stream(stream):
            return compute()

    return run_on_stream
