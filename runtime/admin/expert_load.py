"""How evenly tokens spread over experts: asks the ranks from time to time for the metrics, and when an
operator wants to know.

    imbalance of a layer = tokens of the busiest expert / tokens of an expert on average; 1: all have the same

Or of the groups of ranks that experts lie on, where there are several. Both are of the steps between one look
and the next.
"""

from collections.abc import Awaitable, Callable
from itertools import count
from tempfile import mkdtemp

import anyio
import numpy as np

from runtime.errors import InvalidRequest, Unavailable
from runtime.messages.ranks import CountExperts, ExpertCounts, ExpertCountsAction
from runtime.metrics import Metrics

LOOK_S = 5.0


class Balance:
    """The ExpertControls protocol (service.py), and the metrics of experts."""

    def __init__(
        self,
        ask: Callable[[CountExperts], Awaitable[ExpertCounts]],
        metrics: Metrics,
        *,
        num_groups: int,
        records: bool,
    ) -> None:
        """`ask` raises Unavailable; `records`: with --expert-distribution-recorder-mode."""
        self._ask = ask
        self._metrics = metrics
        self._num_groups = num_groups
        self._records = records
        self._numbers = count(1)
        self._before = np.zeros(0, np.int64)

    async def count(self, action: ExpertCountsAction, folder: str = "") -> ExpertCounts:
        if not self._records:
            raise InvalidRequest(
                "nothing is recorded on this server; start it with --expert-distribution-recorder-mode stat"
            )
        if action == "dump":
            folder = folder or mkdtemp(prefix="runtime-experts-")
        found = await self._ask(CountExperts(next(self._numbers), action, folder))
        if found.error:
            raise InvalidRequest(f"no file was written: {found.error}")
        return found

    async def run(self, num_steps: Callable[[], int]) -> None:
        """Keeps the metrics up to date until cancelled; `num_steps` are done."""
        seen = 0
        while True:
            await anyio.sleep(LOOK_S)
            if (steps := num_steps()) != seen:
                try:
                    self.tell(await self._ask(CountExperts(next(self._numbers), "read")))
                    seen = steps
                except Unavailable:  # at the next look
                    continue

    def tell(self, found: ExpertCounts) -> None:
        """Sets the metrics. Counts begin anew with new ranks."""
        before = (
            self._before
            if len(self._before) == len(found.counts) and not (self._before > found.counts).any()
            else 0
        )
        fresh = (found.counts - before).reshape(len(found.layers), -1)
        self._before = found.counts
        groups = fresh.reshape(len(fresh), self._num_groups, -1).sum(2)
        metrics = self._metrics
        for layer, experts, ranks, total in zip(
            found.layers, fresh, groups, found.counts.reshape(fresh.shape).sum(1), strict=True
        ):
            metrics.expert_choices[str(layer)] = float(total)
            if experts.any():
                metrics.expert_imbalance[str(layer)] = float(experts.max() / experts.mean())
                metrics.expert_rank_imbalance[str(layer)] = float(ranks.max() / ranks.mean())
