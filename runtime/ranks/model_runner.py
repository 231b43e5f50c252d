"""A rank that can take steps: makes a batch of a plan, runs the model over it, samples tokens.

Every rank of a model computes the same batch on its share of the weights; the first rank of the last stage
alone samples and reports. All ranks then accept the same drafts, and keep the lengths of their slots.
"""

from dataclasses import replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device, PageCopier
from runtime.devices.decoder_spec import Forwarded
from runtime.devices.executor import Pending
from runtime.layers.lora import LoraAdapters
from runtime.layers.sampling.logits_ops import logits_ops_of
from runtime.layers.upload import PackedUpload, upload_int64
from runtime.messages.diagnosis import NOTHING, Diagnosis
from runtime.messages.steps import Failing, StepPlan, StepResult
from runtime.models.base import CompiledLayer, Model, generative
from runtime.models.config.pooling import Pooling
from runtime.ranks.diffusion_blocks import sample_blocks
from runtime.ranks.drafting.draft_runner import DraftRunner
from runtime.ranks.encoded_media import open_media, sees_whole_images
from runtime.ranks.expert_counts import ExpertLoad
from runtime.ranks.forward import Forward
from runtime.ranks.graph_setup import NO_GRAPHS, GraphSetup
from runtime.ranks.group_rows import GroupRows
from runtime.ranks.host_slots import computes_on_host
from runtime.ranks.launched import Launched, Unreported
from runtime.ranks.layer_watch import open_watch
from runtime.ranks.open_graphs import open_graphs
from runtime.ranks.pipeline import PipelineStage, with_drafts
from runtime.ranks.pooled import pool
from runtime.ranks.prompt_logprobs import PromptRow
from runtime.ranks.recurrent_states import RecurrentStates
from runtime.ranks.replays import find_replay, launch_replay
from runtime.ranks.routed_experts import RoutedExperts
from runtime.ranks.sample_rows import SampleRows, sample_rows
from runtime.ranks.sampled import Sampled
from runtime.ranks.side_by_side import decodes_by_graph
from runtime.ranks.slots import Slots
from runtime.ranks.step_copies import LayerSaves, Reported, begin_copies, begin_saves, end_copies, unreported
from runtime.ranks.step_effects import StepEffects
from runtime.ranks.step_inputs import StepInputs
from runtime.ranks.step_logits import StepLogits
from runtime.ranks.step_report import NO_LOGPROBS, NO_TOKENS, StepReport
from runtime.ranks.transfers import Direct, Streamed, Transfers
from runtime.ranks.two_batches import first_tokens
from runtime.ranks.weight_offload import LayerOffload


class ModelRunner:
    """A rank that can take steps.

    A step is launched without its predecessor's result. The exceptions: grammars, processors and bad words of
    several tokens must know a token before the next one is sampled, and before a slot changes hands
    (`settle`); and what plans attention on the host must know how many drafts were accepted (SlotLengths).
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        slots: Slots,
        kv: list[tuple[Tensor, ...]],
        page_size: int,
        windows: tuple[int, ...],
        copies: PageCopier | None,
        pooling: Pooling | None,
        adapters: LoraAdapters | None = None,
        load: ExpertLoad | None = None,
        graph_setup: GraphSetup = NO_GRAPHS,
        compiled: CompiledLayer | None = None,
        states: RecurrentStates | None = None,
        drafts: DraftRunner | None = None,
        pipeline: PipelineStage | None = None,
        shares_media: bool = False,
        offload: LayerOffload | None = None,
        reported: Reported = unreported,
        diagnosis: Diagnosis = NOTHING,
        routed: RoutedExperts | None = None,
    ) -> None:
        """`model`: of a class in models/config/registry.py; `kv`: keys and values of each layer; `windows`:
        sliding windows of the layers; `copies`: None without a host tier; `pooling`: None for models that
        generate; `compiled`: what captures of `graph_setup` compute behind attention, None: the layers;
        `drafts`: of a draft model, None without one; `pipeline`: None: there is one stage;
        `shares_media`: this rank encodes a share of images; `offload`: of the layers whose weights are in
        host memory, None: there are none; `reported`: called when layers of computed pages were saved;
        `diagnosis`: what is looked at while it computes; `routed`: None: no experts are reported."""
        self.device = device
        self._model: Model | None = model
        self.slots = slots
        self.kv = kv
        self.page_size = page_size
        self.windows = windows
        self.copies = copies
        self.saves: LayerSaves | None = None  # of the step that is launched
        self.reported = reported
        self.part_bytes = [[cache[:page_size].nbytes for cache in caches] for caches in kv]
        self.part_bytes += (
            [] if drafts is None else [[cache[:page_size].nbytes for cache in caches] for caches in drafts.kv]
        )
        self.pooling = pooling
        self.adapters = adapters
        self.load = load
        self.routed = routed
        self.forward = Forward(device, open_watch(device, diagnosis))
        self.finds_nan = diagnosis.finds_nan
        self.logits_ops = logits_ops_of(device)
        self.states = states
        self.drafts = drafts
        self.pipeline = pipeline
        self.samples = device.group_ranks.rank == 0 and device.stage.is_last  # and reports
        self.logits = StepLogits(device, model)
        if computes_on_host(device):
            slots.open_host()
        self.media = open_media(device, model, shares=shares_media)
        is_both_ways = sees_whole_images(model)
        self.inputs = StepInputs(device, slots, kv, page_size, windows, states, self.media, is_both_ways)
        self.transfers: Transfers = Direct() if device.streams is None else Streamed(device.streams)
        pools = [layer.pool for layer in model.attentions]
        self.effects = StepEffects(slots, self.inputs, states, self.transfers, pools)
        self.graph_setup = graph_setup
        self.compiled = compiled
        self.offload = offload
        # the latest step whose tokens a grammar, a processor or bad words must know
        self.unsettled: Launched | None = None
        self.sampled_step = -1  # the latest step that has changed lengths and last tokens of slots
        self.ended_s = 0.0  # when the latest result had come
        self.graphs, self.verifies, self.piecewise = open_graphs(self)

    @property
    def model(self) -> Model:
        """The model. There is none while its weights are released, and no step is launched then."""
        assert self._model is not None, "a step while the weights are released"
        return self._model

    @model.setter
    def model(self, model: Model | None) -> None:
        """Replaces the model, or with None drops it."""
        self.forward.forget()
        self._model = model

    @property
    def all_kv(self) -> list[tuple[Tensor, ...]]:
        """Keys and values of each layer, then those of the draft model's."""
        return self.kv if self.drafts is None else self.kv + self.drafts.kv

    def launch(self, plan: StepPlan, groups: GroupRows | None = None) -> Pending:
        """Hands one step to the device, behind those launched before. `groups`: what it has of all attention
        groups; None: there is one."""
        begin = perf_counter()
        if plan.admits:
            self.settle()
        if self.pipeline is not None:
            self.pipeline.settle(plan, self.effects.take)
        self.slots.forced = {}
        page_loads = begin_copies(self.copies, plan, self.page_size)
        self.saves = begin_saves(self.copies, plan, self.part_bytes, self.reported, self.device)
        upload = PackedUpload(self.device.torch_device)
        is_adapted = self.begins_adapted(plan, groups)
        replay = find_replay(self, [plan], [self.slots.needs]) if groups is None else groups.replay
        if replay is not None:
            return launch_replay(self, replay, plan, begin, groups, is_adapted=is_adapted)
        self.slots.update(plan, upload)
        if self.slots.host is not None or self.drafts is not None or self.pipeline is not None:
            upload.send()  # what comes before the batch reads these tensors
        if self.states is not None and plan.states is not None:
            self.states.load(plan.states)
        if self.drafts is not None:
            self.drafts.admit(plan.admits)
        if len(plan.slots) == 0:
            upload.send()
            return self.finish_page_copies(plan, begin)
        starts = self.slots.lengths.starts(plan.slots)
        plan, drafted = with_drafts(
            self.drafts, self.pipeline, plan, starts, page_loads, len(self.kv), self.effects.take
        )
        rows = self.slots.pack(plan, starts, sample_rows(plan, starts), upload)
        rows = rows if drafted is None else drafted.put_rows(rows)
        batch = self.inputs.batch(plan, starts, page_loads, drafted, groups, upload)
        if self.saves is not None and batch.micro_batches is None:
            batch = replace(batch, page_saves=self.saves)
        token_ids = batch.token_ids
        if self.pipeline is not None:
            batch = self.pipeline.given(batch)
        lora_slots = self.use_adapters(plan, groups, first_tokens(batch)) if is_adapted else None
        decodes = None if self.device.partitions is None else decodes_by_graph(self.graphs, plan)
        forwarded = self.forward.compute(self.model, batch, rows.places, self.piecewise, lora_slots, decodes)
        if self.pipeline is not None:
            forwarded = self.pipeline.computed(forwarded)
        if self.states is not None and plan.states is not None:
            self.states.keep(plan.states)
        if self.load is not None:
            self.load.ended(plan)
        if self.pipeline is not None and not self.device.stage.is_last:
            return self.pass_on(plan, starts, rows, forwarded.hidden, self.pipeline)
        if self.pooling is not None:
            return pool(self, plan, starts, forwarded.hidden, self.pooling, begin)
        if plan.blocks is not None:
            return sample_blocks(self, plan, plan.blocks, starts, rows, forwarded, begin)
        prompt = self.logits.prompt(self.model, plan, forwarded.hidden, groups, self.slots, self.logits_ops)
        shown = self.shown(plan, forwarded.hidden)
        sampled = self.sample(plan, starts, rows, forwarded, groups)
        if self.drafts is not None and plan.follows:
            self.drafts.follow(plan, starts, token_ids, forwarded, sampled)
        return self.report(plan, sampled, prompt, shown, begin)

    def begins_adapted(self, plan: StepPlan, groups: GroupRows | None) -> bool:
        """Whether a sequence of the step has an adapter. What the plan changes of adapters is done; with
        groups it is already. If none has, layers add nothing."""
        if self.adapters is None:
            return False
        is_adapted = self.adapters.begin_step([plan]) if groups is None else bool(groups.adapted)
        if not is_adapted:
            self.adapters.use_tokens(None)
        return is_adapted

    def use_adapters(self, plan: StepPlan, groups: GroupRows | None, first: tuple[int, ...]) -> np.ndarray:
        """See LoraAdapters.use_plans, of a step in which some sequence has an adapter."""
        assert self.adapters is not None, "a step with adapters where there are none"
        if groups is None:
            return self.adapters.use_plans([plan], first)
        return self.adapters.use_plans(groups.adapted, groups.first)

    def sample(
        self,
        plan: StepPlan,
        starts: np.ndarray,
        rows: SampleRows,
        forwarded: Forwarded,
        groups: GroupRows | None = None,
    ) -> Sampled:
        """Samples where the plan says so, and moves the slots on: their lengths and last tokens."""
        torch_device = self.device.torch_device
        logits = self.logits.sampled(self.model, forwarded, rows.places, groups, rows.packed)
        if logits is None:
            self.effects.advance(plan, starts, rows)
            self.sampled_step = plan.step
            return Sampled(torch.empty(0, dtype=torch.int64, device=torch_device), None, rows)
        found = has_nan = None
        if self.samples:
            has_nan = logits.isnan().any(dim=1) if self.finds_nan else None
            if self.slots.follows:
                self.settle()
            tokens, found = self.slots.sample(self.device.ops, self.logits_ops, logits, rows)
        else:
            tokens = torch.empty(len(rows.places), dtype=torch.int64, device=torch_device)
        tokens = self.device.group_ranks.broadcast(tokens)
        if self.pipeline is not None:
            self.pipeline.return_tokens(rows, tokens)
        self.effects.advance(plan, starts, rows)
        accepted = self.effects.take(plan, starts, rows, tokens)
        penalties, is_accepted = self.slots.penalties, None
        if self.samples and (accepted is None or penalties.counts.rows):
            if accepted is not None and rows.drafts is not None:
                is_accepted = accepted.mask(rows.drafts, len(rows.places))
            penalties.add(rows.slots.tolist(), tokens, is_accepted)
        self.sampled_step = plan.step
        if accepted is None:
            return Sampled(tokens, found, rows, has_nan=has_nan)
        return Sampled(tokens, found, rows, accepted.num, accepted.path, has_nan)

    def pass_on(
        self, plan: StepPlan, starts: np.ndarray, rows: SampleRows, hidden: Tensor, pipeline: PipelineStage
    ) -> Pending:
        """The end of a step on a stage that does not sample: what it has computed goes to the next one."""
        end_copies(self.copies, plan, self.saves, self.transfers, self.device)
        if self.pooling is not None:
            rows = replace(rows, rows=rows.rows[:0])  # a vector follows, and no token
        is_urgent = self.states is not None or plan.draft_parents is not None
        if self.piecewise is not None:
            hidden = hidden.clone()  # the next step overwrites what graphs have computed
        pipeline.pass_on(plan, starts, rows, hidden, is_urgent=is_urgent)
        self.effects.advance(plan, starts, rows)
        self.sampled_step = plan.step
        return Unreported()

    def shown(self, plan: StepPlan, hidden: Tensor) -> list[Tensor]:
        """What the result brings of tokens: hidden states where the plan asks for them, then experts."""
        found = [] if self.routed is None else self.routed.take(plan)
        if plan.shown is None:
            return found
        rows = hidden.index_select(0, upload_int64(plan.shown, self.device.torch_device))
        return [generative(self.model).hidden_states(rows), *found]

    def report(
        self, plan: StepPlan, sampled: Sampled, prompt: list[PromptRow], shown: list[Tensor], begin: float
    ) -> Pending:
        """The result of a step that samples, whose tensors begin their way to the host."""
        end_copies(self.copies, plan, self.saves, self.transfers, self.device)
        if not self.samples:
            return Unreported()
        report = StepReport(plan, sampled, prompt, shown)
        follows, forced = self.slots.follows, self.slots.forced

        def finish(arrays: list[np.ndarray]) -> StepResult:
            brought = report.read(arrays)
            failed = self.took(plan, brought.token_ids, brought.places, brought.counts) if follows else {}
            return brought.result(plan.step, self.seconds(begin), failed, forced)

        launched = Launched(self.transfers.fetch(report.tensors()), finish)
        self.unsettled = launched if follows else None
        return launched

    def took(
        self, plan: StepPlan, token_ids: np.ndarray, places: np.ndarray, counts: np.ndarray | None
    ) -> dict[int, Failing]:
        """Tells grammars, processors and bad words what the step brings: `counts` tokens for each row that
        samples (None: one each), sampled at `places`. -> rows whose tokens mean nothing, and why"""
        slots, tokens = plan.slots[np.flatnonzero(plan.samples)].tolist(), token_ids.tolist()
        masks, processors = self.slots.grammar_masks, self.slots.processors
        if counts is None:
            masks.took(slots, tokens)
            rows = [[token] for token in tokens]
        else:
            ends = counts.cumsum().tolist()
            parts = [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
            rows = [tokens[part] for part in parts]
            for slot, part in zip(slots, parts, strict=True):
                masks.accepted(slot, places[part].tolist(), tokens[part.stop - 1])
        self.slots.penalties.token_bans.took(slots, rows)
        failed = dict.fromkeys(masks.unconstrained(slots), Failing.GRAMMAR)
        return failed | dict.fromkeys(processors.took(slots, rows), Failing.PROCESSOR)

    def settle(self) -> None:
        """Waits for the tokens of the step before, where a grammar, a processor or bad words must know
        them."""
        if self.unsettled is not None:
            self.unsettled.result()
            self.unsettled = None

    def seconds(self, begin: float) -> float:
        """What a step took that was launched at `begin` and whose result has come: the device was busy with
        the one before it until that one's result."""
        since, self.ended_s = max(begin, self.ended_s), perf_counter()
        return self.ended_s - since

    def finish_page_copies(self, plan: StepPlan, begin: float) -> Pending:
        """The end of a plan without rows, which no forward has ordered among the ranks: the result says that
        all of them are done that have these pages."""
        end_copies(self.copies, plan, self.saves, self.transfers, self.device)
        if self.pipeline is not None:
            self.pipeline.relay()
        summed = self.device.group_ranks.all_reduce(torch.zeros(1, device=self.device.torch_device))
        if not self.samples:
            return Unreported()
        return Launched(
            self.transfers.fetch([summed]),
            lambda _: StepResult(plan.step, NO_TOKENS, -1, *NO_LOGPROBS, [], self.seconds(begin)),
        )
