"""Weights on their way to the L2 cache while ranks exchange (--npu-prefetch-mb).

A collective leaves the bandwidth of memory unused. The weight of the next product is known from the step
before: steps of a model have their products in one order.
"""

from weakref import ref

import torch_npu
from torch import Tensor


class WeightPrefetch:
    """Loads the beginning of the next weight, on the stream that waits for the collective."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: the most bytes of a weight, 1 or more."""
        self.num_bytes = num_bytes
        self._latest = 0  # id of the weight of the latest product; 0: there was none
        self._following: dict[int, ref[Tensor]] = {}  # by the id of the weight before

    def follow(self, weight: Tensor) -> None:
        """Called with the weight of each product, in the order of launches."""
        if self._latest:
            self._following[self._latest] = ref(weight)
        self._latest = id(weight)

    def begin(self) -> None:
        """Begins to load the weight of the next product, once a step has shown which it is."""
        found = self._following.get(self._latest)
        weight = None if found is None else found()
        if weight is not None:
            torch_npu.npu_prefetch(weight, None, min(self.num_bytes, weight.nbytes))
