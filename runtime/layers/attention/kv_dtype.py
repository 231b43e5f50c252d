"""Keys and values in pages of another dtype than the one they are computed in: --kv-cache-dtype.

torch's index kernels do not know fp8, so fp8 pages are written and read as bytes. A number beyond the range
becomes the largest there is; NaN stays NaN.
"""

import torch
from torch import Tensor


def store_as(x: Tensor, cache: Tensor, locations: Tensor) -> None:
    """Writes x [T, K, D] to `locations` [T] of the cache [num_locations, K, D], in the cache's dtype."""
    most = torch.finfo(cache.dtype).max
    narrow = x.clamp(-most, most).to(cache.dtype)
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8).index_copy_(0, locations, narrow.view(torch.uint8))
    else:
        cache.index_copy_(0, locations, narrow)


def read_as(cache: Tensor, locations: Tensor, dtype: torch.dtype) -> Tensor:
    """The cache's entries at `locations` [N], as [N, K, D] in `dtype`."""
    if cache.dtype == dtype:
        return cache.index_select(0, locations)
    if cache.dtype.itemsize == 1:
        return cache.view(torch.uint8).index_select(0, locations).view(cache.dtype).to(dtype)
    return cache.index_select(0, locations).to(dtype)
