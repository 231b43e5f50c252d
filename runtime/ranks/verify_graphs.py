"""Steps in which rows verify drafts as graphs: captured for a number of rows and a number of query tokens of
each (the width), and replayed as decode steps are (decode_graphs.py).

    pages      page updates
    drafts     the scheduler's are part of the inputs; a draft model has graphs of its own
               (drafting/draft_graphs.py)
    forward    embedding, layers. A row's tokens are attended as that many rows of one token each, whose keys
               are all stored before: what a device captures for decode steps serves here
    sample     head, a token behind each query, acceptance, last tokens and lengths; the draft model's pending
               tokens. Greedy, or by a sampler of DeviceFacts.captured_samplers

Rows may have fewer drafts than the width, or none: what is left is padding, as are rows up to the size. With
a draft model, steps that only decode take this way too (width 1), as it follows them.

Launched kernel by kernel are steps with prompts, admits, pages from host memory or hidden states to return,
with trees, drafts that are certain, or drafts of both kinds; with rows that ask for more than a token, or for
penalties; and all steps of models with recurrent layers.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.step_graphs import Graph
from runtime.messages.ranks import Capture, Captured
from runtime.messages.speculation import Speculation
from runtime.messages.steps import OWN_DRAFT, Samples, StepPlan
from runtime.ranks.captured_forward import CapturedForward
from runtime.ranks.decode_graphs import attempt, page_updates
from runtime.ranks.drafting.draft_graphs import DraftGraphs, Filters, RecordedDrafts
from runtime.ranks.drafting.draft_runner import DraftRunner
from runtime.ranks.sampled import Sampled
from runtime.ranks.sampling_needs import SamplingNeeds
from runtime.ranks.transfers import Transfers

ALL = int(Samples.ALL)
GREEDY: Filters = None
FEW = 64  # a step of fewer tokens may be padded up to so many: it is bound by reading weights

Shape = tuple[int, int]  # rows, and query tokens of each


@dataclass(frozen=True, slots=True)
class Recorded:
    """The graphs captured for one shape."""

    pages: Graph
    forward: Graph
    adapted: Graph | None  # the same for rows with adapters; None: there are none
    samplers: dict[Filters, Graph]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The graphs of one number of rows that sample in one way."""

    samplers: dict[Shape, Graph]
    drafts: RecordedDrafts | None  # None: no draft model


def is_capturable(plan: StepPlan, *, is_own: bool) -> bool:
    """Whether all rows decode, or verify chains of drafts that a draft model makes if `is_own`, else that the
    scheduler gives."""
    num, drafts = plan.num_decodes, plan.token_ids == OWN_DRAFT
    return (
        0 < len(plan.slots) == num + plan.num_verifies
        and bool(plan.follows and drafts.all() if is_own else not drafts.any())
        and not plan.admits
        and plan.draft_parents is None
        and plan.shown is None
        and plan.routed is None
        and bool((plan.samples[num:] == ALL).all() and plan.samples[:num].all())
        and (plan.page_copies is None or not len(plan.page_copies.load_pages))
    )


def samplers_for(samplers: Iterable[Filters], slots: np.ndarray, needs: SamplingNeeds) -> list[Filters]:
    """Those that do what the rows of `slots` ask for, the one that costs least first."""
    if not needs.is_plain[slots].all() or needs.is_penalised[slots].any():
        return []
    if not needs.is_random[slots].any():
        return [GREEDY]
    k, p = needs.filters(slots)
    return [each for each in samplers if each is not None and each[0] >= k and each[1] >= p]


class VerifyGraphs:
    """The graphs of a rank, and the static tensors that they read and write."""

    def __init__(
        self,
        target: CapturedForward,
        transfers: Transfers,
        speculation: Speculation,
        sizes: Sequence[int],
        drafts: DraftRunner | None,
        *,
        pads: bool,
    ) -> None:
        """`sizes`: numbers of rows, all that may be captured; `drafts`: None without a draft model; without
        `pads` a graph serves exactly its number of rows and of tokens."""
        self.target = target
        self.slots = target.slots
        self.transfers = transfers
        self.speculation = speculation
        self.pads = pads
        self.recorded: dict[Shape, Recorded] = {}
        self.sizes: list[int] = []  # of them, rising
        self.filters = [GREEDY, *target.device.facts.captured_samplers]
        largest = max(sizes)
        num_tokens = max(size * width for size in sizes for width in speculation.captured_widths(size))
        torch_device = target.device.torch_device
        self.height = 2 + target.num_updates  # arrays of packed inputs, each with a number for every token
        self.packed = torch.zeros(self.height * num_tokens, dtype=torch.int32, device=torch_device)
        self.tokens = torch.zeros(num_tokens, dtype=torch.int64, device=torch_device)
        self.num_accepted = torch.zeros(largest, dtype=torch.int64, device=torch_device)
        self.hidden: Tensor | None = None  # [num_tokens, hidden], from the first capture on
        self.num_tokens = num_tokens
        self.drafts: DraftGraphs | None = None
        if drafts is not None:
            self.drafts = DraftGraphs(drafts, target, transfers, largest, speculation.max_drafts)

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────

    def shape_of(self, plans: Sequence[StepPlan], needs: Sequence[SamplingNeeds]) -> Shape | None:
        """The shape in which a step of these plans, one of each attention group, is replayed, with what the
        slots of each group ask for; None: it is launched kernel by kernel, or as a decode step."""
        has_drafts = self.drafts is not None or any(plan.num_verifies for plan in plans)
        if not self.sizes or not has_drafts:
            return None
        if not all(is_capturable(plan, is_own=self.drafts is not None) for plan in plans):
            return None
        shape = self.shape_for(
            max(len(plan.slots) for plan in plans),
            max(int(plan.counts.max()) for plan in plans),
            max(int(plan.counts.sum()) for plan in plans),
        )
        if shape is None or any(page_updates(plan) > shape[0] * shape[1] for plan in plans):
            return None
        samplers = self.recorded[shape].samplers
        has_samplers = (
            samplers_for(samplers, plan.slots, own) for plan, own in zip(plans, needs, strict=True)
        )
        return shape if all(has_samplers) else None

    def shape_for(self, count: int, width: int, num_tokens: int) -> Shape | None:
        """The least shape for `count` rows of up to `width` tokens each, `num_tokens` in all."""
        at = bisect_left(self.sizes, count)
        if at == len(self.sizes):
            return None
        size = self.sizes[at]
        widths = [own for rows, own in self.recorded if rows == size and own >= width]
        if not widths:
            return None
        most = num_tokens
        if self.pads:
            is_free = self.target.device.facts.pads_graphs_freely
            most = self.num_tokens if is_free else max(2 * num_tokens, FEW)
        return (size, min(widths)) if size * min(widths) <= most else None

    def launch(self, shape: Shape, plan: StepPlan, *, is_adapted: bool) -> Sampled:
        """Computes and samples a step in a shape that `shape_of` has found; slots move on. Tokens and counts
        are overwritten by the next step."""
        (size, width), count = shape, len(plan.slots)
        recorded = self.recorded[shape]
        filters = samplers_for(recorded.samplers, plan.slots, self.slots.needs)[0]
        num_drafts = plan.counts.astype(np.int64) - 1
        columns = np.arange(width)
        is_real = columns <= num_drafts[:, None]
        packed = self.blank(shape)
        slots, drafts = (packed[i].reshape(size, width)[:count] for i in range(2))
        slots[is_real] = np.repeat(plan.slots, plan.counts)
        if self.drafts is None:
            drafts[is_real & (columns > 0)] = plan.token_ids
        self._pack_updates(packed, plan)
        inputs = self.packed[: packed.size]
        self.transfers.upload(packed.ravel(), inputs)
        graphs = self.target.graphs
        graphs.replay(recorded.pages, ())
        if self.drafts is not None:
            tokens = self.drafts.propose(size, filters, plan.slots, num_drafts)
            on_device = inputs.view(self.height, size, width)[1]
            on_device[:count, 1:] = tokens[:, : width - 1]
        lengths: np.ndarray | tuple[()] = ()
        if graphs.reads_lengths:
            ends = self.slots.lengths.starts(plan.slots)[:, None] + columns + 1
            lengths = np.ones((size, width), np.int32)
            lengths[:count] = np.where(is_real, ends, 1)
            lengths = lengths.ravel()
        graph = recorded.adapted if is_adapted else recorded.forward
        assert graph is not None, "a step with adapters where there are none"
        graphs.replay(graph, lengths)
        graphs.replay(recorded.samplers[filters], ())
        num = self.num_accepted[:count].clone()
        self.slots.lengths.accepted_on_device(plan.slots, self.transfers.fetch([num]))
        return Sampled(self.tokens[: count * width], None, None, num, width=width)

    def launch_idle(self, shape: Shape, *, is_adapted: bool) -> None:
        """Computes a step of padding, for layers that this rank's attention group shares with others."""
        packed = self.blank(shape)
        self.transfers.upload(packed.ravel(), self.packed[: packed.size])
        graphs = self.target.graphs
        lengths = np.ones(shape[0] * shape[1], np.int32) if graphs.reads_lengths else ()
        recorded = self.recorded[shape]
        graph = recorded.adapted if is_adapted else recorded.forward
        assert graph is not None, "a step with adapters where there are none"
        graphs.replay(graph, lengths)

    def _pack_updates(self, packed: np.ndarray, plan: StepPlan) -> None:
        """Puts the plan's page updates in packed inputs."""
        pages = slice(len(plan.page_ids))
        packed[2, pages], packed[3, pages], packed[4, pages] = plan.page_slots, plan.page_rows, plan.page_ids
        if (window := plan.window) is not None:
            pages = slice(len(window.ids))
            packed[5, pages], packed[6, pages], packed[7, pages] = window.slots, window.rows, window.ids

    # ── captures ──────────────────────────────────────────────────────────────────────────────────────────

    def capture(self, size: int) -> Captured:
        """Graphs of one more number of rows, of every width. A size that cannot be captured leaves everything
        as it was; a sampler that cannot be is left outside from now on."""
        request = Capture(size, "verifies")
        captured, shapes = attempt(self.target.device, request, self.record_forwards)
        for filters in list(self.filters):
            if captured.error or shapes is None:
                return captured
            more, sampling = attempt(self.target.device, request, partial(self.record_sampling, filters))
            if more.is_fatal or (filters is GREEDY and more.error):
                return more
            captured = structs.replace(
                captured,
                seconds=captured.seconds + more.seconds,
                num_bytes=captured.num_bytes + more.num_bytes,
            )
            if sampling is None:
                self.filters.remove(filters)
            else:
                for shape, graph in sampling.samplers.items():
                    shapes[shape].samplers[filters] = graph
                if self.drafts is not None and sampling.drafts is not None:
                    self.drafts.recorded[size, filters] = sampling.drafts
        self.recorded.update(shapes or {})
        self.sizes = sorted({rows for rows, _ in self.recorded})
        return captured

    def record_forwards(self, size: int) -> dict[Shape, Recorded]:
        """Forward graphs of one number of rows, by shape."""
        shapes = {}
        for shape in self.shapes(size):
            bodies: list[Callable[[], None]] = [
                partial(self.pages_body, shape),
                partial(self.forward_body, shape),
            ]
            if self.target.adapters is not None:
                bodies.append(partial(self.forward_body, shape, is_adapted=True))
            graphs = self.target.record(bodies)
            shapes[shape] = Recorded(graphs[0], graphs[1], graphs[2] if len(graphs) > 2 else None, {})
        return shapes

    def record_sampling(self, filters: Filters, size: int) -> Sampling:
        """Everything of one number of rows that samples, by shape."""
        drafts = None if self.drafts is None else self.drafts.record(size, filters)
        samplers = {
            shape: self.target.record([partial(self.sample_body, filters, shape)])[0]
            for shape in self.shapes(size)
        }
        return Sampling(samplers, drafts)

    def shapes(self, size: int) -> Iterator[Shape]:
        """The shapes of one number of rows, each with inputs of padding in place."""
        for width in self.speculation.captured_widths(size):
            packed = self.blank((size, width))
            self.transfers.upload(packed.ravel(), self.packed[: packed.size])
            yield size, width

    def blank(self, shape: Shape) -> np.ndarray:
        """The inputs of a step of padding, int32 [height, rows * width]."""
        packed = np.zeros((self.height, shape[0] * shape[1]), np.int32)
        packed[0] = packed[2::3] = self.slots.padding
        return packed

    # ── bodies ────────────────────────────────────────────────────────────────────────────────────────────

    def pages_body(self, shape: Shape) -> None:
        """Page updates; a draft model needs them before the target."""
        self.target.set_pages(self.inputs(shape)[2:])

    def forward_body(self, shape: Shape, *, is_adapted: bool = False) -> None:
        """From slots and drafts to hidden states."""
        rows, target = self.inputs(shape), self.target
        slots, nodes = rows[0], self.nodes(rows[0], shape)
        tokens = torch.where(nodes == 0, self.slots.last_token[slots], rows[1])
        hidden = target.hidden(slots, target.lengths[slots] + nodes, tokens, is_adapted=is_adapted)
        if self.hidden is None:
            self.hidden = torch.zeros(
                self.num_tokens, hidden.shape[1], dtype=hidden.dtype, device=hidden.device
            )
        self.hidden[: len(slots)].copy_(hidden)

    def sample_body(self, filters: Filters, shape: Shape) -> None:
        """From hidden states to tokens, and what of the drafts is accepted (layers/sampling/verify.py). The
        last token of each row becomes its slot's."""
        assert self.hidden is not None
        target, inputs = self.target, self.inputs(shape)[:2]
        slots, nodes = inputs[0], self.nodes(inputs[0], shape)
        hidden = self.hidden[: len(slots)]
        lengths = target.lengths[slots] + nodes + 1
        sampled = target.sampled(target.model.logits(hidden), slots, lengths, filters)
        self.tokens[: len(slots)].copy_(sampled)
        tokens = sampled.view(shape)
        token_slots, drafts = inputs.view(2, *shape)
        rows, padding = token_slots[:, 0], self.slots.padding
        is_right = (drafts[:, 1:] == tokens[:, :-1]) & (token_slots[:, 1:] != padding)
        num = is_right.long().cumprod(1).sum(1) + 1
        self.num_accepted[: shape[0]].copy_(num)
        last = tokens.gather(1, (num - 1).unsqueeze(1)).squeeze(1)
        self.slots.last_token.index_put_((rows,), last)
        target.lengths.index_put_((rows,), target.lengths[rows] + num * (rows != padding))
        if self.drafts is not None:
            self.drafts.keep_body(rows, num, tokens, hidden)

    def inputs(self, shape: Shape) -> Tensor:
        """int64 [height, rows * width]: slots, drafts and page updates."""
        return self.packed[: self.height * shape[0] * shape[1]].view(self.height, -1).long()

    def nodes(self, slots: Tensor, shape: Shape) -> Tensor:
        """int64 [rows * width]: each token's place in its row; 0 for padding."""
        nodes = torch.arange(len(slots), device=slots.device) % shape[1]
        return torch.where(slots != self.slots.padding, nodes, 0)
