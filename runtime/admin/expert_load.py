"""How evenly tokens spread over experts: counts of the ranks, read from time to time for the metrics, and
when an operator asks for them.

    imbalance of a layer = tokens of the busiest expert / tokens of an expert on average; 1: all have the same

Where experts lie on several groups of ranks, the imbalance of the groups is computed in the same way. Both
are for the steps between one reading and the next.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from tempfile import mkdtemp

import anyio
import numpy as np
from msgspec import structs

from runtime.actors.fan_out import call_all
from runtime.errors import InvalidRequest, Unavailable
from runtime.messages.experts import ExpertPlaces
from runtime.messages.ranks import ExpertCounts, ExpertCountsAction
from runtime.metrics import Metrics
from runtime.scheduling.expert_balance import group_loads

READ_EVERY_S = 5.0

CountExperts = Callable[[ExpertCountsAction, str], Awaitable[ExpertCounts]]  # action, folder


class ExpertLoad:
    """The ExpertControls protocol (service.py), and the metrics of experts."""

    def __init__(
        self,
        counts: Sequence[CountExperts],
        metrics: Metrics,
        *,
        num_groups: int,
        is_recorded: bool,
        places: Callable[[], ExpertPlaces] = ExpertPlaces,
    ) -> None:
        """`counts`: one function for each replica, which raises Unavailable; `num_groups`: groups of ranks
        that experts lie on; `is_recorded`: with --expert-distribution-recorder-mode; `places`: where experts
        lie now, in the first replica if there are several."""
        self._counts = counts
        self._places = places
        self._metrics = metrics
        self._num_groups = num_groups
        self._is_recorded = is_recorded
        self._before = np.zeros(0, np.int64)  # counts of the last reading

    async def count(self, action: ExpertCountsAction, folder: str = "") -> ExpertCounts:
        """The counts so far, of all replicas together, after `action`. Raises InvalidRequest where nothing is
        recorded, Unavailable."""
        if not self._is_recorded:
            raise InvalidRequest(
                "nothing is recorded on this server; start it with --expert-distribution-recorder-mode stat"
            )
        if action == "dump":
            folder = folder or mkdtemp(prefix="runtime-experts-")
        result = await self._count(action, folder)
        if result.error:
            raise InvalidRequest(f"no file was written: {result.error}")
        return result

    async def run(self, num_steps: Callable[[], int]) -> None:
        """Keeps the metrics up to date until cancelled; `num_steps` gives the number of steps so far."""
        last_steps = 0
        while True:
            await anyio.sleep(READ_EVERY_S)
            if (steps := num_steps()) != last_steps:
                try:
                    self.update_metrics(await self._count("read", ""))
                    last_steps = steps
                except Unavailable:  # try at the next reading
                    continue

    def update_metrics(self, result: ExpertCounts) -> None:
        """Sets the metrics to the steps since the last call. Counts start anew with new ranks."""
        before = (
            self._before
            if len(self._before) == len(result.counts) and not (self._before > result.counts).any()
            else 0
        )
        fresh = (result.counts - before).reshape(len(result.layers), -1)
        self._before = result.counts
        places, metrics = self._places(), self._metrics
        groups = [
            group_loads(row, places.of_layer(layer, len(row)), self._num_groups)
            for layer, row in zip(result.layers, fresh, strict=True)
        ]
        for layer, experts, ranks, total in zip(
            result.layers, fresh, groups, result.counts.reshape(fresh.shape).sum(1), strict=True
        ):
            metrics.expert_choices[str(layer)] = float(total)
            if experts.any():
                metrics.expert_imbalance[str(layer)] = float(experts.max() / experts.mean())
                metrics.expert_rank_imbalance[str(layer)] = float(ranks.max() / ranks.mean())

    async def _count(self, action: ExpertCountsAction, folder: str) -> ExpertCounts:
        """Where there are several replicas, each dumps into a folder of its own."""
        folders = [folder]
        if len(self._counts) > 1:
            folders = [folder and str(Path(folder) / f"replica-{i}") for i in range(len(self._counts))]
        return reduce(
            _add,
            await call_all(
                [partial(count, action, part) for count, part in zip(self._counts, folders, strict=True)]
            ),
        )


def _add(first: ExpertCounts, second: ExpertCounts) -> ExpertCounts:
    return structs.replace(
        first,
        counts=first.counts + second.counts,
        num_steps=first.num_steps + second.num_steps,
        file=", ".join(filter(None, (first.file, second.file))),
        error=first.error or second.error,
    )
