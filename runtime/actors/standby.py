"""Standby ranks: processes that have imported what their device needs, and wait for a generation to replace.

Most of the time from the death of a rank to the next token is Python importing torch. A standby set is the
processes of one generation (actors/ranks.py) that have done so already: they have loaded no model and taken
no device memory, and sleep in the kernel. When ranks die, the set gets the setup of the new generation, and
another set is started in its place. A set that is not complete yet is never used: its import has a low
priority, and may take long on a busy machine.
"""

from collections.abc import Callable
from math import inf

import anyio

from runtime import log
from runtime.actors.ranks import Ranks
from runtime.errors import RankDied, SpawnError

DELAY_S = 2.0  # after ranks were started, before a set is: their requests go first
MAX_DELAY_S = 300.0  # between attempts, where sets end before they are complete


class StandbyRanks:
    """`count` standby sets of one replica, kept up by `run`."""

    def __init__(self, count: int, make: Callable[[], Ranks]) -> None:
        """`make` gives the ranks of a new generation, not started."""
        self._count = count
        self._make = make
        self._sets: list[Ranks] = []
        self._log = log.get("ranks")

    @property
    def num_ready(self) -> int:
        """Sets that could replace a generation now."""
        return sum(ranks.is_standing_by for ranks in self._sets)

    @property
    def pids(self) -> list[int]:
        """Process ids of all sets."""
        return [pid for ranks in self._sets for pid in ranks.pids]

    def take(self) -> Ranks | None:
        """The oldest complete set, which is the caller's from now on; None: there is none."""
        ranks = next((ranks for ranks in self._sets if ranks.is_standing_by), None)
        if ranks is not None:
            self._sets.remove(ranks)
        return ranks

    async def run(self) -> None:
        """Starts sets, and replaces those that were used or have ended, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for _ in range(self._count):
                tasks.start_soon(self._keep_set)

    async def stop(self, within_s: float = inf) -> None:
        """Ends all sets; see Ranks.stop. For the owner, when `run` has ended."""
        async with anyio.create_task_group() as stopping:
            for ranks in self._sets:
                stopping.start_soon(ranks.stop, within_s)
        self._sets.clear()

    async def _keep_set(self) -> None:
        delay_s = DELAY_S
        while True:
            await anyio.sleep(delay_s)
            delay_s = DELAY_S if await self._run_set() else min(2 * delay_s, MAX_DELAY_S)

    async def _run_set(self) -> bool:
        """Starts a set and returns when it was used or has ended. -> whether it was complete before"""
        was_ready = False

        def on_ready() -> None:
            nonlocal was_ready
            was_ready = True
            self._log.debug("standby ranks wait", pids=ranks.pids)

        ranks = self._make()
        self._sets.append(ranks)
        end: RankDied | SpawnError | None
        try:
            end = await ranks.stand_by(on_ready)
        except SpawnError as error:
            end = error
        if ranks in self._sets:  # not used
            self._log.warning("standby ranks have ended", reason=str(end))
            self._sets.remove(ranks)
            await ranks.stop()
        return was_ready
