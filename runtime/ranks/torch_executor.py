"""The Executor of all torch devices: passes each plan to the model runner, and commands to what they are for.
ranks/start.py makes what it is constructed with."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from runtime import log
from runtime.devices.executor import Pending
from runtime.devices.profiles import Recording
from runtime.messages.constraint import Grammar
from runtime.messages.experts import ReadExperts
from runtime.messages.lora import LoadAdapter
from runtime.messages.media import AlignSound, Encode, EncodeRows, RowsEncoded
from runtime.messages.memory import ChangeMemory, MemoryReport, UpdateWeights
from runtime.messages.ranks import Captured, CaptureUnit, CountExperts, Profile
from runtime.messages.steps import GroupSteps, StepPlan
from runtime.models.vision.slices import finish
from runtime.ranks.align import align
from runtime.ranks.encode_clock import EncodeClock
from runtime.ranks.encoded_media import encoder_of
from runtime.ranks.expert_placer import ExpertPlacer
from runtime.ranks.group_rows import group_rows, padding_plan
from runtime.ranks.launched import Unreported
from runtime.ranks.memory_saver import drop_graphs
from runtime.ranks.profiler import TorchRecording
from runtime.ranks.replays import GroupReplays, launch_idle
from runtime.ranks.start import StartedRank

NO_ROWS = np.empty(0, np.float32)


class TorchExecutor:
    """One rank on one torch device."""

    def __init__(self, started: StartedRank) -> None:
        self.rank, self.num_ranks = started.ready.rank, started.num_ranks
        self.ready = started.ready
        self.runner = started.runner
        self.memory_saver = started.memory_saver
        self.expert_placer = ExpertPlacer(started.memory_saver)
        self.trace_folder = started.trace_folder
        self.record_profile = self.runner.device.record_profile or TorchRecording
        self.recording: Recording | None = None
        self.encode_clock = EncodeClock(self.runner.device.streams)
        attention = self.runner.device.attention
        self.group_replays = (
            GroupReplays(self.runner, attention.layout.num_groups, attention.index)
            if attention is not None and self.runner.device.has_groups
            else None
        )

    def launch(self, plan: StepPlan) -> Pending:
        """See Executor.launch. A step for which there is no memory is tried again when unused memory has been
        returned, if that is still possible."""
        with torch.inference_mode():
            try:
                return self.encode_clock.with_time(self.runner.launch(plan))
            except torch.OutOfMemoryError:
                is_changed = self.runner.sampled_step == plan.step or self.runner.states is not None
                if is_changed or self.num_ranks > 1:
                    raise  # tokens were sampled or states moved on, or other ranks wait in a collective
                log.get("ranks").warning(
                    "no memory for a step; unused memory is freed, and it is launched again",
                    step=plan.step,
                    exc_info=True,
                )
            self.runner.device.memory.empty_cache()
            if self.runner.load is not None:
                self.runner.load.step.zero_()  # counts of the failed launch
            return self.encode_clock.with_time(self.runner.launch(plan))

    def launch_group(self, step: GroupSteps) -> Pending:
        """See Executor.launch_group."""
        runner = self.runner
        assert self.group_replays is not None, "a step of groups where there are none"
        group, drafts = self.group_replays.own, runner.drafts
        drafts_trees = drafts is not None and drafts.branches > 1
        replay, pending = self.group_replays.find(step), cast(Pending, Unreported())
        is_adapted = runner.adapters is not None and runner.adapters.begin_step(step.plans)
        # a plan without rows copies pages: its group computes padding, if another one computes anything
        computing = GroupSteps(
            step.step, [None if plan is None or not len(plan.slots) else plan for plan in step.plans]
        )
        groups = group_rows(computing, runner.device.overlap, drafts_trees=drafts_trees)
        padding = [padding_plan(step.step, runner.slots.padding, count) for count in groups.tokens]
        plans = [own or idle for own, idle in zip(computing.plans, padding, strict=True)]
        groups = replace(groups, replay=replay, adapted=tuple(plans) if is_adapted else ())
        plan = step.plans[group]
        with torch.inference_mode():
            if computing.plans[group] is not None and plan is not None:
                return self.encode_clock.with_time(runner.launch(plan, groups))
            if plan is not None:
                pending = runner.launch(plan, replace(groups, replay=None))
            if replay is not None:
                launch_idle(runner, replay, step.step, groups)
            elif any(plan is not None for plan in computing.plans):
                runner.launch(padding[group], groups)
                runner.slots.lengths.admit([runner.slots.padding], [0])  # as graphs find it
        return pending

    def encode(self, command: Encode) -> None:
        """See Executor.encode."""
        media, encoder = self.runner.media, encoder_of(self.runner.model)
        if media is None or encoder is None:
            return
        with torch.inference_mode():
            if not command.media and not command.until:
                return media.encode(command, encoder)
            with self.encode_clock.running():
                media.encode(command, encoder)

    def encode_rows(self, command: EncodeRows | AlignSound) -> RowsEncoded:
        """See Executor.encode_rows."""
        if isinstance(command, AlignSound):
            return align(self.runner.device, self.runner.model, self.runner.media, command)
        encoder = encoder_of(self.runner.model)
        assert encoder is not None, "an encoder server has an encoder"
        media = command.media
        try:
            with torch.inference_mode():
                rows = finish(encoder.slices([media]))[0].float().cpu()
        except (RuntimeError, ValueError, IndexError) as error:  # of an input of another shape
            log.get("ranks").warning("an input could not be encoded", shape=media.shape, exc_info=True)
            fault = f"an input of shape {media.shape} can't be encoded ({type(error).__name__})"
            return RowsEncoded(id=command.id, rows=NO_ROWS, error=fault)
        return RowsEncoded(id=command.id, rows=rows.numpy().ravel(), num_rows=len(rows))

    def capture(self, size: int, unit: CaptureUnit = "sequences") -> Captured:
        """See Executor.capture."""
        runner = self.runner
        graphs = {"sequences": runner.graphs, "verifies": runner.verifies, "tokens": runner.piecewise}[unit]
        if graphs is None:
            return Captured(size, 0.0, 0, f"{self.ready.device_name} captures no steps of this model", unit)
        if self.runner.adapters is not None:
            self.runner.adapters.use_slots(None)  # the adapters of the latest step are no part of a graph
        with torch.inference_mode():
            if not self.trace_folder or self.recording is not None:  # torch has one profiler
                return graphs.capture(size)
            return self.traced(lambda: graphs.capture(size), f"{self.trace_folder}/{size}-{unit}")

    def traced(self, capture: Callable[[], Captured], folder: str) -> Captured:
        """Captures under a profiler. A trace that cannot be written is logged."""
        recording = self.record_profile(Profile(folder=folder), self.rank)
        captured = capture()
        try:
            recording.write()
        except OSError:
            log.get("graphs").warning(
                "the trace of a capture could not be written", folder=folder, exc_info=True
            )
        else:
            log.get("graphs").info("a capture was traced", folder=folder, rank=self.rank)
        return captured

    def prepare_grammar(self, grammar: Grammar | None, done: Callable[[], None]) -> None:
        """See Executor.prepare_grammar."""
        self.runner.slots.grammar_masks.prepare(grammar, done)

    def profile(self, command: Profile) -> None:
        """See Executor.profile."""
        if self.recording is not None and not command.folder:
            self.recording.write()
        self.recording = self.record_profile(command, self.rank) if command.folder else None

    def load_adapter(self, command: LoadAdapter) -> None:
        """See Executor.load_adapter."""
        assert self.runner.adapters is not None, "an adapter where there are none"
        with torch.inference_mode():
            self.runner.adapters.load(command.id, command.folder)

    def count_experts(self, command: CountExperts) -> Pending:
        """See Executor.count_experts."""
        assert self.runner.load is not None, "expert counts where nothing is counted"
        with torch.inference_mode():
            return self.runner.load.serve(command, self.runner.transfers)

    def read_experts(self, command: ReadExperts) -> Callable[[], None]:
        """See Executor.read_experts."""
        return self.expert_placer.reading(command.layers)

    def move_experts(self) -> None:
        """See Executor.move_experts."""
        with torch.inference_mode():
            self.expert_placer.move()

    def change_memory(self, command: ChangeMemory) -> MemoryReport:
        """See Executor.change_memory."""
        return self.memory_saver.change_memory(command)

    def update_weights(self, command: UpdateWeights) -> MemoryReport:
        """See Executor.update_weights."""
        return self.memory_saver.update_weights(command)

    def close(self) -> None:
        """See Executor.close."""
        if self.runner.copies is not None:
            self.runner.copies.close()
        drop_graphs(self.runner)  # NCCL ends its communicator when no captured graph holds it any more
        self.runner.device.collectives.close()
