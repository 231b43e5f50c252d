"""All replicas of one runtime, and what is done to all of them at the same time."""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

import anyio
import numpy as np
from anyio.abc import TaskGroup

from runtime import log
from runtime.actors.channels import Channel
from runtime.actors.dispatcher import Dispatcher
from runtime.actors.fan_out import call_all
from runtime.actors.nodes import Nodes
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.replica import Replica
from runtime.errors import RankDied
from runtime.messages.constraint import Grammar
from runtime.messages.lora import AdapterSetup, LoadAdapter
from runtime.messages.media import AlignSound, EncodeRows
from runtime.messages.ranks import LoadProgress
from runtime.messages.scheduler import ToDetokenizer
from runtime.metrics import Metrics
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan
from runtime.scheduling.handover import leaving
from runtime.transfer.halves import Halves

MOVED = "requests go on with other replicas"


class Replicas:
    """A fixed number of replicas, one for each inbox of the dispatcher. Iterating gives them in the order of
    their indices."""

    def __init__(
        self,
        plan: Plan,
        model: ModelConfig,
        *,
        dispatcher: Dispatcher,
        processes: RankProcesses | None = None,
        nodes: Nodes | None = None,
        halves: Halves | None = None,
        outbox: Channel[ToDetokenizer],
        metrics: Metrics,
        adapters: Callable[[], AdapterSetup] | None,
        on_death: Callable[[RankDied], None],
        on_progress: Callable[[int, LoadProgress], None],
    ) -> None:
        """The arguments are those of Replica; `on_progress` gets the replica's index as well, and
        `processes` are the first replica's."""
        self._dispatcher = dispatcher
        self._metrics = metrics
        self.halves = halves
        self._replicas: list[Replica] = []
        self._turn = 0  # of the replicas that encode
        groups = plan.parallel.attention_groups
        for index, inbox in enumerate(dispatcher.inboxes):
            replica = Replica(
                plan,
                model,
                index=index,
                num_replicas=len(dispatcher.inboxes),
                inbox=inbox,
                processes=None if index else processes,
                nodes=None if nodes is None else nodes.of(index // groups),
                halves=halves,
                outbox=outbox,
                metrics=metrics,
                adapters=adapters,
                on_death=on_death,
                on_progress=partial(on_progress, index),
                on_lost=self._hand_over,
                on_resumed=self._hand_over_all,
                forward=dispatcher.forward,
                lead=self._replicas[index - index % groups] if index % groups else None,
            )
            self._replicas.append(replica)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, index: int) -> Replica:
        return self._replicas[index]

    @property
    def owners(self) -> list[Replica]:
        """One replica for each set of ranks, which the schedulers of several attention groups may share."""
        return [replica for replica in self._replicas if replica.owns_ranks]

    async def start(self, tasks: TaskGroup) -> None:
        """Runs each replica in `tasks`; returns when the ranks of all are ready. Raises StartError,
        RankDied."""
        async with anyio.create_task_group() as starting:
            for replica in self._replicas:
                starting.start_soon(tasks.start, replica.run)

    async def stop(self, within_s: float = inf) -> None:
        """Ends the ranks of all replicas; see Ranks.stop. For the owner, when their tasks have ended."""
        async with anyio.create_task_group() as stopping:
            for replica in self._replicas:
                stopping.start_soon(replica.stop, within_s)

    @property
    def num_steps(self) -> int:
        """Steps that were planned since the start."""
        return sum([replica.num_steps for replica in self._replicas])

    @property
    def is_recovering(self) -> bool:
        """Whether the ranks of all replicas are being started again: while those of one run, it serves."""
        return all([replica.supervisor.is_recovering for replica in self._replicas])

    @property
    def num_recovering(self) -> int:
        """Replicas whose ranks are being started again."""
        return sum([replica.supervisor.is_recovering for replica in self._replicas])

    def has_request(self, request_id: str) -> bool:
        """Whether any scheduler knows the request."""
        return any([replica.has_request(request_id) for replica in self._replicas])

    def _hand_over(self, source: Replica) -> None:
        """The requests of a replica whose ranks have died go to those whose ranks run, each to the one that
        has least to do."""
        if source.scheduler is None or not (others := [r for r in self._replicas if r.is_taking]):
            return
        dispatcher, count = self._dispatcher, 0
        is_suspect = not source.supervisor.is_node_lost
        for request_id in leaving(source.scheduler, partial(dispatcher.may_move, is_suspect=is_suspect)):
            target = min(others, key=lambda other: dispatcher.held_tokens(other.index))
            if source.hand_over(request_id, target):
                dispatcher.move(request_id, target.index, is_suspect=is_suspect)
                count += 1
        if count:
            self._metrics.moved_requests.add(count)
            log.get("ranks").warning(MOVED, replica=source.index, requests=count)

    def _hand_over_all(self) -> None:
        """The ranks of a replica run again: it takes what waits for those that do not."""
        for replica in self._replicas:
            if replica.supervisor.is_recovering:
                self._hand_over(replica)

    async def load_adapter(self, load: LoadAdapter) -> None:
        """Loads an adapter on all ranks. Raises InvalidRequest, Unavailable."""
        await call_all([partial(replica.commands.load_adapter, load) for replica in self.owners])

    async def encode(self, command: EncodeRows | AlignSound) -> np.ndarray:
        """The rows that answer a command, of the replicas in turns. See RankCommands.encode."""
        self._turn += 1
        return await self.owners[self._turn % len(self.owners)].commands.encode(command)

    async def prepare_grammar(self, grammar: Grammar | None) -> None:
        """Announces a grammar to all ranks (None: any grammar), and returns when they have compiled it."""
        await call_all([partial(replica.commands.prepare, grammar) for replica in self.owners])
