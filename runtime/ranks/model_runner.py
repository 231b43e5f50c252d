"""A rank that can take steps: builds a batch from a plan, runs the model over it, chooses tokens.

Every rank of a model computes the same batch on its share of the weights; rank 0 alone chooses tokens and
reports them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from time import perf_counter

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch, PageCopier, PageLoads
from runtime.devices.executor import Pending
from runtime.layers.attention.bidirectional import plan_bidirectional
from runtime.layers.lora import LoraAdapters
from runtime.layers.pooling import plan_pooling
from runtime.layers.sampling.sampler import Logprobs, clean, logprobs
from runtime.layers.upload import upload, upload_int64
from runtime.messages.ranks import Compiled
from runtime.messages.steps import Failing, PageCopies, PromptLogprobs, StepPlan, StepResult
from runtime.models.base import Model, is_generative
from runtime.models.pooling import Pooling
from runtime.ranks.decode_graphs import DecodeGraphs
from runtime.ranks.expert_counts import ExpertLoad
from runtime.ranks.piecewise_graphs import PiecewiseGraphs
from runtime.ranks.slots import Slots
from runtime.ranks.transfers import Direct, Fetched, Streamed, Transfers

PROMPT_LOGITS = 1 << 24  # most logits of a prompt held at once
NO_TOKENS = np.empty(0, np.int32)
NO_LOGPROBS = (np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Log probabilities of an extend row, on the device."""

    slot: int
    width: int
    targets: np.ndarray
    found: Logprobs

    def result(self, chosen: np.ndarray, top_ids: np.ndarray, top: np.ndarray) -> PromptLogprobs:
        return PromptLogprobs(
            self.slot,
            self.width,
            np.where(self.targets < 0, np.float32(np.nan), chosen),
            top_ids.ravel(),
            top.ravel(),
        )


class Launched:
    """A step of which the device has all it needs. Its result is made when the tensors have come, once."""

    def __init__(self, fetched: Fetched, finish: Callable[[list[np.ndarray]], StepResult]) -> None:
        self._fetched = fetched
        self._finish = finish
        self._lock = Lock()
        self._result: StepResult | None = None

    def is_done(self) -> bool:
        return self._result is not None or self._fetched.is_done()

    def result(self) -> StepResult:
        with self._lock:
            if self._result is None:
                self._result = self._finish(self._fetched.arrays())
            return self._result


class Unreported:
    """A step of a rank that says nothing of it."""

    def is_done(self) -> bool:
        return True

    def result(self) -> None:
        return None


class ModelRunner:
    """A rank that can take steps.

    A step is launched without its predecessor's result. The exception: grammars and processors must have been
    told a token before the next one is chosen, and before a slot changes hands (`settle`).
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        slots: Slots,
        kv: list[tuple[Tensor, Tensor]],
        page_size: int,
        windows: tuple[int, ...],
        copies: PageCopier | None,
        pooling: Pooling | None,
    ) -> None:
        """`model`: of a class that models/registry.py names; `copies`: where there is a host tier; `pooling`:
        of one that does not generate."""
        self.device = device
        self.model = model
        self.slots = slots
        self.kv = kv
        self.page_size = page_size
        self.windows = windows
        self.copies = copies
        self.pooling = pooling
        self.transfers: Transfers = Direct() if device.streams is None else Streamed(device.streams)
        self.graphs: DecodeGraphs | None = None
        self.pieces: PiecewiseGraphs | None = None
        self.adapters: LoraAdapters | None = None
        self.load: ExpertLoad | None = None
        self.unsettled: Launched | None = None  # the latest step whose tokens somebody must be told
        self.sampled_step = -1  # the latest step whose tokens are their slots' last ones
        self.ended_s = 0.0  # when the latest result had come

    def launch(self, plan: StepPlan) -> Pending:
        begin = perf_counter()
        if plan.admits:
            self.settle()
        self.slots.runs = {}
        arrivals = None if plan.page_copies is None else self.move(plan.page_copies)
        is_adapted = self.adapters is not None and self.adapters.begin_step(plan)
        size = None if self.graphs is None else self.graphs.size_for(plan)
        if self.graphs is not None and size is not None:
            hidden = self.graphs.forward(size, plan, is_adapted=is_adapted)
            if self.load is not None:
                self.load.ended(plan)
            shown = self.shown(plan, hidden)
            tokens = self.graphs.choose(size, plan)
            self.sampled_step = plan.step if tokens is not None else self.sampled_step
            return self.report(
                plan, *(self.sample(plan, hidden) if tokens is None else (tokens, None)), [], shown, begin
            )
        self.slots.update(plan)
        if len(plan.slots) == 0:
            return self.finish_page_copies(plan, begin)
        batch = self.batch(plan, arrivals)
        if self.adapters is not None:
            self.adapters.use_plan(plan, has_adapters=is_adapted)
        size = None if self.pieces is None or is_adapted else self.pieces.size_for(batch)
        hidden = (
            self.model.forward(batch)
            if self.pieces is None or size is None
            else self.pieces.forward(size, batch)
        )
        if self.load is not None:
            self.load.ended(plan)
        if self.pooling is not None:
            return self.pool(plan, hidden, self.pooling, begin)
        prompt = list(self.prompt_logprobs(plan, hidden))
        shown = self.shown(plan, hidden)
        tokens, found = self.sample(plan, hidden)
        return self.report(plan, tokens, found, prompt, shown, begin)

    def shown(self, plan: StepPlan, hidden: Tensor) -> list[Tensor]:
        """Hidden states that somebody wants to see."""
        return (
            []
            if plan.shown is None
            else [
                self.model.hidden_states(
                    hidden.index_select(0, upload_int64(plan.shown, self.device.torch_device))
                )
            ]
        )

    def report(
        self,
        plan: StepPlan,
        tokens: Tensor,
        found: Logprobs | None,
        prompt: list[PromptRow],
        shown: list[Tensor],
        begin: float,
    ) -> Pending:
        """The result of a step that samples, whose tensors begin their way to the host."""
        if plan.page_copies is not None and self.copies is not None:
            self.copies.finish()
        if self.device.collectives.rank != 0:
            return Unreported()
        tensors = [tokens.int(), *shown]  # a copy: the next step may write to `tokens`
        for logs in (*(row.found for row in prompt), *(() if found is None else (found,))):
            tensors += logs.chosen, logs.top_ids, logs.top
        follows = self.slots.follows
        runs = self.slots.runs if plan.shown is None else {}  # hidden states are told token by token

        def finish(arrays: list[np.ndarray]) -> StepResult:
            token_ids, *rest = arrays
            states = rest.pop(0).ravel() if shown else None
            rows = [row.result(*rest[3 * i : 3 * i + 3]) for i, row in enumerate(prompt)]
            width, values = (
                (-1, NO_LOGPROBS)
                if found is None
                else (rest[-2].shape[1], [array.ravel() for array in rest[-3:]])
            )
            failed = self.took(plan, token_ids) if follows else {}
            result = StepResult(
                plan.step, token_ids, width, *values, rows, self.seconds(begin), failed, hidden=states
            )
            return with_runs(result, runs) if runs else result

        launched = Launched(self.transfers.fetch(tensors), finish)
        self.unsettled = launched if follows else None
        return launched

    def open_graphs(
        self, sizes: list[int], piecewise_sizes: list[int], compiled: Compiled, *, pads: bool
    ) -> None:
        """Decode steps of these numbers of sequences can be captured, where the device has graphs and the
        model decodes; and what lies between the attentions of steps of so many tokens."""
        if self.device.graphs is None or not self.kv:
            return
        if sizes and self.pooling is None:
            self.graphs = DecodeGraphs(
                self.device,
                self.device.graphs,
                self.model,
                self.slots,
                self.kv,
                self.page_size,
                self.windows,
                self.transfers,
                sizes,
                pads=pads,
            )
            self.graphs.masks, self.graphs.compiles = self.load is not None, compiled.max_rows
            self.graphs.adapters = self.adapters
        if piecewise_sizes and is_generative(self.model):
            self.pieces = PiecewiseGraphs(
                self.device,
                self.device.graphs,
                self.model,
                self.slots,
                self.kv,
                self.page_size,
                self.windows,
                piecewise_sizes,
                masks=self.load is not None,
            )
            self.pieces.compiles = compiled.is_piecewise

    def settle(self) -> None:
        """Waits for the tokens of the step before, where somebody must be told them."""
        if self.unsettled is not None:
            self.unsettled.result()
            self.unsettled = None

    def seconds(self, begin: float) -> float:
        """What a step took that was launched at `begin` and whose result has come: the device was busy with
        the one before it until that one's result."""
        since, self.ended_s = max(begin, self.ended_s), perf_counter()
        return self.ended_s - since

    def pool(self, plan: StepPlan, hidden: Tensor, pooling: Pooling, begin: float) -> Pending:
        """A vector of each row that is complete, where other models sample a token."""
        rows = np.flatnonzero(plan.samples)
        picks = plan_pooling(pooling.mode, plan.counts.astype(np.int64), rows, self.device.torch_device)
        vectors = (
            self.model.pool(hidden, picks) if len(rows) else torch.empty(0, device=self.device.torch_device)
        )
        if plan.page_copies is not None and self.copies is not None:
            self.copies.finish()
        if self.device.collectives.rank != 0:
            return Unreported()
        return Launched(
            self.transfers.fetch([vectors.flatten()]),
            lambda arrays: StepResult(
                plan.step, NO_TOKENS, -1, *NO_LOGPROBS, [], self.seconds(begin), vectors=arrays[0]
            ),
        )

    def took(self, plan: StepPlan, token_ids: np.ndarray) -> dict[int, Failing]:
        """Tells grammars and processors what was sampled. -> places of tokens that mean nothing, and why"""
        slots, tokens = plan.slots[np.flatnonzero(plan.samples)].tolist(), token_ids.tolist()
        failed = dict.fromkeys(self.slots.grammar_masks.unconstrained(slots), Failing.GRAMMAR)
        self.slots.grammar_masks.took(slots, tokens)
        return failed | dict.fromkeys(self.slots.processors.took(slots, tokens), Failing.PROCESSOR)

    def move(self, page_copies: PageCopies) -> PageLoads | None:
        """Saves, and begins to load."""
        assert self.copies is not None, "moves, but no host tier"
        if len(page_copies.save_pages):
            self.copies.save(page_copies.save_pages, page_copies.save_hosts)
        return (
            self.copies.load(page_copies.load_hosts, page_copies.load_pages)
            if len(page_copies.load_pages)
            else None
        )

    def finish_page_copies(self, plan: StepPlan, begin: float) -> Pending:
        """The end of a plan without rows, which no forward has ordered among the ranks: rank 0's result says
        that all of them are done."""
        if self.copies is not None:
            self.copies.finish()
        summed = self.device.collectives.all_reduce(torch.zeros(1, device=self.device.torch_device))
        if self.device.collectives.rank != 0:
            return Unreported()
        return Launched(
            self.transfers.fetch([summed]),
            lambda _: StepResult(plan.step, NO_TOKENS, -1, *NO_LOGPROBS, [], self.seconds(begin)),
        )

    def batch(self, plan: StepPlan, arrivals: PageLoads | None) -> ForwardBatch:
        """The tokens of a step with their positions and places in the cache. Reads nothing from the
        device."""
        torch_device = self.device.torch_device
        counts = plan.counts.astype(np.int64)
        ends = counts.cumsum()
        host_positions = np.repeat(plan.starts - (ends - counts), counts)
        host_positions += np.arange(len(host_positions))
        positions = upload_int64(host_positions, torch_device)
        token_slots = upload_int64(np.repeat(plan.slots, counts), torch_device)
        token_ids = self.slots.last_token[token_slots[: plan.num_decodes]]
        if len(plan.token_ids):
            token_ids = torch.cat((token_ids, upload_int64(plan.token_ids, torch_device)))
        if not self.kv:  # an encoder
            is_second = (self.slots.second_at[plan.slots] > 0).repeat(counts)
            types = is_second & (host_positions >= self.slots.second_at[plan.slots].repeat(counts))
            return ForwardBatch(
                token_ids,
                positions,
                (),
                self.kv,
                plan_bidirectional(counts, torch_device),
                upload_int64(types, torch_device),
                arrivals,
            )
        pages = self.slots.page_tables[:, token_slots, positions // self.page_size].long()
        locations = (pages * self.page_size + positions % self.page_size).unbind()
        attention = self.device.ops.plan_attention(plan, self.slots.page_tables, self.page_size, self.windows)
        return ForwardBatch(
            token_ids,
            positions,
            locations,
            self.kv,
            attention,
            page_loads=arrivals,
            embeds=self.embeds(plan),
            is_decode=plan.num_decodes == len(plan.slots),
        )

    def embeds(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        if plan.embed_places is None or plan.embeds is None:
            return None
        rows = upload(plan.embeds.copy(), self.device.torch_device)  # a ring's arrays may be read-only
        return upload_int64(plan.embed_places, self.device.torch_device), rows.view(
            len(plan.embed_places), -1
        )

    def sample(self, plan: StepPlan, hidden: Tensor) -> tuple[Tensor, Logprobs | None]:
        """Tokens after the rows that sample, int64 [N], which also become their slots' last tokens."""
        rows, torch_device = np.flatnonzero(plan.samples), self.device.torch_device
        if len(rows) == 0:
            return torch.empty(0, dtype=torch.int64, device=torch_device), None
        if len(rows) < len(hidden):
            hidden = hidden.index_select(0, upload_int64(plan.counts.cumsum()[rows] - 1, torch_device))
        logits = self.model.logits(hidden)
        slots, lengths = plan.slots[rows], (plan.starts + plan.counts)[rows]
        index = upload_int64(slots, torch_device)
        if self.device.collectives.rank == 0:
            if self.slots.follows:
                self.settle()
            tokens, found = self.slots.sample(self.device.ops, logits, slots, lengths)
        else:
            tokens, found = torch.empty(len(rows), dtype=torch.int64, device=torch_device), None
        tokens = self.device.collectives.broadcast(tokens)
        self.slots.last_token[index] = tokens
        self.sampled_step = plan.step
        return tokens, found

    def prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> Iterator[PromptRow]:
        """Of each extend row of a slot that wants them."""
        if len(plan.prompt_targets) == 0:
            return
        first, used = plan.num_decodes, 0
        for slot, count in zip(plan.slots[first:].tolist(), plan.counts[first:].tolist(), strict=True):
            width = int(self.slots.prompt_logprobs[slot])
            if width >= 0:
                yield self.row_logprobs(
                    slot, width, hidden[first : first + count], plan.prompt_targets[used : used + count]
                )
                used += count
            first += count

    def row_logprobs(self, slot: int, width: int, hidden: Tensor, targets: np.ndarray) -> PromptRow:
        """In chunks, as the logits of a whole prompt would fill the memory."""
        known = upload_int64(np.maximum(targets, 0), self.device.torch_device)
        chunk = max(1, PROMPT_LOGITS // self.slots.vocab_size)
        parts = []
        for at in range(0, len(targets), chunk):
            logits = clean(self.model.logits(hidden[at : at + chunk]))
            found = logprobs(logits, known[at : at + chunk], width)
            if slot in self.slots.picks:
                self.slots.pick(found, logits, slice(None), slot, width)
            parts.append((found.chosen, found.top_ids, found.top))
        return PromptRow(
            slot, width, targets, Logprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        )


def with_runs(result: StepResult, runs: dict[int, list[int]]) -> StepResult:
    """The result where the rows at these places bring more tokens; nobody wants log probabilities of
    those."""
    tokens = [[token, *runs.get(index, ())] for index, token in enumerate(result.token_ids.tolist())]
    counts = np.array([len(row) for row in tokens], np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    top_ids, top = (
        values.reshape(len(counts), -1)[rows].ravel() for values in (result.top_ids, result.top_logprobs)
    )
    return structs.replace(
        result,
        token_ids=np.array([token for row in tokens for token in row], np.int32),
        num_tokens=counts,
        top_ids=top_ids,
        top_logprobs=top,
        logprobs=result.logprobs[rows] if len(result.logprobs) else result.logprobs,
    )
