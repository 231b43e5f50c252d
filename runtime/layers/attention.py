"""Attention over paged keys and values: what a layer adds to the device's arithmetic is which cache and window are its own."""

from torch import Tensor

from runtime.devices.base import Batch, Ops


class Attention:
    """Layer `index` of the model; `num_kv_heads` of this rank; `window` 0 sees the whole past."""

    def __init__(self, ops: Ops, index: int, num_kv_heads: int, head_dim: int, window: int) -> None:
        self.ops = ops
        self.index = index
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.pool = -1 if window else 0  # layers with a window have the last one, which may be the only one

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H * D]; writes k and v to the cache first."""
        if batch.arrivals is not None:
            batch.arrivals.wait(self.index)
        k_cache, v_cache = batch.kv[self.index]
        self.ops.store_kv(k, v, k_cache, v_cache, batch.locations[self.pool])
        return self.ops.attention(q, k_cache, v_cache, batch.attention, self.window).flatten(1)
