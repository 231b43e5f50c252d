"""All sequences that have not ended: which wait, which run, and the slots and pages that they hold."""

from bisect import insort

from runtime.cache.kv import KVCache
from runtime.cache.sequence import Sequence
from runtime.cache.window import WindowPool
from runtime.messages.requests import Request
from runtime.scheduling.forecast import Forecast
from runtime.scheduling.lora_slots import LoraSlotConfig, LoraSlots
from runtime.scheduling.order import Now
from runtime.scheduling.shares import Shares
from runtime.scheduling.waiting import OrderConfig, WaitingQueue


def precedence(sequence: Sequence) -> tuple[int, int]:
    """A sort key: sequences with the larger key are preempted first; by level, then by age."""
    return sequence.level, sequence.id


class Roster:
    """Every sequence that has not ended is in exactly one place: waiting (no slot, no pages), extending (its
    known tokens are not all planned) or decoding (they are). Extending and decoding sequences hold a slot and
    pages."""

    def __init__(
        self,
        cache: KVCache,
        max_running: int,
        order: OrderConfig | None = None,
        conservativeness: float = 1.0,
        reserved_tokens: int = 0,
        lora_slots: LoraSlotConfig | None = None,
    ) -> None:
        self.cache = cache
        self.max_running = max_running
        self.order = order or OrderConfig()
        self.forecast = Forecast(conservativeness, reserved_tokens)
        self.lora_slots = LoraSlots(lora_slots or LoraSlotConfig())  # of adapters
        self.shares = Shares(is_on=self.order.fair, weights=self.order.weights)
        self.extending: list[Sequence] = []  # in order of admission
        self.decoding: list[Sequence] = []  # by precedence
        self.live: dict[int, Sequence] = {}
        # sequences by request id; a request leaves when all of its sequences have ended
        self.requests: dict[str, list[Sequence]] = {}
        self._running: dict[str, int] = {}  # running sequences by request id
        self._running_keys: dict[str, int] = {}  # running sequences by routing key
        self.waiting = WaitingQueue(self.order, Now(cache.tree, self._running_keys), self.shares)
        # tokens that running sequences are expected to generate; None: not counted yet
        self._future: int | None = None
        self._landing: list[Sequence] = []  # preempted with tokens in flight
        self.has_levels = self.order.has_priorities  # a running sequence may be preempted for a waiting one
        self.num_left = 0  # how often a sequence has given back its slot and pages
        self.num_shown = 0  # running sequences whose hidden states or experts are reported
        self._free_slots = list(range(max_running - 1, -1, -1))

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return self.max_running - len(self._free_slots)

    @property
    def num_running_requests(self) -> int:
        """Requests with running sequences."""
        return len(self._running)

    @property
    def has_free_slot(self) -> bool:
        """Whether another sequence could run."""
        return bool(self._free_slots)

    def siblings(self, request_id: str) -> list[Sequence]:
        """All sequences of a request; none when they have ended."""
        return self.requests.get(request_id, [])

    def join(self, request: Request, sequences: list[Sequence]) -> None:
        """New sequences wait. All but the first do so until it has computed their common prompt, to find it
        in the prefix cache."""
        self.requests[request.id] = sequences
        self.has_levels |= request.is_idle
        self.shares.join(request.tenant, len(sequences))
        for sequence in sequences:
            self.live[sequence.id] = sequence
            sequence.level = self.order.level(request.priority, is_idle=request.is_idle)
            (self.waiting.add_suspended if sequence.index else self.waiting.add)(sequence)

    def follow(self, first: Sequence) -> None:
        """The first of siblings has computed their prompt, or has ended: the others take their turn."""
        for sequence in self.requests[first.request.id][1:]:
            if self.waiting.holds(sequence) and sequence not in self._landing:
                self.waiting.add(sequence)

    def begin(self) -> None:
        """A step is about to be planned. Preempted sequences are queued again when no token of theirs is in
        flight."""
        self.forecast.step()
        self._future = None
        if self._landing:
            for sequence in self._landing:
                if not sequence.in_flight and not sequence.is_finished:
                    self.waiting.add(sequence, is_new=False)
            self._landing = [s for s in self._landing if s.in_flight and not s.is_finished]

    def has_room(self, newcomer: Sequence) -> bool:
        """Whether `newcomer` can start now, such that the tokens that the forecast expects of it and of
        running sequences find room as well."""
        if not self._free_slots:
            return False
        if self.cache.window is not None and not has_window_room(self.cache.window, newcomer, self):
            return False
        if self.cache.states is not None and not self.cache.states.has_room:
            return False
        spare = self.cache.num_available - self.cache.missing(newcomer)
        count = self.num_running
        if spare < count:  # a page for each: no sequence is preempted at once
            return False
        if self._future is None:
            self._future = sum([self.forecast.future(s) for s in (*self.extending, *self.decoding)])
        if (
            not count
            or self._future + self.forecast.future(newcomer) <= (spare - count) * self.cache.page_size
        ):
            return True  # even if no sequence ended meanwhile
        return (
            self.forecast.peak((*self.extending, *self.decoding, newcomer))
            <= (spare - count) * self.cache.page_size
        )

    def start(self, sequence: Sequence) -> None:
        """Starts the head of the queue, for which there is room."""
        self.cache.admit(sequence, use_prefix=not sequence.is_whole)
        request = sequence.request
        if self._future is not None:
            self._future += self.forecast.future(sequence)
        self.waiting.take(sequence)
        if request.adapter is not None or self.lora_slots.waiting:
            self.lora_slots.acquire(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.unfollowed = 0
        self.extending.append(sequence)
        self.num_shown += request.params.reports_tokens
        self._running[request.id] = self._running.get(request.id, 0) + 1
        if request.routing_key:
            self._running_keys[request.routing_key] = self._running_keys.get(request.routing_key, 0) + 1

    def promote(self) -> None:
        """Sequences whose known tokens are all planned go on to decode."""
        if self.extending:
            for sequence in self.extending:
                if sequence.computed_len == sequence.extend_len:
                    insort(self.decoding, sequence, key=precedence)
                    self.shares.start(sequence.request.tenant)
            self.extending = [s for s in self.extending if s.computed_len < s.extend_len]

    def last(self) -> Sequence:
        """The running sequence that is preempted first."""
        if not self.extending:
            return self.decoding[-1]
        worst = max(self.extending, key=precedence)
        return max(worst, self.decoding[-1], key=precedence) if self.decoding else worst

    def put_back(self, sequence: Sequence) -> None:
        """Preempts a running sequence: its tokens stay, its keys and values are computed again later."""
        self._leave(sequence)
        self.waiting.add_suspended(sequence)
        self._landing.append(sequence)

    def restart(self) -> set[str]:
        """The ranks died: all running sequences wait again, oldest first, with the tokens that are known
        here, and no token is in flight. -> ids of the requests that ran"""
        running, request_ids = [*self.decoding, *self.extending], set(self._running)
        for sequence in self.decoding:
            self.shares.stop(sequence.request.tenant)
        for sequence in self.live.values():
            sequence.in_flight, sequence.drafting, sequence.match = 0, 0, None
        for sequence in running:
            sequence.slot, sequence.pages, sequence.node, sequence.window, sequence.state = (
                -1,
                [],
                None,
                None,
                None,
            )
            sequence.cached_len = sequence.loaded_len = sequence.computed_len = 0
        for sequence in sorted([*running, *(s for s in self._landing if not s.is_finished)], key=precedence):
            self.waiting.add(sequence, is_new=False)
        self.cache.lose_device()
        self.waiting.restart(self.cache.tree)
        self.extending, self.decoding, self._running, self._landing, self.num_shown = [], [], {}, [], 0
        self._running_keys.clear()
        self.lora_slots.restart()
        self._future = None
        self.num_left += len(running)
        self._free_slots = list(range(self.max_running - 1, -1, -1))
        return request_ids

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended: it gives back what it holds, and leaves."""
        sequence.is_finished = True
        self.forecast.ended(sequence.num_generated, sequence.max_len - sequence.prompt_len)
        self.shares.leave(sequence.request.tenant)
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        del self.live[sequence.id]
        if sequence.request.adapter is not None:
            self.lora_slots.ended(sequence.request.adapter.id, self.live.values())
        siblings = self.requests[sequence.request.id]
        if all(s.is_finished for s in siblings):
            del self.requests[sequence.request.id]
        elif not sequence.index and not sequence.is_decoding:
            self.follow(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Gives back slot and pages. Steps in flight may still write to the pages: they run before any step
        that reuses these."""
        if sequence in self.extending:
            self.extending.remove(sequence)
        else:
            self.decoding.remove(sequence)
            self.shares.stop(sequence.request.tenant)
        self.cache.release(sequence)
        self.num_left += 1
        self._future = None
        request = sequence.request
        self.num_shown -= request.params.reports_tokens
        if request.adapter is not None:
            self.lora_slots.leave(sequence)
        for counts, key in ((self._running, request.id), (self._running_keys, request.routing_key)):
            if key in counts:
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.cached_len = sequence.loaded_len = sequence.computed_len = 0


def has_window_room(window: WindowPool, newcomer: Sequence, roster: Roster) -> bool:
    """Whether `newcomer` can be computed with what the windows' pool has: prompts that are under way get what
    they will hold at most, so that they never wait for one another; the windows of those that decode fill up
    as the forecast says."""
    need = window.most(len(newcomer.tokens) + 1)
    wants = [window.most(len(s.tokens) + 1) for s in roster.extending]
    if need + sum(wants) > window.pool.num_pages:
        return False
    promised = sum(
        max(want - len(s.window.pages), 0)
        for want, s in zip(wants, roster.extending, strict=True)
        if s.window is not None  # each has one where the model has a window
    )
    growing = [s for s in roster.decoding if len(s.tokens) < window.config.window]
    to_come = sum(min(roster.forecast.future(s), window.config.window - len(s.tokens)) for s in growing)
    return window.num_available >= need + promised + len(growing) + to_come // window.page_size
