"""Random arrivals, aborts, stops, submissions, results and deaths of the ranks, with every kind of memory,
against the oracle."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.cache.eviction import POLICIES as EVICTIONS
from runtime.cache.host import WRITE_POLICIES
from runtime.messages.requests import FinishReason
from runtime.scheduling.admission import Admission
from runtime.scheduling.drafts import Drafter
from runtime.scheduling.order import POLICIES
from runtime.scheduling.speculation.own import OwnDrafter
from runtime.scheduling.waiting import OrderConfig
from tests.scheduling.guessing import Guesser, looking_up
from tests.scheduling.world import World

ORDERS = st.builds(
    OrderConfig,
    policy=st.sampled_from(sorted(POLICIES)),
    has_priorities=st.booleans(),
    low_first=st.booleans(),
    preemption_threshold=st.integers(1, 12),
    patience=st.integers(0, 5),
    fair=st.booleans(),
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10)),
)
ADMISSIONS = st.fixed_dictionaries(
    {
        "max_prompts": st.none() | st.integers(1, 3),
        "has_dynamic_chunks": st.booleans(),
        "max_step_s": st.sampled_from([0.0, 0.001, 0.01]),
        "long_share": st.sampled_from([0.1, 0.5, 1.0]),
        "decode_steps": st.integers(1, 4),
    }
)
DRAFTERS = st.builds(
    Guesser,
    longest=st.integers(1, 7),
    luck=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    has_trees=st.booleans(),
    seed=st.integers(0, 99),
)
LOOKING_UP = st.builds(
    looking_up,
    has_trees=st.booleans(),
    num_drafts=st.integers(1, 7),
    min_breadth=st.integers(1, 3),
    match_type=st.sampled_from(["BFS", "PROB"]),
    capacity=st.sampled_from([64, 4096]),
    max_window=st.sampled_from([1, 4]),
)
OWN = st.builds(OwnDrafter, st.integers(1, 5), branches=st.integers(1, 2), depth=st.integers(1, 3))


class Machine(RuleBasedStateMachine):
    """Random arrivals, aborts, stops, submissions, results and deaths of the ranks, against the oracle."""

    @initialize(
        depth=st.integers(1, 3),
        page_size=st.sampled_from([1, 2, 5]),
        chunk=st.integers(1, 20),
        shares=st.booleans(),
        order=ORDERS,
        admission=ADMISSIONS,
        conservativeness=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        eviction=st.sampled_from(sorted(EVICTIONS)),
        num_host_pages=st.sampled_from([0, 2, 4, 9, 25, 60]),
        write_policy=st.sampled_from(sorted(WRITE_POLICIES)),
        saves_in_step=st.booleans(),
        window=st.sampled_from([0, 0, 1, 4, 11]),
        spare_window_pages=st.integers(0, 12),
        num_states=st.sampled_from([0, 0, 1, 2, 3, 5, 9, 20]),
        interval=st.integers(0, 3),
        draft_nodes=st.sampled_from([0, 3, 40]),
        num_host_states=st.sampled_from([0, 2, 3, 9]),
        longest_run=st.sampled_from([1, 1, 2, 3, 9]),
        drafter=st.none() | DRAFTERS | DRAFTERS | LOOKING_UP | OWN,
        pool_tokens=st.sampled_from([30, 30, 100]),
    )
    def begin(
        self,
        depth: int,
        page_size: int,
        chunk: int,
        shares: bool,
        order: OrderConfig,
        admission: dict,
        conservativeness: float,
        num_host_pages: int,
        window: int,
        longest_run: int,
        drafter: Drafter | None,
        num_states: int,
        draft_nodes: int,
        num_host_states: int,
        pool_tokens: int,
        **cache: object,
    ) -> None:
        self.world = World(
            depth=depth,
            page_size=page_size,
            num_pages=1 + pool_tokens // page_size,
            chunk=chunk,
            shares=shares,
            order=order,
            admission=Admission(max_step_tokens=chunk, **admission),
            conservativeness=conservativeness,
            num_host_pages=0 if window else num_host_pages,
            window=window,
            longest_run=longest_run,
            drafter=drafter,
            # rows of recurrent models verify nothing but what is sure
            num_states=num_states,
            draft_nodes=draft_nodes,
            num_host_states=num_host_states,
            **cache,
        )

    @rule(
        head=st.integers(0, 2),
        length=st.integers(1, 22),
        n=st.integers(1, 3),
        new=st.integers(1, 30),
        eos=st.booleans(),
        prompt_logprobs=st.booleans(),
        priority=st.none() | st.integers(-30, 30),
        tenant=st.sampled_from("abc"),
        namespace=st.sampled_from(["", "", "x"]),
    )
    def add(
        self,
        head: int,
        length: int,
        n: int,
        new: int,
        eos: bool,
        prompt_logprobs: bool,
        priority: int | None,
        tenant: str,
        namespace: str,
    ) -> None:
        self.world.add(
            ([head] * 6 + [1, 2, 3, 4] * 5)[:length],
            n=n,
            max_new_tokens=new,
            ignore_eos=not eos,
            prompt_logprobs=0 if prompt_logprobs else None,
            priority=priority,
            tenant=tenant,
            routing_key=tenant,
            namespace=namespace,
        )

    @rule()
    def submit(self) -> None:
        self.world.submit()

    @precondition(lambda self: self.world.results)
    @rule()
    def receive(self) -> None:
        self.world.receive()

    @precondition(lambda self: self.world.scheduler.roster.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = self.world.scheduler.roster.live
        self.world.scheduler.abort(live[data.draw(st.sampled_from(sorted(live)))].request.id)

    @precondition(lambda self: self.world.scheduler.roster.live)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from(sorted(self.world.scheduler.roster.live)))
        self.world.quiet.add(i)
        self.world.scheduler.end([i])

    @rule(keeps_host=st.booleans())
    def die(self, keeps_host: bool) -> None:
        if self.world.rank.window:
            lost = self.world.die(
                more_window_pages=0 if keeps_host else 1, more_states=len(self.world.rank.states) % 2
            )
        else:
            lost = self.world.die(num_host_pages=None if keeps_host else len(self.world.rank.host) ^ 1)
        assert lost.guilty is None or lost.num_steps

    @rule()
    def store(self) -> None:
        shelf = self.world.shelf
        shelf.watch()
        for _ in range(len(shelf.pins) // 2):
            shelf.write(self.world.rank)

    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        world = self.world
        held = [sequence for sequence, *_ in world.shelf.fetches]
        waiting = [
            s
            for s in world.scheduler.roster.live.values()
            if s.slot < 0
            and s.first_cached_len < 0
            and s not in held
            and not world.scheduler.roster.waiting.holds(s)
        ]
        if waiting:
            world.shelf.fetch(data.draw(st.sampled_from(waiting)), world.rank)

    @precondition(lambda self: self.world.shelf.fetches)
    @rule(part=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def arrive(self, part: float) -> None:
        self.world.shelf.arrive(self.world.rank, part)

    @rule()
    def flush(self) -> None:
        self.world.scheduler.cache.flush()

    @invariant()
    def pages_add_up(self) -> None:
        if hasattr(self, "world"):
            self.world.check_pages()
            for sequence in self.world.scheduler.roster.live.values():
                assert (
                    0
                    <= sequence.cached_len
                    <= sequence.computed_len
                    <= len(sequence.tokens) + sequence.in_flight
                )
                assert len(sequence.tokens) <= sequence.max_len

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.shelf.finish(self.world.rank)
        self.world.run()  # no one starves: all that wait get their turn in a bounded number of steps
        for i, tokens in self.world.seen.items():
            expected = self.world.expected(i)
            complete = i not in self.world.failed and self.world.reasons.get(i) in (
                FinishReason.STOP,
                FinishReason.LENGTH,
            )
            assert tokens == (expected if complete else expected[: len(tokens)])
            if complete and self.world.requests[i].params.prompt_logprobs is not None:
                assert [t.token_id for t in self.world.prompts[i]] == self.world.requests[i].prompt_ids


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
