"""Two-batch overlap (--enable-two-batch-overlap): a step's tokens as two micro-batches, which are computed in
turns (turns.py): the collectives of one go on while the other is computed.

A step is cut between two rows or, if that would leave one side much less than the other, within a row of
several tokens. The second part of such a row then sees the keys and values of the first as it sees those of a
prefix, and goes on from the recurrent state that the first has left: both micro-batches call the same
collectives in each layer, so between two of these the first one is computed before the second one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.base import AttentionPlan, Device, ForwardBatch
from runtime.devices.state_rows import StateRows
from runtime.layers.parallel.context_parallel import TokenPart
from runtime.layers.step_lora import MICRO_BATCH
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
    """Whether a step can be cut: none with trees of drafts, with embeddings that are given or sounds, with
    pages that come from host memory layer by layer, or with drafts that recurrent layers verify."""
    is_plain = batch.embeds is None and batch.cross is None
    has_verifies = batch.states is not None and batch.states.verifies is not None
    return rows.parents is None and is_plain and batch.page_loads is None and not has_verifies


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


def num_whole_rows(rows: AttentionRows, num_whole: int, first: int) -> tuple[int, int]:
    """How many of the first `num_whole` rows of a step lie in each of the two parts into which `cut_rows`
    cuts it behind `first` tokens. A row that lies in both counts in both."""
    ends = rows.counts.cumsum()
    last = int(np.searchsorted(ends, first))
    begin = last + (int(ends[last]) == first)  # the first row of the second part
    return min(num_whole, last + 1), max(0, num_whole - begin)


def cut_states(states: StateRows, first: int) -> tuple[StateRows, StateRows]:
    """The rows of the step's `first` tokens, and those of the others, as recurrent layers see them. A row
    that both have leaves its state in the first, and goes on from it in the second."""
    assert states.verifies is None, "can_cut"
    head, tail = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for slot, begin, count in states.extends:
        inside = min(max(first - begin, 0), count)
        if inside:
            head.append((slot, begin, inside))
        if inside < count:
            tail.append((slot, max(begin - first, 0), count - inside))
    return (
        replace(states, decodes=states.decodes[:first], extends=tuple(head)),
        replace(states, decodes=states.decodes[first:], extends=tuple(tail)),
    )


PlanAttention = Callable[
    [tuple[AttentionRows, ...], tuple[int, ...]], list[tuple[TokenPart | None, AttentionPlan | None]]
]


def in_two(
    batch: ForwardBatch, rows: AttentionRows, num_whole: int, first: int, plan_attention: PlanAttention
) -> ForwardBatch:
    """The batch with its micro-batches. It has no plan of attention of its own then. `num_whole`: rows, the
    first ones, that ranks which share prompts do not divide; `plan_attention` takes the rows of both
    micro-batches, and these numbers of each."""
    planned = plan_attention(cut_rows(rows, first), num_whole_rows(rows, num_whole, first))
    states = (None, None) if batch.states is None else cut_states(batch.states, first)
    head, tail = (
        replace(
            batch,
            token_ids=batch.token_ids[place],
            positions=batch.positions[place],
            locations=tuple(locations[place] for locations in batch.locations),
            part=part,
            attention=attention,
            states=own,
        )
        for place, (part, attention), own in zip(
            (slice(0, first), slice(first, None)), planned, states, strict=True
        )
    )
    return replace(batch, micro_batches=(head, tail))


def first_tokens(batch: ForwardBatch) -> tuple[int, ...]:
    """Tokens of the first of two micro-batches; (): there is one batch."""
    return () if batch.micro_batches is None else (len(batch.micro_batches[0].positions),)


def with_hidden(batch: ForwardBatch, hidden: Tensor) -> ForwardBatch:
    """The batch behind the first stage of a pipeline: `hidden` [T, any] in place of embeddings, in both
    micro-batches if it has these."""
    places = torch.arange(len(hidden), device=hidden.device)
    given = replace(batch, token_ids=torch.zeros_like(places), embeds=(places, hidden))
    if batch.micro_batches is None:
        return given
    head, tail = batch.micro_batches
    first = len(head.token_ids)
    return replace(
        given, micro_batches=(with_hidden(head, hidden[:first]), with_hidden(tail, hidden[first:]))
    )


def forward_in_turns(device: Device, model: Model, batches: tuple[ForwardBatch, ForwardBatch]) -> Tensor:
    """Hidden states of both micro-batches, [T, hidden]."""
    turns, attention = Turns[Tensor](), device.attention
    exchanges = [device.collectives]
    if attention is not None:
        exchanges += [attention.heads, attention.parts, attention.group, attention.peers]
    for ranks in exchanges:
        ranks.meanwhile = turns.pass_on if ranks.size > 1 else None
    try:
        first, second = partial(model.forward, batches[0]), partial(_as_second, model, batches[1])
        return torch.cat(turns.run(first, as_here(device, second)))
    finally:
        for ranks in exchanges:
            ranks.meanwhile = None


def _as_second(model: Model, batch: ForwardBatch) -> Tensor:
    """Hidden states of the second micro-batch, in a thread of its own."""
    MICRO_BATCH.set(1)
    return model.forward(batch)


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
