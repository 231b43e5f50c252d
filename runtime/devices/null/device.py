"""The null device computes nothing: tokens come from a formula, and the time of steps from a model of it.

It is for measuring the runtime around a model, and for tests of the scheduler. Token `i` of an answer,
counted from 0, is

    first_token + (seed + prompt length + i) % num_tokens     or, with a script,     script[i % len(script)]

so an answer depends on its request only, and not on batches, chunks or preemptions. Penalties, logit bias and
stop ids have no effect: an end-of-sequence token comes only from a script. Log probabilities are zeros of the
right shape. Torch-free.
"""

import cProfile
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from pstats import Stats

import msgspec
import numpy as np

from runtime.devices.host_memory import open_host
from runtime.devices.null.options import NullOptions
from runtime.devices.null.stage_times import StageTimes
from runtime.devices.options import read_options
from runtime.devices.progress import Progress
from runtime.errors import StartError
from runtime.messages.constraint import Grammar
from runtime.messages.experts import ReadExperts
from runtime.messages.lora import LoadAdapter
from runtime.messages.media import AlignSound, Encode, EncodeRows, RowsEncoded
from runtime.messages.memory import ChangeMemory, MemoryReport, Part, UpdateWeights
from runtime.messages.ranks import (
    Captured,
    CaptureUnit,
    CountExperts,
    ExpertCounts,
    Profile,
    RankReady,
    StartRank,
)
from runtime.messages.steps import Admit, GroupSteps, PromptLogprobs, Samples, StepPlan, StepResult

DEFAULT_POOL_TOKENS = 1 << 18
HOST_PAGE_BYTES = 1 << 16  # nominal size of a host page; copies take no time
_NO_INTS = np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)


class Timed:
    """A step that is done at a given time. Steps are computed one after another, as on other devices."""

    def __init__(self, result: StepResult | ExpertCounts | None, done_s: float) -> None:
        self._result = result
        self._done_s = done_s

    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._result is None or time.perf_counter() >= self._done_s

    def result(self) -> StepResult | ExpertCounts | None:
        """The result, after the time of the step."""
        if not self.is_done():
            time.sleep(max(0.0, self._done_s - time.perf_counter()))
        return self._result


class NullExecutor:
    """One rank of the null device. It keeps for each slot what the formula needs."""

    def __init__(self, rank: int, start: StartRank, progress: Progress) -> None:
        """Raises StartError when `device_options` cannot be used."""
        begin_s = time.perf_counter()
        self._rank = rank
        self._reports = rank in start.samplers
        self._group = start.attention_layout.group_of(rank % start.tp_size)
        self._released: tuple[Part, ...] = ()
        self._recording: tuple[str, cProfile.Profile] | None = None  # folder of the profile, and the profile
        self._times = StageTimes(start.pp_size, start.max_slots)
        self._free_s = 0.0  # when the steps launched so far are done
        self._options = _read_options(start)
        options = self._options
        self._script = np.array(options.script, np.int32)
        self._offsets = np.zeros(start.max_slots, np.int64)  # index of a token = its position - offset
        self._prompt_lens = np.zeros(start.max_slots, np.int64)
        self._lengths = np.zeros(start.max_slots, np.int64)  # as every rank has them: messages/steps.py
        self._widths = np.full(start.max_slots, -1, np.int32)
        self._prompt_widths = np.full(start.max_slots, -1, np.int32)
        progress("device", 1, 1)
        num_pages = _num_pages(start)
        # its memory is never touched
        host = open_host(start, self._rank, num_pages, (HOST_PAGE_BYTES,), sys.maxsize)
        self.ready = RankReady(
            rank=self._rank,
            num_pages=1 + num_pages,
            weights_bytes=0,
            pages_bytes=0,
            device_name="null",
            phases_s={"start": time.perf_counter() - begin_s},
            num_host_pages=host.num_pages if host else 0,
            host_part_bytes=(HOST_PAGE_BYTES,) if host else (),
        )

    def launch(self, plan: StepPlan) -> "Timed":
        """See Executor.launch."""
        begin_s = time.perf_counter()
        options = self._options
        if plan.step == options.fail_at_step:
            raise RuntimeError(f"asked to fail at step {plan.step}")
        for admit in plan.admits:
            self._admit(admit)
        if options.poison_token is not None and options.poison_token in self._computed(plan):
            _poison(options.poison)
        starts = self._lengths[plan.slots]
        num_tokens = self._accept(plan, starts) if plan.num_verifies else None
        result = self._result(plan, starts, num_tokens, begin_s) if self._reports else None
        self._lengths[plan.slots] = starts + self._advances(plan, num_tokens)
        duration_s = options.step_s
        if options.token_s:
            duration_s += options.token_s * int(plan.counts.sum())
        if duration_s:
            since_s = max(begin_s, self._free_s)
            self._free_s = self._times.add(plan, begin_s, duration_s)
            result = result and msgspec.structs.replace(result, compute_s=self._free_s - since_s)
        return Timed(result, self._free_s)

    def launch_group(self, step: GroupSteps) -> "Timed":
        """See Executor.launch_group."""
        plan = step.plans[self._group]
        return Timed(None, self._free_s) if plan is None else self.launch(plan)

    def count_experts(self, command: CountExperts) -> "Timed":
        """Counts of no layers: there are no experts."""
        return Timed(
            ExpertCounts(command.id, (), np.empty(0, np.int64), 0) if self._reports else None, self._free_s
        )

    def read_experts(self, command: ReadExperts) -> Callable[[], None]:
        """Reads nothing: there are no experts."""
        return lambda: None

    def move_experts(self) -> None:
        """Moves nothing: there are no experts."""

    def encode(self, command: Encode) -> None:
        """Encodes nothing."""

    def encode_rows(self, command: EncodeRows | AlignSound) -> RowsEncoded:
        """Encodes nothing."""
        rows = np.empty(0, np.float32)
        return RowsEncoded(id=command.id, rows=rows, error="the null device encodes nothing")

    def capture(self, size: int, unit: CaptureUnit = "sequences") -> Captured:
        """Succeeds without doing anything."""
        return Captured(size, 0.0, 0, "", unit)

    def prepare_grammar(self, grammar: Grammar | None, done: Callable[[], None]) -> None:
        """Compiles nothing: answers follow no grammar (--grammar-backend is none)."""
        done()

    def profile(self, command: Profile) -> None:
        """Profiles the Python code of the rank, with cProfile."""
        if self._recording is not None and not command.folder:
            folder, recorded = self._recording
            recorded.disable()
            Path(folder).mkdir(parents=True, exist_ok=True)
            with open(Path(folder) / f"rank-{self._rank}.txt", "w", encoding="utf-8") as file:
                Stats(recorded, stream=file).sort_stats("cumulative").print_stats()
        self._recording = (command.folder, cProfile.Profile()) if command.folder else None
        if self._recording is not None:
            self._recording[1].enable()

    def load_adapter(self, command: LoadAdapter) -> None:
        """Does nothing: adapters change no tokens."""

    def change_memory(self, command: ChangeMemory) -> MemoryReport:
        """Releases nothing, but reports the parts as released."""
        self._released = command.released
        return MemoryReport(command.id, self._rank, self._released, 0, 0, 0, "")

    def update_weights(self, command: UpdateWeights) -> MemoryReport:
        """Changes nothing: there are no weights."""
        return MemoryReport(command.id, self._rank, self._released, 0, 0, 0, "")

    def close(self) -> None:
        """Does nothing."""

    def _admit(self, admit: Admit) -> None:
        slot, sampling = admit.slot, admit.sampling
        self._prompt_lens[slot] = admit.prompt_len
        self._lengths[slot] = admit.length
        self._offsets[slot] = (
            admit.prompt_len if self._script.size else -(sampling.seed % self._options.num_tokens)
        )
        picks = len(sampling.logprob_ids)
        self._widths[slot] = sampling.top_logprobs + picks if sampling.top_logprobs >= 0 else -1
        self._prompt_widths[slot] = sampling.prompt_logprobs + picks if sampling.prompt_logprobs >= 0 else -1

    def _computed(self, plan: StepPlan) -> np.ndarray:
        """The tokens that go into the forward pass: the last ones sampled in the slots that decode or verify,
        drafts, and those of prompts."""
        slots = plan.slots[: plan.num_decodes + plan.num_verifies]
        return np.concatenate((self._tokens(self._lengths[slots] - self._offsets[slots]), plan.token_ids))

    def _accept(self, plan: StepPlan, starts: np.ndarray) -> np.ndarray:
        """int32: how many tokens each row brings that samples."""
        num_tokens = np.ones(len(plan.slots), np.int32)
        at = 0
        for row in range(plan.num_decodes, plan.num_decodes + plan.num_verifies):
            drafts = slice(at, at + int(plan.counts[row]) - 1)
            at = drafts.stop
            if plan.samples[row] != Samples.ALL:
                continue
            tokens = plan.token_ids[drafts].tolist()
            parents = (
                list(range(len(tokens)))
                if plan.draft_parents is None
                else plan.draft_parents[drafts].tolist()
            )
            wanted = self._tokens(starts[row] + 1 + np.arange(len(tokens)) - self._offsets[plan.slots[row]])
            node = 0  # the latest that was accepted
            for token in wanted.tolist():
                children = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == token]
                if not children:
                    break
                node = children[0] + 1
                num_tokens[row] += 1
        return num_tokens[plan.samples > 0]

    def _advances(self, plan: StepPlan, num_tokens: np.ndarray | None) -> np.ndarray:
        """By how many tokens each row's slot grows."""
        if num_tokens is None:
            return plan.counts
        counts, is_all = plan.counts.copy(), plan.samples == Samples.ALL
        counts[is_all] = num_tokens[is_all[plan.samples > 0]]
        return counts

    def _tokens(self, indices: np.ndarray) -> np.ndarray:
        if self._script.size:
            return self._script[indices % self._script.size]
        return (indices % self._options.num_tokens + self._options.first_token).astype(np.int32)

    def _result(
        self, plan: StepPlan, starts: np.ndarray, num_tokens: np.ndarray | None, begin_s: float
    ) -> StepResult:
        rows = plan.samples.nonzero()[0]
        slots = plan.slots[rows]
        indices = starts[rows] + plan.counts[rows] - self._offsets[slots]
        if num_tokens is not None:
            is_all = plan.samples[rows] == Samples.ALL
            indices[is_all] = starts[rows][is_all] + 1 - self._offsets[slots][is_all]
            begins = num_tokens.cumsum() - num_tokens
            indices = np.repeat(indices - begins, num_tokens) + np.arange(num_tokens.sum())
        tokens = self._tokens(indices)
        width = int(self._widths[slots].max(initial=-1))
        logprobs, top_ids, top_logprobs = _logprobs(tokens.size, width)
        prompt = self._prompt_logprobs(plan) if plan.prompt_targets.size else []
        return StepResult(
            plan.step,
            tokens,
            width,
            logprobs,
            top_ids,
            top_logprobs,
            prompt,
            time.perf_counter() - begin_s,
            num_tokens=num_tokens,
        )

    def _prompt_logprobs(self, plan: StepPlan) -> list[PromptLogprobs]:
        results = []
        begin = 0
        for row in range(plan.num_decodes + plan.num_verifies, plan.slots.size):
            slot, count = int(plan.slots[row]), int(plan.counts[row])
            width = int(self._prompt_widths[slot])
            if width < 0:
                continue
            logprobs, top_ids, top_logprobs = _logprobs(count, width)
            logprobs[plan.prompt_targets[begin : begin + count] < 0] = np.nan
            results.append(PromptLogprobs(slot, width, logprobs, top_ids, top_logprobs))
            begin += count
        return results


def _poison(kind: str) -> None:
    match kind:
        case "raise":
            raise RuntimeError("asked to fail at this token")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()


def _logprobs(num_tokens: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log probabilities of tokens [N], and alternatives with theirs [N * width]; all empty when `width` is
    -1."""
    if width < 0:
        return _NO_FLOATS, _NO_INTS, _NO_FLOATS
    top_ids = np.tile(np.arange(width, dtype=np.int32), num_tokens)
    return np.zeros(num_tokens, np.float32), top_ids, np.zeros(num_tokens * width, np.float32)


def _num_pages(start: StartRank) -> int:
    """Pages without the padding page: no more of those that were asked for than sequences can use."""
    default = DEFAULT_POOL_TOKENS // start.page_size
    if start.max_total_tokens is None:
        return default
    usable = start.max_slots * -(-start.max_len // start.page_size)
    return min(start.max_total_tokens // start.page_size, max(usable, default))


def _read_options(start: StartRank) -> NullOptions:
    options = read_options(start, NullOptions)
    vocab = options.vocab_size
    if any(token >= vocab for token in options.script):
        raise StartError(f"the null device's script names a token outside 0..{vocab - 1}")
    if options.first_token + options.num_tokens <= vocab:
        return options
    return msgspec.structs.replace(options, first_token=0, num_tokens=min(options.num_tokens, vocab))


def open_executor(rank: int, start: StartRank, progress: Progress) -> NullExecutor:
    """Starts one rank. Raises StartError when the device's options cannot be used."""
    return NullExecutor(rank, start, progress)
