"""What a device with kernels for adapters brings; others compute them in plain torch (layers/lora.py)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What sits at the seats of one linear layer, which may be made of P parts."""

    a: "Tensor"  # [seats, P, rank, I]
    b: "Tensor"  # [seats, C, rank]: the columns of all parts, one part behind the other
    # where each one's columns begin in the layer's output, and how many they are
    parts: tuple[tuple[int, int], ...]


class AdapterOps(Protocol):
    """Low-rank adapters, many in one step."""

    def plan(self, lora_slots: "np.ndarray") -> Any:
        """Once a step in which some token has an adapter: int32 [T], where each token's adapter sits; -1: it
        has none."""
        ...

    def plan_rows(self, lora_slots: "Tensor") -> Any:
        """The same of seats that are on the device, int64 [T]. Called in captured bodies, for any seats that
        come later."""
        ...

    def add(self, out: "Tensor", x: "Tensor", weights: LoraWeights, plan: Any) -> None:
        """Adds, in place, to the columns of each part p in each token's row of out [T, O] the product b[s]
        a[s, p] x [T, I], s being where its adapter sits. Tokens without one stay as they are."""
        ...
