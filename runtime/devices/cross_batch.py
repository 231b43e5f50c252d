"""What decoders that attend to an encoded sound need of a step besides its tokens. Torch-free at run time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.devices.base import AttentionPlan


@dataclass(frozen=True, slots=True)
class CrossBatch:
    """Each token of a step attends to all positions of its slot's sound, as a decode row behind them
    would."""

    attention: "AttentionPlan"  # of Ops.plan_attention: each token is a row
    kv: "list[tuple[Tensor, Tensor]]"  # for each layer keys and values of all slots' sounds
    # sounds that are new to their slots in this step, [N, positions, hidden], and int64 [N * positions]:
    # where their keys and values are stored; None: there are none
    sounds: "Tensor | None" = None
    locations: "Tensor | None" = None
