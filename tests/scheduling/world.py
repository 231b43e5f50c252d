"""A scheduler, the oracle rank and what clients have seen, for tests that drive whole schedules."""

from collections import Counter, deque

from runtime.cache.audit import findings
from runtime.cache.host import HostConfig
from runtime.cache.journal import Journal
from runtime.cache.kv import CacheConfig
from runtime.cache.pool_sizes import least_pages
from runtime.cache.sequence import Sequence
from runtime.cache.states import StateConfig, StatePool
from runtime.cache.window import WindowConfig, WindowPool
from runtime.messages.requests import FinishReason, Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import StepTokens
from runtime.scheduling.drafts import Drafter
from runtime.scheduling.recovery import Lost
from runtime.scheduling.roster import Roster
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.cache.router import Router
from tests.cache.walk import listen
from tests.scheduling.answers import generate, generate_blocks
from tests.scheduling.oracle import OracleRank
from tests.scheduling.storing import Shelf

EOS = 7


class World:
    """A scheduler, a rank and what the clients have seen."""

    def __init__(
        self,
        *,
        depth: int = 2,
        num_pages: int = 12,
        page_size: int = 4,
        max_running: int = 4,
        chunk: int = 16,
        shares: bool = True,
        max_len: int = 200,
        eviction: str = "lru",
        num_host_pages: int = 0,
        write_policy: str = "write_through",
        saves_in_step: bool = False,
        window: int = 0,
        spare_window_pages: int = 0,
        num_states: int = 0,
        interval: int = 0,
        draft_nodes: int = 0,
        num_host_states: int = 0,
        longest_run: int = 1,
        drafter: Drafter | None = None,
        **more: object,
    ) -> None:
        num_window_pages = 1 + least_pages(window, page_size, 1) + spare_window_pages if window else 0
        cache = CacheConfig(
            shares=shares,
            eviction=eviction,
            host=HostConfig(
                num_pages=num_host_pages,
                write_policy=write_policy,
                has_storage=not window,
                num_states=num_host_states,
                saves_in_step=saves_in_step,
            ),
            states=StateConfig(
                num_slots=num_states + 1 if num_states else 0,
                interval=interval * page_size,
                shares=shares,
                draft_nodes=draft_nodes,
            ),
            window=WindowConfig(num_pages=num_window_pages, window=window, step_tokens=chunk),
        )
        self.config = SchedulerConfig(
            max_running=max_running,
            max_step_tokens=chunk,
            max_len=max_len,
            page_size=page_size,
            num_pages=num_pages,
            eos_ids=(EOS,),
            cache=cache,
            **more,
        )
        self.scheduler = Scheduler(self.config, Journal(page_size), drafter=drafter)
        self.router = Router()
        self.rank = OracleRank(
            num_pages,
            page_size,
            max_running,
            num_host_pages=num_host_pages,
            num_window_pages=num_window_pages,
            window=window,
            num_state_slots=cache.states.num_slots,
            num_host_states=num_host_states,
            longest_run=longest_run,
        )
        self.scheduler.roster.start = self._start  # type: ignore[method-assign]
        self.shelf = Shelf(self.scheduler)
        self.depth = depth
        self.results: deque = deque()
        self.seen: dict[int, list[int]] = {}
        self.ends: Counter[int] = Counter()
        self.reasons: dict[int, FinishReason] = {}
        self.prompts: dict[int, list] = {}
        self.requests: dict[int, Request] = {}
        self.failed: set[int] = set()  # given up after a death of the ranks
        self.quiet: set[int] = set()  # ended by the detokenizer: the scheduler says nothing more

    def _start(self, sequence: Sequence) -> None:
        """Admission takes what it said it would."""
        cache = self.scheduler.cache
        missing, available = cache.missing(sequence), cache.num_available
        Roster.start(self.scheduler.roster, sequence)
        assert cache.num_available == available - missing

    def add(
        self,
        prompt: list[int],
        *,
        priority: int | None = None,
        tenant: str = "",
        routing_key: str = "",
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        namespace: str = "",
        is_idle: bool = False,
        prediction: list[int] | None = None,
        **params: object,
    ) -> list[int]:
        request = Request(
            id=f"r{len(self.requests)}",
            prompt_ids=prompt,
            params=SamplingParams(**params),
            seed=1,
            arrival_s=0,
            priority=priority,
            tenant=tenant,
            routing_key=routing_key,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            namespace=namespace,
            is_idle=is_idle,
            prediction=prediction or [],
        )
        ids = self.scheduler.add(request)
        for i in ids:
            self.seen[i] = []
            self.requests[i] = request
        return ids

    def die(
        self,
        num_pages: int | None = None,
        num_host_pages: int | None = None,
        more_window_pages: int = 0,
        more_states: int = 0,
    ) -> Lost:
        """The ranks die with the steps in flight, and come again with nothing in their pages. Host memory
        outlives them if it has the same size."""
        num_pages = num_pages or self.config.num_pages
        host = self.rank.host
        num_host_pages = len(host) if num_host_pages is None else num_host_pages
        self.rank.die(self.scheduler.last_step)
        lost = self.scheduler.lose_ranks()
        window = self.config.cache.window
        num_window_pages = window.num_pages + more_window_pages
        num_states = self.config.cache.states.num_slots + more_states
        host_states = self.rank.host_states
        refused = self.scheduler.resume(
            num_pages, num_host_pages, num_window_pages, num_states, len(host_states)
        )
        self.config = self.scheduler.config
        self.results.clear()
        self.rank = OracleRank(
            num_pages,
            self.config.page_size,
            self.config.max_running,
            step=self.scheduler.totals.steps,
            num_host_pages=num_host_pages,
            num_window_pages=num_window_pages,
            window=self.rank.window,
            num_state_slots=num_states,
            num_host_states=len(host_states),
            longest_run=self.rank.longest_run,
        )
        self.rank.host_states = host_states
        if num_host_pages == len(host):
            self.rank.host = host
        for given_up in (lost.guilty, *refused):
            for i in given_up.sequence_ids if given_up else ():
                self.ends[i] += 1
                self.failed.add(i)
        return lost

    def submit(self) -> bool:
        if len(self.results) >= self.depth or (plan := self.scheduler.plan()) is None:
            return False
        self.check_bounds()
        self.results.append(self.rank.execute(plan))
        return True

    def check_bounds(self) -> None:
        """Pages are there for the most that the steps in flight may compute, and for no more than a sequence
        may have."""
        cache = self.scheduler.cache
        for sequence in self.scheduler.roster.decoding:
            most = sequence.computed_len + sequence.drafting
            assert most < sequence.max_len or most == len(sequence.tokens)
            assert cache.pages_for(most) <= len(sequence.pages) <= cache.pages_for(sequence.max_len)

    def receive(self) -> None:
        self.take(self.scheduler.apply(self.results.popleft()))

    def take(self, step: StepTokens) -> None:
        for i, token in zip(step.sequence_ids, step.token_ids, strict=True):
            assert not self.ends[i] and i not in self.quiet
            self.seen[i] += [token, *step.more.get(i, ())]
        self.prompts |= step.prompt_logprobs
        for end in step.ended:
            self.ends[end.sequence_id] += 1
            self.reasons[end.sequence_id] = end.reason

    def run(self) -> None:
        for _ in range(10_000):
            while self.submit():
                pass
            if not self.results:
                break
            self.receive()
        self.take(StepTokens([], [], self.scheduler.take_ended(), {}, {}))
        self.check_idle()

    def expected(self, i: int) -> list[int]:
        request = self.requests[i]
        params = request.params
        stop = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        longest = min(self.config.max_len, self.config.pool_tokens)
        if params.max_new_tokens:
            longest = min(longest, len(request.prompt_ids) + params.max_new_tokens)
        if self.config.diffusion is not None:
            return generate_blocks(request.prompt_ids, self.config.diffusion, stop, longest)
        return generate(request.prompt_ids, stop, longest)

    def check_pages(self) -> None:
        """No page is owned twice, none is lost."""
        cache = self.scheduler.cache
        owned = Counter(cache.pool._free)
        hosts = Counter(cache.tree.hosts._free) + self.shelf.hosts
        assert all(root.children or root.locks for name, root in cache.tree.roots.items() if name)
        nodes, evictable = list(cache.tree.roots.values()), 0
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            assert node.num_device_children == sum(child.page > 0 for child in node.children.values())
            assert node.num_host_children == sum(child.host > 0 for child in node.children.values())
            assert node.pins == self.shelf.num_pins(node), "between plans nothing else is pinned"
            if node.parent is not None:
                assert node.page or node.host
                assert node.page or not (node.num_device_children or node.locks), (
                    "what is on the device is closed towards the root"
                )
                assert node.parent.locks >= node.locks
                if node.page:
                    owned[node.page] += 1
                    evictable += node.locks == 0
                if node.host:
                    hosts[node.host] += 1
        for sequence in self.scheduler.roster.live.values():
            if sequence.node is not None:
                assert sequence.node.path() == sequence.pages[: sequence.node.depth]
                owned.update(sequence.pages[sequence.node.depth :])
        assert findings(cache, self.scheduler.roster.live.values()).messages == []
        assert owned == Counter(range(1, self.config.num_pages))
        assert hosts == Counter(range(1, len(self.rank.host)))
        assert evictable == cache.tree.num_evictable
        assert listen(self.router, cache.tree)
        if cache.window is not None:
            self.check_window(cache.window)
        if cache.states is not None:
            self.check_states(cache.states)

    def check_window(self, window: WindowPool) -> None:
        owned, locks, idle = Counter(window.pool._free), Counter[int](), 0
        for sequence in self.scheduler.roster.live.values():
            assert (sequence.node is None) == (sequence.window is None)
            if (span := sequence.window) is not None:
                path = sequence.node.depth
                assert all(
                    isinstance(entry, int) or entry.depth == row + 1 <= path
                    for row, entry in enumerate(span.pages, span.first)
                )
                owned.update(entry for entry in span.pages if isinstance(entry, int))
                locks.update(id(entry) for entry in span.pages if not isinstance(entry, int))
        nodes = list(self.scheduler.cache.tree.roots.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            assert node.window_locks == locks.pop(id(node), 0) and (node.window or not node.window_locks)
            if node.window:
                owned[node.window] += 1
                idle += not node.window_locks
        assert not locks and idle == window.num_evictable
        assert owned == Counter(range(1, self.config.cache.window.num_pages))

    def check_states(self, states: StatePool) -> None:
        owned, num_kept = Counter(states.pool.free), 0
        nodes = list(self.scheduler.cache.tree.roots.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.state:
                owned[node.state] += 1
                num_kept += 1
                assert node.parent is not None and node in states._evictable
        running = [s for s in self.scheduler.roster.live.values() if s.node is not None]
        for sequence in running:
            owned.update(sequence.state.own)
        assert num_kept == states.num_evictable and len(states._snapshots) == sum(
            s.state.snapshot > 0 for s in running
        )
        assert owned == Counter(range(1, self.config.cache.states.num_slots))

    def check_idle(self) -> None:
        self.check_pages()
        roster = self.scheduler.roster
        assert (
            not roster.live
            and not roster.num_running
            and not roster.waiting
            and not self.scheduler.num_in_flight
        )
        assert (
            self.scheduler.cache.num_used
            == self.scheduler.cache.tree.num_pages
            == self.scheduler.cache.tree.num_evictable
        )
        assert all(self.ends[i] == 1 for i in self.seen if i not in self.quiet)
