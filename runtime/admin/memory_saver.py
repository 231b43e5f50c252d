"""What the ranks hold while the runtime lives: memory that goes back and is taken again, and weights that are
replaced.

    Holdings ── Hold ──► scheduler          no steps from here on; refused while requests run
             ── Occupy, Renew ──► ranks     through the supervisor, which remembers for ranks to come
             ── ResumePlanning ──► scheduler        when nothing is given back any more

Requests that come meanwhile wait, as in a pause.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
from msgspec import structs

from runtime.actors.supervisor import Supervisor
from runtime.errors import Busy, InvalidRequest, Unavailable
from runtime.messages.memory import PARTS, ChangeMemory, MemoryReport, Part, UpdateWeights, in_order
from runtime.messages.scheduler import Flush, ResumePlanning, SuspendPlanning, ToScheduler
from runtime.scheduling.scheduler import Scheduler

Asking = Callable[[Callable[[Callable[[Any], None]], ToScheduler]], Awaitable[Any]]


class MemorySaver:
    """The MemoryControls protocol (service.py)."""

    def __init__(
        self,
        supervisor: Supervisor,
        ask: Asking,
        to_scheduler: Callable[[ToScheduler], None],
        set_version: Callable[[str], None],
        *,
        can_release: bool,
        has_storage: bool,
    ) -> None:
        """`ask`: has the scheduler answer a message; `set_version`: what the API calls the weights from now
        on."""
        self.scheduler: Scheduler | None = None
        self._supervisor = supervisor
        self._ask = ask
        self._to_scheduler = to_scheduler
        self._can_release = can_release
        self._has_storage = has_storage
        self._set_version = set_version
        self._turn = anyio.Lock()
        self._num_wishes = 0

    @property
    def released(self) -> tuple[Part, ...]:
        return self._supervisor.sleep_state.released

    async def release(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        async with self._turn:
            return await self._change({*self.released, *self._known(parts)})

    async def resume(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        async with self._turn:
            return await self._change(set(self.released) - set(self._known(parts)))

    async def update_weights(
        self,
        model_path: str,
        load_format: str | None = None,
        version: str | None = None,
        *,
        flushes: bool = True,
    ) -> None:
        async with self._turn:
            if self._has_storage and version is None:
                raise InvalidRequest(
                    "the storage tier keeps pages of these weights; name the new ones in weight_version",
                    param="weight_version",
                )
            await self._ask(lambda answer: SuspendPlanning(False, answer))
            try:
                if self._has_storage and self.scheduler is not None and self.scheduler.roster.live:
                    raise Busy(
                        "requests wait whose pages the storage tier may know by the weights so far; try again when none does, or "
                        "set abort_all_requests"
                    )
                if flushes and self.scheduler is not None and self.scheduler.roster.num_running:
                    raise Busy(
                        "sequences are paused in place, with pages that the weights so far have computed; pause with mode retract "
                        "or abort, or set flush_cache to false to go on with those pages"
                    )
                await self._update_weights(model_path, load_format)
                if flushes:
                    await self._ask(Flush)
                if version is not None:
                    self._set_version(version)
            finally:
                self._let_go()

    def _known(self, parts: Sequence[Part] | None) -> Sequence[Part]:
        if not self._can_release:
            raise InvalidRequest("this server keeps its memory; start it with --enable-memory-saver")
        return PARTS if parts is None else parts

    async def _change(self, released: set[Part]) -> tuple[Part, ...]:
        gone = released - set(self.released)
        await self._ask(lambda answer: SuspendPlanning("kv_cache" in gone, answer))
        try:
            await self._change_memory(in_order(released))
        finally:
            self._let_go()
        return self.released

    async def _change_memory(self, released: tuple[Part, ...]) -> None:
        """The ranks hold everything but these. Raises Unavailable where they cannot; `released` then tells
        how it is."""
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
            answers = await self._wish(ChangeMemory(self._next_wish(), released))
        except Unavailable:
            if supervisor.ranks.died is None:  # they were not told
                sleep.released = before
            elif sleep.released == released:  # the dead hold nothing
                return
            raise
        if errors := [answer.error for answer in answers if answer.error]:
            raise Unavailable(f"what was given back cannot be taken again yet: {errors[0]}")

    async def _update_weights(self, model_path: str, load_format: str | None) -> None:
        """For these ranks and for those to come. Raises InvalidRequest for a checkpoint that is of no use,
        and nothing has happened; Unavailable, and if ranks start again it is with the weights so far."""
        supervisor = self._supervisor
        load_format = load_format or supervisor.setup.load_format
        trial = await self._wish(UpdateWeights(self._next_wish(), model_path, load_format, True))
        if errors := [answer.error for answer in trial if answer.error]:
            raise InvalidRequest(errors[0], param="model_path")
        await self._wish(UpdateWeights(self._next_wish(), model_path, load_format, False))
        supervisor.setup = structs.replace(supervisor.setup, model_path=model_path, load_format=load_format)

    async def _wish(self, wish: ChangeMemory | UpdateWeights) -> list[MemoryReport]:
        """What all ranks say. Raises Unavailable."""
        supervisor = self._supervisor
        ranks = supervisor.ranks
        if (
            not supervisor.readies
            or supervisor.is_recovering
            or ranks.died is not None
            or not ranks.submit(wish)
        ):
            raise Unavailable("the ranks cannot be told now; try again in a moment")
        answers = await ranks.memory_reports.wait(wish.id)
        told = {answer.rank: answer for answer in answers}
        supervisor.sleep_state.released = in_order({part for answer in answers for part in answer.released})
        supervisor.readies = [
            structs.replace(
                ready,
                weights_bytes=told[ready.rank].weights_bytes,
                pages_bytes=told[ready.rank].pages_bytes,
                taken_bytes=told[ready.rank].taken_bytes,
            )
            for ready in supervisor.readies
        ]
        return answers

    def _next_wish(self) -> int:
        self._num_wishes += 1
        return self._num_wishes

    def _let_go(self) -> None:
        if not self.released:
            with suppress(anyio.ClosedResourceError):  # the runtime ends, and nobody plans any more
                self._to_scheduler(ResumePlanning())
