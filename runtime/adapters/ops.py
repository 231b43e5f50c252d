"""What a device with kernels for adapters brings; others compute them in plain torch (layers/adapters.py)."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class AdapterOps(Protocol):
    """Low-rank adapters, many in one step."""

    def plan(self, seats: "np.ndarray") -> Any:
        """Once a step in which some token has an adapter: int32 [T], where each token's adapter sits; -1: it has none."""
        ...

    def add(self, out: "Tensor", x: "Tensor", a: "Tensor", b: "list[Tensor]", offsets: list[int], plan: Any) -> None:
        """Adds, in place, to the columns from offsets[p] on of each token's row of out [T, O] the product b[p][s] a[s, p] x, s being where
        its adapter sits: x [T, I], a [seats, P, rank, I], b[p] [seats, columns of p, rank]. Tokens without one stay as they are."""
        ...
