"""Moves the experts of one replica from rank to rank, so that its groups of ranks have equal load
(--enable-eplb).

Every so many steps the ranks' counts are read. Where some group of ranks has much more to do than the average
one, layers get other placements (scheduling/expert_balance.py), some layers at a time. Ranks read weights
while they take steps, and move them between two steps (ranks/expert_placer.py).
"""

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import numpy as np
from msgspec import Struct

from runtime import log
from runtime.actors.rank_commands import RankCommands
from runtime.actors.replica import Replica
from runtime.errors import Unavailable
from runtime.messages.experts import Placement
from runtime.messages.ranks import ExpertCounts
from runtime.options.plan import Plan
from runtime.scheduling.expert_balance import balancing, utilization

LOOK_EVERY_S = 0.5  # at the number of steps


class BalancerConfig(Struct, frozen=True):
    """When experts move, and how many at a time."""

    num_groups: int  # groups of ranks that experts are spread over
    num_nodes: int  # that share the ranks of a layer
    num_expert_groups: int  # of which routers choose some first
    every_steps: int
    layers_per_chunk: int | None  # layers that move together; None: all
    threshold: float  # utilization from which on nothing moves


class ExpertBalancer:
    """Placements of one replica's experts."""

    def __init__(
        self, config: BalancerConfig, commands: RankCommands, num_steps: Callable[[], int], replica: int
    ) -> None:
        """`num_steps` gives the number of steps so far; `replica`: its index."""
        self._config = config
        self._balance = balancing(config.num_groups, config.num_nodes, config.num_expert_groups)
        self._commands = commands
        self._num_steps = num_steps
        self._replica = replica
        self._before = np.zeros(0, np.int64)  # counts when experts were last looked at

    async def run(self) -> None:
        """Looks and moves until cancelled."""
        last_steps = self._num_steps()
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            if (steps := self._num_steps()) - last_steps < self._config.every_steps:
                continue
            last_steps = steps
            try:
                await self.rebalance()
            except Unavailable as error:  # ranks that are replaced, say; the next look tries again
                log.get("experts").warning("experts were not moved", replica=self._replica, why=str(error))

    async def rebalance(self) -> int:
        """Moves experts according to the steps since the last call. -> the number of layers in which some
        moved. Raises Unavailable."""
        load = self._fresh(counts := await self._commands.count_experts("read"))
        places = self._commands.expert_places
        old = {layer: places.of_layer(layer, load.shape[1]) for layer in counts.layers}
        used = self._utilization(load, old)
        if used >= self._config.threshold:
            return 0
        new = await anyio.to_thread.run_sync(self._placements, load, old)
        changed = {layer: placement for layer, placement in new.items() if placement != old[layer]}
        layers, size = list(changed), self._config.layers_per_chunk or max(len(changed), 1)
        for i in range(0, len(layers), size):
            await self._commands.place_experts({layer: changed[layer] for layer in layers[i : i + size]})
        if changed:
            log.get("experts").info(
                "experts moved",
                replica=self._replica,
                layers=len(changed),
                utilization_before=round(used, 3),
                utilization=round(self._utilization(load, new), 3),
            )
        return len(changed)

    def _fresh(self, counts: ExpertCounts) -> np.ndarray:
        """Tokens of each layer and expert since the last call; new ranks count from 0."""
        found, before = counts.counts, self._before
        is_later = len(before) == len(found) and not (before > found).any()
        self._before = found
        load: np.ndarray = (found - before if is_later else found).reshape(len(counts.layers), -1)
        return load

    def _utilization(self, load: np.ndarray, placements: dict[int, Placement]) -> float:
        """The tokens of the average group of ranks by those of the busiest one, averaged over the layers."""
        rows = zip(load, placements.values(), strict=True)
        return float(np.mean([utilization(row, one, self._config.num_groups) for row, one in rows]))

    def _placements(self, load: np.ndarray, old: dict[int, Placement]) -> dict[int, Placement]:
        """Better placements of the layers; a layer without tokens keeps its own."""
        return {
            layer: self._balance(row, placement) if row.any() else placement
            for row, (layer, placement) in zip(load, old.items(), strict=True)
        }


def open_balancers(plan: Plan, replicas: Sequence[Replica], num_expert_groups: int) -> list[ExpertBalancer]:
    """One for each set of ranks, which the replicas of several attention groups may share; none without
    --enable-eplb."""
    experts = plan.experts
    config = BalancerConfig(
        num_groups=experts.expert_parallel_size,
        num_nodes=plan.parallel.nodes_of_stage,
        num_expert_groups=num_expert_groups,
        every_steps=experts.eplb_rebalance_num_iterations,
        layers_per_chunk=experts.eplb_rebalance_layers_per_chunk,
        threshold=experts.eplb_min_rebalancing_utilization_threshold,
    )
    size = plan.parallel.attention_groups
    sets = [replicas[first : first + size] for first in range(0, len(replicas), size)]
    return [
        ExpertBalancer(config, own[0].commands, partial(num_steps, own), own[0].index)
        for own in (sets if experts.enable_eplb else ())
    ]


def num_steps(replicas: Sequence[Replica]) -> int:
    """Steps of one set of ranks: those of its attention groups are computed together."""
    return max(replica.num_steps for replica in replicas)
