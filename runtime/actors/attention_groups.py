"""Attention groups: schedulers with requests and pages of their own, whose steps all ranks compute together.

    scheduler of group 0 ──plan──┐                    ┌──► ranks of group 0 ──result──► scheduler of group 0
                                 ├── one step of all ─┤
    scheduler of group 1 ──plan──┘                    └──► ranks of group 1 ──result──► scheduler of group 1

One loop plans a step of every group at the same time, so the groups need no agreement: the plans say what
each of them brings to the layers that they share. A step is done when all of its results have come. A rank
that dies takes all groups with it, and while requests of one group are suspected of having killed ranks, the
others wait.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from msgspec import structs

from runtime.actors.channels import Signal
from runtime.actors.ranks import Ranks
from runtime.actors.scheduler import SchedulerActor
from runtime.errors import RankDied
from runtime.messages.media import Encode
from runtime.messages.steps import GroupSteps, StepPlan, StepResult
from runtime.scheduling.delayer import Delayer, JointDelayer
from runtime.scheduling.encodings import encode_for_step
from runtime.scheduling.recovery import Lost

Actors = Sequence[SchedulerActor[Ranks]]


class GroupFlights:
    """The steps in flight, of which each group computes a part or nothing."""

    def __init__(self) -> None:
        self._due: deque[set[int]] = deque()  # by step, the groups whose results have not come
        self._steps = count(1)

    def __len__(self) -> int:
        return len(self._due)

    def add(self, plans: list[StepPlan | None]) -> GroupSteps:
        """A step of these plans, at least one."""
        self._due.append({group for group, plan in enumerate(plans) if plan is not None})
        return GroupSteps(next(self._steps), plans)

    def take(self, result: StepResult) -> None:
        """A group's oldest step in flight is done."""
        next(due for due in self._due if result.group in due).discard(result.group)
        while self._due and not self._due[0]:
            self._due.popleft()

    def clear(self) -> None:
        """The ranks have died."""
        self._due.clear()


class GroupProgress:
    """How far all groups are: what watchdogs and the supervisor ask of one scheduler."""

    def __init__(self, actors: Actors, flights: GroupFlights) -> None:
        self._actors = actors
        self._flights = flights

    @property
    def last_step(self) -> int:
        """Grows with each result."""
        return sum(actor.scheduler.last_step for actor in self._actors)

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and whose results have not all come."""
        return len(self._flights)


class AttentionGroups:
    """Drives the schedulers of all groups; for the supervisor it is what one scheduler's actor is."""

    def __init__(self, actors: Actors, signal: Signal, depth: int) -> None:
        """`actors`: of the groups, in order; `signal` starts a round, and is that of all actors; `depth`:
        steps in flight, at most."""
        self._actors = actors
        self._signal = signal
        self._depth = depth
        self._flights = GroupFlights()
        self.scheduler = GroupProgress(actors, self._flights)
        # planned, but the ring was full: what groups need encoded for the step, and the step
        self._unsent: list[Encode | GroupSteps] = []
        self._delayer = share_delayer(actors)

    async def drive(self, ranks: Ranks) -> RankDied:
        """Runs steps on these ranks until one of them is lost. -> its death"""
        ranks.set_wake(self._signal.set)
        self._signal.set()
        while True:
            await self._signal.wait()
            while results := ranks.results():
                for result in results:
                    self._flights.take(result)
                    await self._actors[result.group].take(result)
            if ranks.died is not None:
                return ranks.died
            for actor in self._actors:
                await actor.begin_round()
            self._submit(ranks)
            for actor in self._actors:
                await actor.end_round(ranks)

    async def lose_ranks(self, *, points_at_requests: bool = True) -> Lost:
        """The ranks are dead: see SchedulerActor."""
        self._unsent = []
        self._flights.clear()
        is_alone = sum(actor.scheduler.num_in_flight > 0 for actor in self._actors) == 1
        lost = [
            await actor.lose_ranks(points_at_requests=points_at_requests, is_alone=is_alone)
            for actor in self._actors
        ]
        return Lost(
            sum(one.num_steps for one in lost),
            sum(one.num_requests for one in lost),
            next((one.guilty for one in lost if one.guilty is not None), None),
        )

    async def resume(
        self,
        num_pages: int,
        num_host_pages: int = 0,
        num_window_pages: int = 0,
        num_state_slots: int = 0,
        num_host_states: int = 0,
    ) -> None:
        """New ranks are ready: see SchedulerActor."""
        for actor in self._actors:
            await actor.resume(num_pages, num_host_pages, num_window_pages, num_state_slots, num_host_states)

    def _submit(self, ranks: Ranks) -> None:
        """Plans and submits until the pipeline is full, or there is nothing to compute."""
        while True:
            if not self._unsent:
                if len(self._flights) >= self._depth:
                    return
                plans = self._plans()
                if not any(plans):
                    return
                self._unsent = [*self._encodings(plans), self._flights.add(plans)]
            if not ranks.submit(self._unsent[0]):
                return
            del self._unsent[0]

    def _encodings(self, plans: list[StepPlan | None]) -> Iterator[Encode]:
        """What the ranks of each group encode before a step of these plans."""
        for group, (actor, plan) in enumerate(zip(self._actors, plans, strict=True)):
            found = None if plan is None else encode_for_step(actor.scheduler.planner.encodings)
            if found is not None:
                yield structs.replace(found, group=group)

    def _plans(self) -> list[StepPlan | None]:
        """What each group computes next. A group with requests on trial runs alone."""
        if self._delayer is not None:
            self._delayer.begin()
        trying = next((a for a in self._actors if a.scheduler.recovery.has_trial), None)
        if trying is None:
            return [actor.next_plan() for actor in self._actors]
        if any(actor.scheduler.num_in_flight for actor in self._actors if actor is not trying):
            return []
        return [actor.next_plan() if actor is trying else None for actor in self._actors]


def share_delayer(actors: Actors) -> JointDelayer | None:
    """Has all groups start prompts in the same steps (--enable-prefill-delayer); None: prompts never wait."""
    planners = [actor.scheduler.planner for actor in actors]
    first = planners[0].delayer
    if not isinstance(first, Delayer):
        return None
    joint = JointDelayer(first, [(planner.roster, planner.admission) for planner in planners])
    for planner in planners:
        planner.delayer = joint
    return joint
