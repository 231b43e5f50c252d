"""Where the experts of a model lie when its ranks start."""

from typing import Protocol

import numpy as np

from runtime.messages.experts import Dispatch, ExpertPlaces, Placement, in_order
from runtime.models.config.expert_location import read_expert_location
from runtime.models.config.moe_config import MoeConfig
from runtime.scheduling.expert_balance import balancing


class PlaceOptions(Protocol):
    """Options of a plan that say where experts lie."""

    @property
    def has_places(self) -> bool:
        """Whether experts have copies, move, or lie in another order than that of their numbers."""
        ...

    @property
    def expert_parallel_size(self) -> int:
        """Groups of ranks that experts are spread over."""
        ...

    @property
    def ep_num_redundant_experts(self) -> int:
        """Copies in a layer, besides one of each expert."""
        ...

    @property
    def ep_dispatch_algorithm(self) -> Dispatch | None:
        """How tokens choose among copies."""
        ...

    @property
    def init_expert_location(self) -> str:
        """trivial, or a file."""
        ...


def places_at_start(options: PlaceOptions, moe: MoeConfig | None, num_nodes: int = 1) -> ExpertPlaces | None:
    """The placements that a file says, or that follow from its counts; None: all experts are in order, and
    stay there. `num_nodes`: that share the ranks of a layer. Raises ModelError."""
    if moe is None or not options.has_places:
        return None
    copies, experts = options.ep_num_redundant_experts, moe.num_experts
    layers = dict[int, Placement]()
    if options.init_expert_location != "trivial":
        balance = balancing(options.expert_parallel_size, num_nodes, moe.routing.num_groups)
        plain = in_order(experts, experts + copies)
        found = read_expert_location(options.init_expert_location, moe.layers, experts, len(plain))
        for i in (i for i, is_sparse in enumerate(moe.layers) if is_sparse):
            if found.placements is not None:
                layers[i] = tuple(found.placements[i])
            elif found.loads is not None:
                layers[i] = balance(np.asarray(found.loads[i]), plain)
    return ExpertPlaces(copies, options.ep_dispatch_algorithm or "static", layers)
