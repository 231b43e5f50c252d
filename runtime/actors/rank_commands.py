"""Commands to all ranks of a replica, apart from steps, and their replies.

A command reaches the current generation. What outlives a generation (weights, released memory) the supervisor
remembers for ranks that start later.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np
from msgspec import structs

from runtime.actors.ranks import Ranks
from runtime.actors.supervisor import Supervisor
from runtime.errors import InvalidRequest, Unavailable
from runtime.messages.constraint import Grammar
from runtime.messages.experts import ExpertPlaces, MoveExperts, Placement, ReadExperts
from runtime.messages.lora import LoadAdapter
from runtime.messages.media import AlignSound, EncodeRows
from runtime.messages.memory import ChangeMemory, MemoryReport, Part, UpdateWeights, in_order
from runtime.messages.ranks import CountExperts, ExpertCounts, ExpertCountsAction, PrepareGrammar, Profile

Command = (
    LoadAdapter
    | PrepareGrammar
    | Profile
    | CountExperts
    | ReadExperts
    | MoveExperts
    | ChangeMemory
    | UpdateWeights
    | EncodeRows
    | AlignSound
)


class RankCommands:
    """Commands to the ranks of one replica. All but `prepare` raise Unavailable when the ranks take none
    now."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._ids = count(1)

    @property
    def generation(self) -> int:
        """Number of the current generation of ranks."""
        return self._supervisor.generation

    @property
    def expert_places(self) -> ExpertPlaces:
        """Where experts are now."""
        return self._supervisor.setup.expert_places or ExpertPlaces()

    @property
    def released(self) -> tuple[Part, ...]:
        """The parts of the ranks' memory that are released now."""
        return self._supervisor.sleep_state.released

    async def prepare(self, grammar: Grammar | None) -> None:
        """Announces a grammar, and returns when rank 0 has compiled it: before that its first step would
        wait, and all other sequences with it. None: any grammar; returns at once. Where the ranks cannot
        take it now, or die meanwhile, that step compiles it."""
        command = PrepareGrammar(next(self._ids), grammar)
        try:
            ranks = self._submit(command)
            if grammar is not None:
                await ranks.grammars.wait(command.id)
        except Unavailable:
            pass  # the request goes on: new ranks compile what their first steps name

    async def load_adapter(self, load: LoadAdapter) -> None:
        """Loads an adapter on all ranks. Raises InvalidRequest for one that they cannot read."""
        for reply in await self._submit(load).adapters.wait(load.id):
            if reply.error:
                raise InvalidRequest(reply.error, param="lora_path")

    def profile(self, command: Profile) -> None:
        """Begins to record a profile, or writes what was recorded."""
        self._submit(command)

    async def count_experts(self, action: ExpertCountsAction, folder: str = "") -> ExpertCounts:
        """What rank 0 has counted."""
        command = CountExperts(next(self._ids), action, folder)
        return (await self._submit(command).counts.wait(command.id))[0]

    async def encode(self, command: EncodeRows | AlignSound) -> np.ndarray:
        """The rows that answer a command, whose `id` is given here, float32 [rows, width]. Raises
        InvalidRequest for an input that the model does not take."""
        command = structs.replace(command, id=next(self._ids))
        reply = (await self._submit(command).encoded.wait(command.id))[0]
        if reply.error:
            raise InvalidRequest(reply.error)
        return reply.rows.reshape(reply.num_rows, -1)

    async def place_experts(self, layers: dict[int, Placement]) -> None:
        """Moves experts of some layers, of these ranks and of those that start later. Steps go on while the
        ranks read the weights that they need. Raises Unavailable where one of them could not: no expert has
        moved then."""
        ranks = None
        for command in (ReadExperts(next(self._ids), layers), MoveExperts(next(self._ids))):
            if ranks is not None and ranks is not self._supervisor.ranks:
                raise Unavailable("the ranks were started again meanwhile")
            ranks = self._submit(command)
            replies = await ranks.placed.wait(command.id)
            if errors := [reply.error for reply in replies if reply.error]:
                raise Unavailable(errors[0])
        self._supervisor.experts_moved(layers)

    async def change_memory(self, released: tuple[Part, ...]) -> None:
        """The ranks hold everything but these parts. Raises Unavailable when they cannot resume a part;
        `released` then gives the actual state."""
        supervisor, sleep = self._supervisor, self._supervisor.sleep_state
        if sleep.is_asleep:
            if released:
                sleep.released = released
                return
            await sleep.wake()
            if supervisor.is_recovering:
                raise Unavailable("the ranks could not be started again; the server's log has the details")
            return
        # in case that they die meanwhile
        before, sleep.released = sleep.released, in_order({*sleep.released, *released})
        try:
            reports = await self._change(ChangeMemory(next(self._ids), released))
        except Unavailable:
            if supervisor.ranks.died is None:  # the command was not sent
                sleep.released = before
            elif sleep.released == released:  # dead ranks hold nothing
                return
            raise
        if errors := [report.error for report in reports if report.error]:
            raise Unavailable(f"released memory cannot be resumed yet: {errors[0]}")

    async def check_weights(self, model_path: str, load_format: str | None) -> None:
        """Raises InvalidRequest when the ranks cannot load the weights of this checkpoint; changes
        nothing."""
        reports = await self._change(
            UpdateWeights(
                next(self._ids), model_path, load_format or self._supervisor.setup.load_format, True
            )
        )
        if errors := [report.error for report in reports if report.error]:
            raise InvalidRequest(errors[0], param="model_path")

    async def update_weights(self, model_path: str, load_format: str | None) -> None:
        """Replaces the weights, of these ranks and of those that start later. Raises Unavailable when the
        ranks end meanwhile: new ones then have the old weights."""
        load_format = load_format or self._supervisor.setup.load_format
        await self._change(UpdateWeights(next(self._ids), model_path, load_format, False))
        self._supervisor.weights_changed(model_path, load_format)

    async def _change(self, command: ChangeMemory | UpdateWeights) -> Sequence[MemoryReport]:
        reports = await self._submit(command).memory_reports.wait(command.id)
        self._supervisor.memory_changed(reports)
        return reports

    @property
    def _takes_commands(self) -> bool:
        return self._supervisor.ranks.is_serving and not self._supervisor.is_recovering

    def _submit(self, command: Command) -> Ranks:
        """-> the ranks that will reply. Raises Unavailable."""
        ranks = self._supervisor.ranks
        if not self._takes_commands or not ranks.submit(command):
            raise Unavailable("the ranks cannot take commands now; try again in a moment")
        return ranks
