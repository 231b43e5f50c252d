"""Who waits, who runs, and what they hold."""

from runtime.cache.kv import KVCache
from runtime.request import Request, Sequence
from runtime.scheduling.waiting import WaitingQueue


class Roster:
    """Every sequence that has not ended is in exactly one place: waiting (no slot, no pages), extending (its known tokens are
    not all planned) or decoding (they are). Extending and decoding sequences hold a slot and pages."""

    def __init__(self, cache: KVCache, max_running: int) -> None:
        self.cache = cache
        self.max_running = max_running
        self.waiting = WaitingQueue()
        self.extending: list[Sequence] = []
        self.decoding: list[Sequence] = []  # oldest first
        self.live: dict[int, Sequence] = {}
        self._siblings: dict[str, list[Sequence]] = {}  # by request id; a request leaves when all of its sequences have ended
        self._running: dict[str, int] = {}  # running sequences by request id
        self._free_slots = list(range(max_running - 1, -1, -1))
        self.admits_only: frozenset[str] = frozenset()  # ids of the only requests that may start to run; while empty, all may

    @property
    def num_running(self) -> int:
        return self.max_running - len(self._free_slots)

    @property
    def num_running_requests(self) -> int:
        return len(self._running)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def siblings(self, request_id: str) -> list[Sequence]:
        return self._siblings.get(request_id, [])

    def join(self, request: Request, sequences: list[Sequence]) -> None:
        """New sequences wait."""
        self._siblings[request.id] = sequences
        for sequence in sequences:
            self.live[sequence.id] = sequence
            self.waiting.add(sequence)

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could run now: its tokens are all known, and the first of its siblings has computed
        their common prompt, so that the others find it in the prefix cache, and no other request is on trial (suspects.py)."""
        if sequence.in_flight or (self.admits_only and sequence.request.id not in self.admits_only):
            return False
        first = self._siblings[sequence.request.id][0]
        return sequence is first or first.is_finished or first.is_decoding

    def start(self, sequence: Sequence) -> bool:
        """Moves a waiting sequence to the running ones. False: no room for it now.

        One page for each running sequence stays available, so that the newcomer does not make them give way at once.
        """
        use_prefix = not sequence.wants_prompt_logprobs
        if not self.cache.admit(sequence, reserve=self.num_running, use_prefix=use_prefix):
            return False
        self.waiting.remove(sequence)
        sequence.slot = self._free_slots.pop()
        self.extending.append(sequence)
        self._running[sequence.request.id] = self._running.get(sequence.request.id, 0) + 1
        return True

    def promote(self) -> None:
        """Sequences whose known tokens are all planned go on to decode."""
        if self.extending:
            self.decoding += [s for s in self.extending if s.computed_len == len(s.tokens)]
            self.extending = [s for s in self.extending if s.computed_len < len(s.tokens)]

    def youngest(self) -> Sequence:
        """The running sequence that gives way first."""
        return self.extending[-1] if self.extending else self.decoding[-1]

    def put_back(self, sequence: Sequence) -> None:
        """A running sequence gives way: its tokens stay, its keys and values are computed again later."""
        self._leave(sequence)
        self.waiting.put_back(sequence)

    def restart(self, cache: KVCache) -> set[str]:
        """The ranks died with all that they held: whoever ran waits again, oldest first, with the tokens that are known here, and no
        token is in flight. Pages are taken from the empty `cache` from now on. -> the requests that ran"""
        running, request_ids = [*self.decoding, *self.extending], set(self._running)
        for sequence in running:
            sequence.slot, sequence.pages, sequence.node = -1, [], None
            sequence.cached_len = sequence.computed_len = 0
            self.waiting.put_back(sequence)
        for sequence in self.live.values():
            sequence.in_flight = 0
        self.cache = cache
        self.extending, self.decoding, self._running = [], [], {}
        self._free_slots = list(range(self.max_running - 1, -1, -1))
        return request_ids

    def end(self, sequence: Sequence) -> None:
        sequence.is_finished = True
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        del self.live[sequence.id]
        if all(s.is_finished for s in self._siblings[sequence.request.id]):
            del self._siblings[sequence.request.id]

    def _leave(self, sequence: Sequence) -> None:
        """Gives back slot and pages. Steps in flight may still write there: they run before any step that reuses them."""
        (self.extending if sequence in self.extending else self.decoding).remove(sequence)
        self.cache.release(sequence)
        if (left := self._running.pop(sequence.request.id) - 1) > 0:
            self._running[sequence.request.id] = left
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.cached_len = sequence.computed_len = 0
