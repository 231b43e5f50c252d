"""The ranks' memory while the runtime lives: parts that are released and resumed, and weights that are
replaced.

    MemorySaver ── SuspendPlanning ──► schedulers             no steps from here on, or Busy
                ── ChangeMemory, UpdateWeights ──► ranks      the supervisors remember them for ranks to come
                ── ResumePlanning ──► schedulers              when no part is released any more

Requests that come meanwhile wait, as in a pause.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import anyio

from runtime.actors.fan_out import call_all
from runtime.actors.replicas import Replicas
from runtime.admin.scheduler_commands import SchedulerCommands
from runtime.errors import Busy, InvalidRequest, RequestError
from runtime.messages.memory import PARTS, Part, in_order
from runtime.messages.scheduler import Flush, ResumePlanning, SuspendPlanning
from runtime.options.plan import Plan


class MemorySaver:
    """The MemoryControls protocol (service.py). Where there are several replicas, each command reaches all of
    them."""

    def __init__(
        self,
        plan: Plan,
        replicas: Replicas,
        commands: SchedulerCommands,
        set_weight_version: Callable[[str], None],
    ) -> None:
        """`set_weight_version` sets what the API calls the weights."""
        self._replicas = replicas
        self._commands = commands
        self._set_weight_version = set_weight_version
        self._can_release = plan.weights.enable_memory_saver
        self._has_storage = plan.tiers.hicache_storage_backend is not None
        self._lock = anyio.Lock()
        waits = plan.weights.checkpoint_engine_wait_weights_before_ready
        self._delivered = anyio.Event()  # the weights that the server waits for
        if not waits:
            self._delivered.set()
        # of updates that name none; None: that of the start, which for "dummy" reads no file
        self._load_format = "auto" if waits and plan.model.load_format == "dummy" else None

    async def wait_for_weights(self) -> None:
        """Returns when the ranks have weights to serve. Schedulers plan no step before."""
        await self._delivered.wait()

    @property
    def released(self) -> tuple[Part, ...]:
        """The parts that are released on any replica."""
        return in_order({part for replica in self._replicas.owners for part in replica.commands.released})

    async def release(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """Releases parts; None: all. -> the parts that are released now. Raises Busy, InvalidRequest,
        Unavailable."""
        async with self._lock:
            released = set(self._checked(parts))
            return await self._change(
                [in_order({*r.commands.released, *released}) for r in self._replicas.owners]
            )

    async def resume(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """Resumes parts; None: all. -> the parts that are still released. Raises Busy, InvalidRequest,
        Unavailable."""
        async with self._lock:
            resumed = set(self._checked(parts))
            return await self._change(
                [in_order({*r.commands.released} - resumed) for r in self._replicas.owners]
            )

    async def update_weights(
        self,
        model_path: str,
        load_format: str | None = None,
        version: str | None = None,
        *,
        flushes: bool = True,
    ) -> None:
        """Replaces the weights by those of another checkpoint of the same model. Raises Busy, InvalidRequest,
        Unavailable."""
        async with self._lock:
            if self._has_storage and version is None:
                raise InvalidRequest(
                    "the storage tier keeps pages of these weights; name the new ones in weight_version",
                    param="weight_version",
                )
            try:
                load_format = load_format or self._load_format
                await self._suspend(drops_pages=False)
                self._check_unused(flushes=flushes)
                await call_all(
                    [
                        partial(r.commands.check_weights, model_path, load_format)
                        for r in self._replicas.owners
                    ]
                )
                await call_all(
                    [
                        partial(r.commands.update_weights, model_path, load_format)
                        for r in self._replicas.owners
                    ]
                )
                if flushes:
                    await self._commands.ask(Flush)
                if version is not None:
                    self._set_weight_version(version)
                self._delivered.set()
            finally:
                self._resume_planning()

    def _checked(self, parts: Sequence[Part] | None) -> Sequence[Part]:
        if not self._can_release:
            raise InvalidRequest("this server keeps its memory; start it with --enable-memory-saver")
        return PARTS if parts is None else parts

    def _check_unused(self, *, flushes: bool) -> None:
        """Raises Busy when requests have pages that the present weights have computed."""
        rosters = [replica.scheduler.roster for replica in self._replicas if replica.scheduler is not None]
        if self._has_storage and any(roster.live for roster in rosters):
            raise Busy(
                "requests wait whose pages the storage tier may know by the present weights; try again when "
                "none does, or set abort_all_requests"
            )
        if flushes and any(roster.num_running for roster in rosters):
            raise Busy(
                "sequences are paused in place, with pages that the present weights have computed; pause "
                "with mode retract or abort, or set flush_cache to false to go on with those pages"
            )

    async def _suspend(self, *, drops_pages: bool) -> None:
        """Returns when no scheduler has a step in flight."""

        def command(answer: Callable[[None | RequestError], None]) -> SuspendPlanning:
            return SuspendPlanning(drops_pages, answer)

        await self._commands.ask(command)

    async def _change(self, released: list[tuple[Part, ...]]) -> tuple[Part, ...]:
        """`released`: the parts that each replica's ranks shall not hold."""
        drops_pages = any(
            "kv_cache" in parts and "kv_cache" not in replica.commands.released
            for replica, parts in zip(self._replicas.owners, released, strict=True)
        )
        try:
            await self._suspend(drops_pages=drops_pages)
            await call_all(
                [
                    partial(replica.commands.change_memory, parts)
                    for replica, parts in zip(self._replicas.owners, released, strict=True)
                ]
            )
        finally:
            self._resume_planning()
        return self.released

    def _resume_planning(self) -> None:
        """Schedulers whose ranks hold everything plan again."""
        if not self._delivered.is_set():
            return
        for replica in self._replicas:
            if not replica.commands.released:
                with suppress(anyio.ClosedResourceError):  # the runtime ends
                    replica.inbox.send_nowait(ResumePlanning())
