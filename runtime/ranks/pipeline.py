"""A rank in one stage of a pipeline (messages/stages.py), between the stages before and behind it.

    plan ──► every stage                                                ┌── result ──► event loop
             first ── hidden states ──►  ...  ── hidden states ──►  last, which samples
               ▲                                                        │
               └──────────────────────────── tokens ────────────────────┘

All stages get all plans and have the same slots, page tables and lengths, and pages of their own layers. A
stage goes on to the next step when it has sent its hidden states: so stages compute different steps at a
time, if the scheduler plans steps of different sequences (scheduling/micro_batches.py). The tokens of a step
are due then. They are received before the next step that computes a slot of theirs: the first stage embeds
them; those in the middle need them only to know which drafts are accepted.

A draft model is on the last stage, which makes the drafts of a step when it has done the step before, and
sends them to the others. So in steps with such drafts one stage computes at a time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch, PageLoads
from runtime.devices.decoder_spec import Forwarded
from runtime.devices.stages import StageLinks
from runtime.layers.upload import upload_int64
from runtime.messages.ranks import StartRank
from runtime.messages.stages import Stage
from runtime.messages.steps import StepPlan
from runtime.models.config.model_config import ModelConfig
from runtime.ranks.drafting.draft_runner import DraftRunner, has_trees
from runtime.ranks.drafting.own_rows import Drafted, own_rows, with_trees
from runtime.ranks.sample_rows import SampleRows
from runtime.ranks.two_batches import with_hidden

# StepEffects.take
Take = Callable[[StepPlan, np.ndarray, SampleRows, Tensor], object]


@dataclass(frozen=True, slots=True)
class Due:
    """A step that was launched, whose tokens have not come."""

    plan: StepPlan
    starts: np.ndarray  # int64 [R]: lengths of the rows' slots before the step
    rows: SampleRows
    # moving the slots on copies within the cache, and pages may change hands with the next step
    is_urgent: bool


class PipelineStage:
    """What one rank exchanges with the other stages."""

    def __init__(
        self,
        stage: Stage,
        links: StageLinks,
        hidden_size: int,
        dtype: torch.dtype,
        torch_device: torch.device,
        in_flight: int,
        *,
        has_trees: bool = False,
        num_layers: int = 0,
    ) -> None:
        """`dtype`: of the hidden states between stages; `in_flight`: steps, at most; `has_trees`: drafts of
        the draft model are trees; `num_layers`: of the whole model."""
        self.stage = stage
        self.links = links
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.torch_device = torch_device
        self.in_flight = in_flight
        self.has_trees = has_trees
        self.num_passed = stage.num_passed_aux(num_layers)
        self.aux_places = stage.aux_places(num_layers)
        self.passed: Tensor | None = None  # [T, hidden * num_passed], of the step at hand
        self.due: deque[Due] = deque()

    @property
    def given_form(self) -> tuple[int, torch.dtype] | None:
        """Size and type of the hidden states that stand in place of embeddings; None: there are none."""
        return None if self.stage.is_first else (self.hidden_size, self.dtype)

    def settle(self, plan: StepPlan, take: Take) -> None:
        """Receives the tokens that must be known before `plan`: those of its slots, of those that other
        sequences take, and of steps so long ago that they have been sampled in any case."""
        wanted = {*plan.slots.tolist(), *(admit.slot for admit in plan.admits)}
        count = len(self.due) - self.in_flight
        for index, due in enumerate(self.due):
            if due.is_urgent or not wanted.isdisjoint(due.rows.slots.tolist()):
                count = index + 1
        for _ in range(count):
            self._receive(take)

    def settle_all(self, take: Take) -> None:
        """Receives all tokens that are due."""
        while self.due:
            self._receive(take)

    def _receive(self, take: Take) -> None:
        due = self.due.popleft()
        take(due.plan, due.starts, due.rows, self.links.receive_tokens(len(due.rows.places)))

    def send_drafts(self, plan: StepPlan, given: StepPlan, drafted: Drafted | None) -> None:
        """Sends the drafts that the last stage has made for `plan` to all others. `given`, `drafted`: as of
        DraftRunner.propose."""
        rows = own_rows(plan)
        if rows is None:
            return
        if drafted is not None:
            tokens = drafted.tokens
        else:
            parts = [given.token_ids[rows.places]]
            if self.has_trees and given.draft_parents is not None:
                parts.append(given.draft_parents[rows.places])
            tokens = upload_int64(np.concatenate(parts).astype(np.int64), self.torch_device)
        for index in range(self.stage.index):
            self.links.send_tokens(tokens, index)

    def receive_drafts(self, plan: StepPlan, take: Take) -> tuple[StepPlan, Drafted | None]:
        """As DraftRunner.propose, of drafts that the last stage makes: behind the tokens of all steps before,
        as it does so when it has sampled these."""
        rows = own_rows(plan)
        if rows is None:
            return plan, None
        self.settle_all(take)
        count = len(rows.places)
        tokens = self.links.receive_tokens(2 * count if self.has_trees else count)
        if self.has_trees:
            drafts, parents = tokens.cpu().numpy().astype(np.int32).reshape(2, count)
            return with_trees(plan, rows, drafts, parents), None
        drafted = Drafted(rows, tokens)
        return (drafted.known(plan), None) if self.torch_device.type == "cpu" else (plan, drafted)

    def given(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch, behind the first stage with the hidden states of the stage before in place of
        embeddings. What that has of `aux_layers` waits for `computed`."""
        if self.stage.is_first:
            return batch
        count, size = len(batch.token_ids), self.hidden_size
        hidden = self.links.receive_hidden((count, size * (1 + self.num_passed)), self.dtype)
        hidden, self.passed = hidden[:, :size].contiguous(), hidden[:, size:]
        return with_hidden(batch, hidden)

    def computed(self, forwarded: Forwarded) -> Forwarded:
        """What this stage has computed of the batch: behind the hidden states of a token those of the
        `aux_layers` in the stages up to this one, on the last stage in the order of `aux_layers`."""
        passed, self.passed = self.passed, None
        if passed is None or not self.stage.aux_layers:
            return forwarded
        hidden, *own = forwarded.hidden.split(self.hidden_size, dim=1)
        aux = [*passed.to(hidden.dtype).split(self.hidden_size, dim=1), *own] if self.num_passed else own
        if self.stage.is_last:
            aux = [aux[place] for place in self.aux_places]
        return Forwarded(torch.cat((hidden, *aux), dim=1), forwarded.logits)

    def pass_on(
        self, plan: StepPlan, starts: np.ndarray, rows: SampleRows, hidden: Tensor, *, is_urgent: bool
    ) -> None:
        """Sends hidden states [T, hidden * any] to the next stage. `rows`: where the last stage samples;
        `is_urgent`: accepted drafts are copied within the cache or move states on."""
        self.links.send_hidden(hidden.to(self.dtype))
        if self._wants(self.stage.index, rows):
            self.due.append(Due(plan, starts, rows, is_urgent and rows.drafts is not None))

    def return_tokens(self, rows: SampleRows, tokens: Tensor) -> None:
        """Sends what the last stage has sampled, int64 [N], to the stages that need it."""
        for index in range(self.stage.index):
            if self._wants(index, rows):
                self.links.send_tokens(tokens, index)

    def relay(self) -> None:
        """Passes on that the stages before have done what a plan without rows says; waits for them."""
        if not self.stage.is_first:
            self.links.receive_hidden((1, 1), self.dtype)
        if not self.stage.is_last:
            self.links.send_hidden(torch.zeros(1, 1, dtype=self.dtype, device=self.torch_device))

    @staticmethod
    def _wants(index: int, rows: SampleRows) -> bool:
        """Whether a stage needs the tokens of a step that samples at `rows`."""
        return len(rows.rows) > 0 and (index == 0 or rows.drafts is not None)


def with_drafts(
    drafts: DraftRunner | None,
    pipeline: PipelineStage | None,
    plan: StepPlan,
    starts: np.ndarray,
    loads: PageLoads | None,
    first_layer: int,
    take: Take,
) -> tuple[StepPlan, Drafted | None]:
    """The drafts that a plan leaves to the ranks, made here or by the last stage: see DraftRunner.propose."""
    if drafts is None:
        return (plan, None) if pipeline is None else pipeline.receive_drafts(plan, take)
    given, drafted = drafts.propose(plan, starts, loads, first_layer)
    if pipeline is not None:
        pipeline.send_drafts(plan, given, drafted)
    return given, drafted


def of_stage(config: ModelConfig, stage: Stage) -> ModelConfig:
    """The config of which memory for sequences is planned: with the recurrent layers of this stage only."""
    if config.recurrent is None or stage.count == 1:
        return config
    own = stage.layers(config.num_layers)
    kinds = config.recurrent.kinds[own.start : own.stop]
    return structs.replace(config, recurrent=structs.replace(config.recurrent, kinds=kinds))


def open_pipeline(
    device: Device, start: StartRank, config: ModelConfig, dtype: torch.dtype
) -> PipelineStage | None:
    """What this rank exchanges with other stages; None: there is one stage. Programs keep residuals in
    float32."""
    if device.links is None:
        return None
    hidden = dtype if device.programs is None else torch.float32
    speculation = start.speculation
    return PipelineStage(
        device.stage,
        device.links,
        config.hidden_size,
        hidden,
        device.torch_device,
        start.steps_in_flight,
        has_trees=speculation is not None and speculation.is_own and has_trees(speculation, device.facts),
        num_layers=config.num_layers,
    )
