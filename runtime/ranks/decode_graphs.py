"""Decode steps as graphs: captured once for a number of sequences, replayed with one copy to the device and
no other work of the host.

    part of a step                                where it runs
    page updates, embedding, layers               the forward graph, from static inputs to hidden states;
                                                  with LoRA adapters there is one with and one without them
    head, argmax, last tokens and lengths         the greedy graph, when all rows are plain and greedy
    head, sampling, last tokens and lengths       a sampling graph, when all are plain and some random: the
                                                  first of DeviceFacts.captured_samplers with the filters that
                                                  these rows need
    the same with penalties, biases and banned    a graph of its own, on devices with a fused penalty kernel
      stop ids
    layers, beside prompts of the same step       a forward graph on a partition of the device, where it has
                                                  some (side_by_side.py)
    head, then other samplers, log probabilities, launched kernel by kernel after the forward graph
      other penalties, many biases, banned words, (ModelRunner.sample)
      processors, grammars
    drafts                                        verify_graphs.py
    prompts, pages from host memory,              no graph here: the step is launched kernel by kernel,
      admits, encoders, pooling models            or in piecewise graphs

Recurrent layers find their states by the slots. States are copied outside of graphs, behind them.

Inputs are slots and page updates, packed into one array, int32 [1 + 3 * pools, size]. Everything else,
positions included, is device state of the slots. Rows up to the size are padding: they belong to a slot that
no sequence has, whose pages are the padding page, so they write there, and their tokens are dropped.

All ranks of a model must take the same way for the same plan, or their collectives would not match: the
choice is a function of plans and of what was captured, and a capture counts only if it succeeded on every
rank.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from runtime import log
from runtime.devices.base import Device
from runtime.devices.facts import ANY_K
from runtime.devices.rendezvous import Stranded
from runtime.devices.step_graphs import Graph
from runtime.devices.streams import Stream
from runtime.messages.ranks import Capture, Captured
from runtime.messages.steps import StepPlan
from runtime.ranks.captured_forward import CapturedForward
from runtime.ranks.transfers import Transfers

T = TypeVar("T")
ANY_FILTERS = (ANY_K, True)  # samples whatever the rows ask for
FEW = 8  # a step of fewer rows may be padded up to so many


@dataclass(frozen=True, slots=True)
class Recorded:
    """The graphs captured for one number of rows."""

    forward: Graph
    adapted: Graph | None  # the same for rows with adapters; None: there are none
    divided: Graph | None  # the same on a partition, beside prompts; None: there is none (side_by_side.py)
    greedy: Graph | None  # None: it is sampled outside of graphs
    penalised: Graph | None  # samples with penalties; None: this device applies penalties outside of graphs
    seen: Tensor  # what it looks at
    # by what they filter, in the order of DeviceFacts.captured_samplers; a step that none fits samplers
    # outside
    samplers: dict[tuple[int, bool], Graph]


def attempt(device: Device, request: Capture, record: Callable[[int], T]) -> tuple[Captured, T | None]:
    """What became of it on all ranks, and what was recorded if it came off on each."""
    begin, free_bytes = perf_counter(), device.memory.free_bytes()
    recorded, error = None, ""
    try:
        recorded = record(request.size)
        torch.zeros(1, device=device.torch_device).item()  # it may still wait for another rank in an exchange
    except RuntimeError as failure:  # out of memory is one
        log.get("graphs").exception(
            "a step could not be captured", size=request.size, unit=request.unit, exc_info=True
        )
        error = (
            f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else 'no reason given'}"
        )
    try:
        outcomes = device.collectives.outcomes(error)
    except Stranded as fault:
        return Captured(request.size, perf_counter() - begin, 0, str(fault), request.unit, True), None
    if any(outcomes):
        recorded, error = None, error or f"another rank could not ({next(filter(None, outcomes))})"
    num_bytes = max(0, free_bytes - device.memory.free_bytes())
    return Captured(request.size, perf_counter() - begin, num_bytes, error, request.unit), recorded


def is_capturable(plan: StepPlan) -> bool:
    """Whether all rows of a plan decode, and nothing but a graph has work for it before."""
    return (
        0 < plan.num_decodes == len(plan.slots)
        and not plan.admits
        # what is kept of states is copied behind the graph
        and (plan.states is None or not len(plan.states.slots))
        and bool(plan.samples.all())
        and (plan.page_copies is None or not len(plan.page_copies.load_pages))
    )


def page_updates(plan: StepPlan) -> int:
    """Page updates of a plan, in the pool that has the most."""
    return max(len(plan.page_ids), 0 if plan.window is None else len(plan.window.ids))


class DecodeGraphs:
    """The graphs of a rank, and the static tensors that they read and write."""

    def __init__(
        self,
        target: CapturedForward,
        transfers: Transfers,
        sizes: Sequence[int],
        *,
        pads: bool,
        samples: bool = True,
    ) -> None:
        """`sizes`: all that may be captured; without `pads` a graph serves exactly its number of sequences.
        Without `samples` tokens are sampled outside of graphs."""
        self.target = target
        self.device = device = target.device
        self.graphs = target.graphs
        self.slots = slots = target.slots
        self.states = target.states
        self.transfers = transfers
        self.pads = pads
        # elsewhere all rows would pay for penalties in several launches
        self.samples = samples
        self.penalises = samples and device.fused is not None
        if self.penalises:
            slots.penalties.reserve(slots.padding)
        # those that could be captured until now
        self.samplers = list(device.facts.captured_samplers) if samples else []
        self.recorded: dict[int, Recorded] = {}
        self.ready: list[int] = []  # the sizes in it, rising
        self.largest = max(sizes)
        self.width = 1 + target.num_updates
        self.packed = torch.zeros(self.width * self.largest, dtype=torch.int32, device=device.torch_device)
        self.tokens = torch.zeros(self.largest, dtype=torch.int64, device=device.torch_device)
        self.hidden: Tensor | None = None  # [largest, hidden], from the first capture on

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────

    def size_for(self, plans: Sequence[StepPlan]) -> int | None:
        """The size whose forward graph computes a step of these plans, one of each attention group; None: it
        must be launched one by one."""
        if not self.ready or not all(map(is_capturable, plans)):
            return None
        count = max(plan.num_decodes for plan in plans)
        at = bisect_left(self.ready, count)
        if at == len(self.ready):
            return None
        size = self.ready[at]
        is_fit = size <= self.most_rows(count) and all(page_updates(plan) <= size for plan in plans)
        return size if is_fit else None

    def most_rows(self, count: int) -> int:
        """Rows of the largest graph that serves `count` sequences."""
        if not self.pads:
            return count
        return self.largest if self.device.facts.pads_graphs_freely else max(2 * count, FEW)

    def size_divided(self, plan: StepPlan) -> int | None:
        """The size whose graph on a partition computes the decode rows of a plan beside its prompts, the
        plan's page updates being done; None: they must be launched one by one."""
        at = bisect_left(self.ready, plan.num_decodes)
        size = self.ready[at] if plan.num_verifies == 0 < plan.num_decodes and at < len(self.ready) else 0
        is_fit = 0 < size <= self.most_rows(plan.num_decodes)
        return size if is_fit and self.recorded[size].divided is not None else None

    def forward(
        self, size: int, plan: StepPlan, *, is_adapted: bool = False, is_divided: bool = False
    ) -> Tensor:
        """Hidden states of the plan's rows, which the next step overwrites. `is_divided`: by the graph of
        `size_divided`, on the current stream."""
        assert self.hidden is not None
        count = len(plan.slots)
        packed = self.blank(size)
        packed[0, :count] = plan.slots
        pages = slice(len(plan.page_ids))
        packed[1, pages], packed[2, pages], packed[3, pages] = plan.page_slots, plan.page_rows, plan.page_ids
        if (window := plan.window) is not None:
            pages = slice(len(window.ids))
            packed[4, pages], packed[5, pages], packed[6, pages] = window.slots, window.rows, window.ids
        self.transfers.upload(packed.ravel(), self.packed[: self.width * size])
        recorded = self.recorded[size]
        lengths: np.ndarray | tuple[()] = ()
        if self.graphs.reads_lengths:
            lengths = np.ones(size, np.int32)
            lengths[:count] += self.slots.lengths.starts(plan.slots).astype(np.int32)
        graph = recorded.adapted if is_adapted else recorded.divided if is_divided else recorded.forward
        assert graph is not None, "a step with adapters, or beside prompts, where there are none"
        self.graphs.replay(graph, lengths)
        if self.states is not None and plan.states is not None:
            self.states.keep(plan.states)
        return self.hidden[:count]

    def sample(self, size: int, plan: StepPlan) -> Tensor | None:
        """Tokens after the forward graph, int64 [rows], which the next step overwrites; slots move on. None:
        they must be sampled outside of graphs."""
        slots, recorded = self.slots, self.recorded[size]
        if not (self.samples and slots.needs.is_plain[plan.slots].all()):
            return None
        graph: Graph | None = recorded.greedy
        if slots.needs.is_penalised[plan.slots].any():
            # more are penalised than it knows
            graph = recorded.penalised if recorded.seen is slots.penalties.counts.generated else None
        elif slots.needs.is_random[plan.slots].any():
            largest_k, has_top_p = slots.needs.filters(plan.slots)
            graph = next(
                (graph for (k, p), graph in recorded.samplers.items() if k >= largest_k and p >= has_top_p),
                None,
            )
        if graph is None:
            return None
        self.graphs.replay(graph, ())
        return self.tokens[: len(plan.slots)]

    # ── captures ──────────────────────────────────────────────────────────────────────────────────────────

    def capture(self, size: int) -> Captured:
        """Graphs of one more size. One that cannot be captured leaves everything as it was; a sampler that
        cannot be is left outside from now on."""
        self.transfers.upload(self.blank(size).ravel(), self.packed[: self.width * size])
        bodies: dict[str, Callable[[int], None]] = {"forward": self.forward_body}
        if self.samples:
            bodies["greedy"] = partial(self.sample_body, None)
        if self.target.adapters is not None:
            bodies["adapted"] = partial(self.forward_body, is_adapted=True)
        captured, recorded = attempt(self.device, Capture(size), partial(self.record, list(bodies.values())))
        if recorded is None:
            return captured
        graphs = dict(zip(bodies, recorded, strict=True))
        samplers, divided, penalised = {}, None, None
        for filters in self.samplers:
            captured, sampler = self.record_more(captured, partial(self.sample_body, filters))
            if captured.is_fatal:
                return captured
            if sampler is not None:
                samplers[filters] = sampler
        self.samplers = list(samplers)
        if self.penalises and ANY_FILTERS in samplers:
            body = partial(self.sample_body, ANY_FILTERS, penalises=True)
            captured, penalised = self.record_more(captured, body)
        if self.device.partitions is not None and not captured.is_fatal:
            stream = self.device.partitions.of(size).decodes
            captured, divided = self.record_more(captured, self.forward_body, stream)
        if captured.is_fatal:
            return captured
        self.recorded[size] = Recorded(
            graphs["forward"],
            graphs.get("adapted"),
            divided,
            graphs.get("greedy"),
            penalised,
            self.slots.penalties.counts.generated,
            samplers,
        )
        self.ready = sorted(self.recorded)
        return captured

    def record(
        self, bodies: Sequence[Callable[[int], None]], size: int, stream: Stream | None = None
    ) -> list[Graph]:
        """The graph of each body; see CapturedForward.record."""
        return self.target.record([partial(body, size) for body in bodies], stream)

    def record_more(
        self, captured: Captured, body: Callable[[int], None], stream: Stream | None = None
    ) -> tuple[Captured, Graph | None]:
        """One more graph of the size of `captured`. -> what became of both, and the graph; None: it cannot be
        captured."""
        record = partial(self.record, [body], stream=stream)
        more, recorded = attempt(self.device, Capture(captured.size), record)
        if more.is_fatal:
            return more, None
        both = structs.replace(
            captured, seconds=captured.seconds + more.seconds, num_bytes=captured.num_bytes + more.num_bytes
        )
        return both, None if recorded is None else recorded[0]

    def blank(self, size: int) -> np.ndarray:
        """The inputs of a step of padding: it sets the padding slot's first page to the padding page, which
        it is already."""
        packed = np.zeros((self.width, size), np.int32)
        packed[0] = packed[1::3] = self.slots.padding
        return packed

    # ── bodies ────────────────────────────────────────────────────────────────────────────────────────────

    def forward_body(self, size: int, *, is_adapted: bool = False) -> None:
        """From packed inputs to hidden states. Reads nothing on the host but `size`."""
        packed = self.packed[: self.width * size].view(self.width, size)
        hidden = self.target.hidden_of(self.target.begin_decodes(packed), is_adapted=is_adapted)
        if self.hidden is None:
            self.hidden = torch.zeros(self.largest, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        self.hidden[:size].copy_(hidden)

    def sample_body(self, filters: tuple[int, bool] | None, size: int, *, penalises: bool = False) -> None:
        """From hidden states to tokens, which become their slots' last ones, and one more in the slots'
        lengths. Arguments as of CapturedForward.sampled."""
        assert self.hidden is not None
        target, slots = self.target, self.inputs(size)[0]
        positions = target.lengths[slots]
        hidden = self.hidden[:size]
        if filters is None and not penalises:
            tokens = target.greedy(hidden, slots, positions + 1)
        else:
            logits = target.model.logits(hidden)
            tokens = target.sampled(logits, slots, positions + 1, filters, penalises=penalises)
        self.tokens[:size].copy_(tokens)
        self.slots.last_token.index_put_((slots,), tokens)
        target.lengths.index_put_((slots,), positions + (slots != self.slots.padding))

    def inputs(self, size: int) -> Tensor:
        """int64 [1 + 3 * pools, size]: slots, and page updates."""
        return self.packed[: self.width * size].view(self.width, size).long()
