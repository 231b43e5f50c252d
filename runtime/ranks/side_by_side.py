"""PD multiplexing (--enable-pdmux): the decodes of a step and its prompts as two micro-batches, which are
computed at the same time on two partitions of the device.

    main stream      inputs | ..................... | head and sampling of all rows
    prompts' stream         | their layers .........|^  the main stream waits for both
    decodes' stream         | their layers, or graph|^

Memory is safe with these waits alone: what either stream reads is kept until the main stream has waited for
it, and what it makes comes from its own part of the allocator's pool, where the next work begins behind the
main stream. Neither reads what the other one writes: a prompt may share pages with prompts of its own step,
and with no decode of it (scheduling/planner.py publishes pages of prompts alone). Prompts are computed kernel
by kernel, because piecewise graphs share memory with those of decodes.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.devices.partitions import Partitions
from runtime.devices.streams import Stream, Streams
from runtime.messages.steps import StepPlan
from runtime.models.base import Model
from runtime.ranks.decode_graphs import DecodeGraphs

Compute = Callable[[], Tensor]


def num_first(counts: np.ndarray, num_whole: int) -> int:
    """Tokens of the first micro-batch of a step whose rows have `counts` tokens, and whose first `num_whole`
    are no prompts; 0: all rows are of one kind, and the step is not cut."""
    return int(counts[:num_whole].sum()) if num_whole < len(counts) else 0


def decodes_by_graph(graphs: DecodeGraphs | None, plan: StepPlan) -> Compute | None:
    """The decode rows of a plan by a graph on their partition; None: it has none."""
    size = None if graphs is None else graphs.size_divided(plan)
    if graphs is None or size is None:
        return None
    count = plan.num_decodes
    own = StepPlan(
        step=plan.step,
        num_decodes=count,
        slots=plan.slots[:count],
        counts=plan.counts[:count],
        samples=plan.samples[:count],
    )
    return partial(graphs.forward, size, own, is_divided=True)


def forward_side_by_side(
    streams: Streams, partitions: Partitions, model: Model, batch: ForwardBatch, by_graph: Compute | None
) -> Tensor:
    """Hidden states of both micro-batches of a batch, [T, hidden]. `by_graph`: of `decodes_by_graph`."""
    assert batch.micro_batches is not None, "a step that was not cut"
    decodes, prompts = batch.micro_batches
    partition, main = partitions.of(len(decodes.token_ids)), streams.current_stream()
    for stream in partition:
        stream.wait_stream(main)
    hidden = dict[Stream, Tensor]()
    launches: list[tuple[Stream, Compute]] = [
        (partition.decodes, by_graph or partial(model.forward, decodes)),
        (partition.prompts, partial(model.forward, prompts)),
    ]
    # first what the host has launched soonest
    for stream, compute in launches if by_graph is not None else reversed(launches):
        with streams.stream(stream):
            hidden[stream] = compute()
    for stream in partition:
        main.wait_stream(stream)
    return torch.cat((hidden[partition.decodes], hidden[partition.prompts]))
