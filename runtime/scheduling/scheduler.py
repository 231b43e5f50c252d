"""What runs next: a pure state machine from requests and step results to step plans.

Knows nothing of tasks, channels, rings or torch. The actor around it (actors/scheduler.py) calls `add`,
`abort` and `end` as messages come, `plan` when a step may be submitted, `apply` when a step's result is
there. Results come in the order of the plans. Several plans may be in flight: a plan counts on tokens that it
has not seen. When the ranks die it calls `lose_ranks`, and `resume` when there are new ones; everything else
may be called in between.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from msgspec import Struct, structs

from runtime.cache.journal import Journal
from runtime.cache.kv import CacheConfig, KVCache
from runtime.cache.sequence import Sequence
from runtime.messages.media import Encode
from runtime.messages.requests import FinishReason, Request
from runtime.messages.scheduler import Ended, Refused, StepTokens
from runtime.messages.steps import Failing, StepPlan, StepResult
from runtime.scheduling import logprobs
from runtime.scheduling.admission import Admission
from runtime.scheduling.deadlines import Deadlines, Limit
from runtime.scheduling.diffusion.algorithms import Diffusion
from runtime.scheduling.drafts import Drafter
from runtime.scheduling.encodings import EncodingConfig, Encodings, charge, encoded_for
from runtime.scheduling.flight import Flight
from runtime.scheduling.lora_slots import LoraSlotConfig
from runtime.scheduling.micro_batches import MicroBatches
from runtime.scheduling.planner import Planner
from runtime.scheduling.recovery import GivenUp, Lost, Recovery
from runtime.scheduling.result_tokens import ResultTokens
from runtime.scheduling.roster import Roster
from runtime.scheduling.waiting import OrderConfig

TIME_IS_UP = {
    True: "the request waited too long for its turn; try again later",
    False: "the request's time was up before its first token; try again later",
}


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """What the scheduler must know of the options and of the ranks."""

    max_running: int  # slots
    max_step_tokens: int  # known tokens that one step may compute
    max_len: int  # longest sequence in tokens
    page_size: int
    num_pages: int  # of the smallest rank, padding page included
    eos_ids: tuple[int, ...]
    cache: CacheConfig = CacheConfig()
    order: OrderConfig = OrderConfig()
    micro_batches: MicroBatches = MicroBatches()  # of a pipeline of stages
    admission: Admission | None = None  # None: nothing but max_step_tokens
    pools: bool = False  # the model makes a vector of a prompt, and no tokens
    conservativeness: float = 1.0
    reserved_tokens: int = 0  # kept free for each running sequence at least, if it may take them
    limit: Limit = Limit()  # in time
    lora_slots: LoraSlotConfig = LoraSlotConfig()  # of adapters
    encodings: EncodingConfig | None = None  # of images and sounds; None: the model takes text alone
    diffusion: Diffusion | None = None  # None: the model samples one token after the other
    replica: int = 0  # index of this scheduler's replica
    num_replicas: int = 1  # sequence ids are unique across replicas: id % num_replicas is the replica's index

    @property
    def pool_tokens(self) -> int:
        """Tokens that all pages hold."""
        return (self.num_pages - 1) * self.page_size


def empty_cache(config: SchedulerConfig, journal: Journal | None) -> KVCache:
    """A cache without content, which writes to `journal`."""
    cache = KVCache(config.num_pages, config.page_size, config.cache)
    cache.tree.journal = journal
    if journal is not None:
        journal.cleared()
    return cache


def by_sequence(sequences: list[Sequence], numbers: np.ndarray) -> dict[int, np.ndarray]:
    """The vectors of a step's complete rows, by sequence id."""
    return (
        {s.id: vector for s, vector in zip(sequences, numbers.reshape(len(sequences), -1), strict=True)}
        if sequences
        else {}
    )


class Scheduler:
    """Sequences on their way: waiting -> extending -> decoding -> ended."""

    def __init__(
        self,
        config: SchedulerConfig,
        journal: Journal | None = None,
        on_delayed: Callable[[str, int, float], None] = lambda reason, steps, seconds: None,
        drafter: Drafter | None = None,
    ) -> None:
        """`journal` records what enters and leaves the prefix cache; `on_delayed` is called for each delay
        that the prefill delayer ends: reason, steps, seconds; `drafter` proposes tokens to verify."""
        self.config = config
        self.journal = journal
        self.roster = Roster(
            empty_cache(config, journal),
            config.max_running,
            config.order,
            config.conservativeness,
            config.reserved_tokens,
            config.lora_slots,
        )
        self.generated_tokens = 0
        self.num_ended = 0  # sequences
        self._prompts = logprobs.PromptCollector()
        admission = config.admission or Admission(max_step_tokens=config.max_step_tokens)
        self.planner = Planner(
            self.roster,
            self._prompts,
            admission=admission,
            eos_ids=config.eos_ids,
            on_delayed=on_delayed,
            drafter=drafter,
            micro_batches=config.micro_batches,
            encodings=None if config.encodings is None else Encodings(config.encodings),
            diffusion=config.diffusion,
        )
        self.results = ResultTokens(self.planner.drafts, self._end)
        self.early: list[StepTokens] = []  # tokens that came without a step, until their clients get them
        self.totals = self.planner.totals
        self.deadlines = Deadlines(config.limit)
        self.timeouts = {"queue": 0, "total": 0}  # requests that ended by the clock
        self.last_step = 0  # the latest whose result was taken in
        self.is_paused = False  # no steps are planned (pausing.py)
        self.is_suspended = False  # the same: the ranks' memory changes, or is given back
        self.recovery = Recovery(self.planner)
        self.flights: deque[Flight] = deque()
        self._ended: list[Ended] = []  # ended between results; they leave with the next StepTokens
        # requests that a step failed for, until their clients are informed
        self.failed: list[tuple[GivenUp, Failing]] = []
        self._next_id = config.replica

    @property
    def cache(self) -> KVCache:
        """The KV cache of the running ranks."""
        return self.roster.cache

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and whose results have not come."""
        return len(self.flights)

    def add(self, request: Request) -> list[int]:
        """Queues the request's `n` sequences. -> their ids"""
        params = request.params
        longest = self.longest(request)
        stop_ids = frozenset(
            params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self.config.eos_ids)
        )
        stride, diffusion = self.config.num_replicas, self.config.diffusion
        size = 1 if diffusion is None else diffusion.size
        sequences = [
            Sequence(self._next_id + i * stride, request, i, longest, stop_ids, size) for i in range(params.n)
        ]
        self._next_id += params.n * stride
        self.roster.join(request, sequences)
        for sequence in sequences:
            self.planner.drafts.add(sequence)
        self.deadlines.add(request)
        return [s.id for s in sequences]

    def abort(self, request_id: str) -> None:
        """Ends all sequences of a request; what they hold is free for the next plan. Unknown requests are
        ignored."""
        for sequence in list(self.roster.siblings(request_id)):
            if not sequence.is_finished:
                self._end(sequence, FinishReason.ABORT, None, self._ended)

    def expire(self, now_s: float) -> list[tuple[Refused, list[int]]]:
        """Ends requests whose time is up. Those without a token are refused (-> with their sequences' ids);
        the others end with what they have, as if aborted."""
        refused: list[tuple[Refused, list[int]]] = []
        for request_id, is_queue in self.deadlines.due(now_s):
            siblings = self.roster.siblings(request_id)
            if not siblings or (
                is_queue and any(s.first_cached_len >= 0 or s.num_generated for s in siblings)
            ):
                continue
            self.timeouts["queue" if is_queue else "total"] += 1
            if any(s.num_generated for s in siblings):
                self.abort(request_id)
            else:
                ids = [s.id for s in siblings if not s.is_finished]
                refused.append((Refused(request_id, 503, TIME_IS_UP[is_queue]), ids))
                self.end(ids)
        return refused

    def end(self, sequence_ids: list[int]) -> None:
        """Ends sequences whose text is complete (a stop string was found). Unknown ids have ended already."""
        for sequence_id in sequence_ids:
            if (sequence := self.roster.live.get(sequence_id)) is not None:
                self._end(sequence, FinishReason.STOP, None, [])

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute now."""
        if self.is_paused or self.is_suspended:
            return None
        if self.roster.waiting.admits_only and not self.recovery.isolate(self.flights):
            return None
        planned = self.planner.plan()
        if planned is None:
            return None
        plan, flight = planned
        self.flights.append(flight)
        return plan

    def apply(self, result: StepResult) -> StepTokens:
        """Takes in the result of the oldest step in flight. -> its tokens, and the sequences that have
        ended"""
        flight = self.flights.popleft()
        assert flight.step == result.step, f"result of step {result.step} where {flight.step} was due"
        _learn(self.planner, flight, result)
        self.last_step = flight.step
        if self.cache.host.is_on:
            self.cache.host.confirm(flight.step)
        ended = self.take_ended()
        if result.vectors is not None:  # of a model that pools: its sequences end with them
            for sequence in flight.sampled:
                sequence.in_flight -= 1
                if not sequence.is_finished:
                    self._end(sequence, FinishReason.STOP, None, ended)
            vectors = by_sequence(flight.sampled, result.vectors)
            return StepTokens([], [], ended, {}, {}, vectors=vectors, encoded=encoded_for(flight.sampled))
        prompts = self._prompts.take(result.prompt, flight.prompt_parts) if result.prompt else {}
        hidden = {} if result.hidden is None else self.planner.hidden.take(result.hidden, flight.shown)
        for row, failing in result.failed.items():
            if not flight.sampled[row].is_finished:
                self.failed.append((self._give_up(flight.sampled[row].request.id), failing))
        experts = {} if result.experts is None else self.planner.experts.take(result.experts, flight.routed)
        step = StepTokens([], [], ended, {}, prompts, hidden=hidden, experts=experts)
        if self.config.diffusion is not None:
            self.results.take_blocks(flight, result, step, self.config.diffusion)
        elif flight.verified or result.num_tokens is not None:
            self.results.take_verified(flight, result, step)
        else:
            self.results.take(flight, result, step)
        self.totals.add_verified(step.verified.values())
        if self.recovery.marks:
            self.recovery.advance(flight.sampled)
        self.generated_tokens += len(step.token_ids) + sum(map(len, step.more.values()))
        return step

    def lose_ranks(self, *, points_at_requests: bool = True, is_alone: bool = True) -> Lost:
        """The ranks died with all pages: running sequences wait again and will get the tokens that they would
        have got. A guilty request ends; with `points_at_requests` False none is, whatever was in flight.
        `is_alone`: no other scheduler had requests in flight on these ranks."""
        guilty = self.recovery.died(self.flights, is_alone=is_alone) if points_at_requests else None
        num_steps = sum(bool(flight.computed) for flight in self.flights)
        self.flights.clear()
        self._prompts.clear()
        self.planner.hidden.clear()
        self.planner.experts.clear()
        if self.planner.encodings is not None:
            self.planner.encodings.forget(is_lost=True)
        recovered = self.roster.restart() - {guilty}
        return Lost(num_steps, len(recovered), None if guilty is None else self._give_up(guilty))

    def resume(
        self,
        num_pages: int,
        num_host_pages: int = 0,
        num_window_pages: int = 0,
        num_state_slots: int = 0,
        num_host_states: int = 0,
    ) -> list[GivenUp]:
        """New ranks have come; they hold as many host pages as the old ones, with what was there, or start
        with empty ones. -> requests whose prompts they have no room for, which end; others may end earlier
        than before"""
        cache = self.config.cache
        if (num_host_pages, num_window_pages, num_state_slots, num_host_states) == (
            cache.host.num_pages,
            cache.window.num_pages,
            cache.states.num_slots,
            cache.host.num_states,
        ):
            self.cache.resume(num_pages)
        else:
            cache = structs.replace(
                cache,
                host=structs.replace(cache.host, num_pages=num_host_pages, num_states=num_host_states),
                window=structs.replace(cache.window, num_pages=num_window_pages),
                states=structs.replace(cache.states, num_slots=num_state_slots),
            )
            self.config = structs.replace(self.config, cache=cache)
            self.cache.tree.is_closed = True
            self.roster.cache = empty_cache(structs.replace(self.config, num_pages=num_pages), self.journal)
            self.roster.waiting.restart(self.cache.tree)
        if num_pages == self.config.num_pages:
            return []
        self.config = structs.replace(self.config, num_pages=num_pages)
        refused: dict[str, None] = {}
        for sequence in list(self.roster.live.values()):
            sequence.max_len = self.longest(sequence.request)
            if len(sequence.tokens) < sequence.max_len:
                continue
            if sequence.num_generated:
                self._end(sequence, FinishReason.LENGTH, None, self._ended)
            else:
                refused[sequence.request.id] = None
        return [self._give_up(request_id) for request_id in refused]

    def take_admitted(self) -> list[int]:
        """Ids of sequences that were admitted for the first time since the last call."""
        admitted, self.planner.admitted = self.planner.admitted, []
        return admitted

    def take_ended(self) -> list[Ended]:
        """Sequences that ended since the last result."""
        ended, self._ended = self._ended, []
        return ended

    def longest(self, request: Request) -> int:
        """Tokens that a sequence of it may have, prompt included."""
        longest = min(self.config.max_len, self.config.pool_tokens)
        new = 0 if self.config.pools else request.params.max_new_tokens
        return longest if new is None else min(longest, len(request.prompt_ids) + new)

    def _give_up(self, request_id: str) -> GivenUp:
        sequences = [s for s in self.roster.siblings(request_id) if not s.is_finished]
        for sequence in sequences:
            self._end(sequence, FinishReason.ABORT, None, [])
        return GivenUp(request_id, [s.id for s in sequences])

    def _end(self, sequence: Sequence, reason: FinishReason, matched: int | None, ended: list[Ended]) -> None:
        self._prompts.drop(sequence)
        self.planner.drop_reports(sequence)
        self.recovery.drop(sequence)
        self.planner.drafts.ended(sequence)
        self.roster.end(sequence)
        self.num_ended += 1
        ended.append(
            Ended(sequence.id, reason, matched, max(sequence.first_cached_len, 0), sequence.first_sources)
        )


def encode_for_step(scheduler: Scheduler, plan: StepPlan | None) -> Encode | None:
    """What the ranks encode before the step that was planned last, or free without one; None: nothing."""
    encodings = scheduler.planner.encodings
    if encodings is None or scheduler.is_suspended:
        return None
    return encodings.take_dropped() if plan is None else encodings.take_command()


def _learn(planner: Planner, flight: Flight, result: StepResult) -> None:
    """The step's seconds tell what later ones will take: chunks, drafts and encodings."""
    if flight.work is not None and planner.chunking is not None and not flight.encoded:
        planner.chunking.learn(flight.work, result.compute_s)
    if flight.num_drafts is not None and not flight.encoded:
        planner.drafts.learn(len(flight.computed), flight.num_drafts, result.compute_s)
    else:
        planner.drafts.passed(result.compute_s)
    if flight.encoded:
        charge(flight.encoded, result.encode_s)
        if planner.encodings is not None:
            planner.encodings.costs.learn(flight.encoded, result.encode_s)
