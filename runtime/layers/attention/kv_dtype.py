"""Keys and values in pages of another dtype than the one they are computed in: --kv-cache-dtype.

torch's index kernels know no fp8, so bytes are moved and read as fp8. A number beyond the range becomes the
largest there is; NaN stays.
"""

import torch
from torch import Tensor


def store_as(x: Tensor, cache: Tensor, locations: Tensor) -> None:
    """Writes x [T, K, D] to its places in the cache, in the cache's dtype."""
    most = torch.finfo(cache.dtype).max
    narrow = x.clamp(-most, most).to(cache.dtype)
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8).index_copy_(0, locations, narrow.view(torch.uint8))
    else:
        cache.index_copy_(0, locations, narrow)


def read_as(cache: Tensor, locations: Tensor, dtype: torch.dtype) -> Tensor:
    """What the cache holds at these places, [N, K, D] in `dtype`."""
    if cache.dtype == dtype:
        return cache.index_select(0, locations)
    if cache.dtype.itemsize == 1:
        return cache.view(torch.uint8).index_select(0, locations).view(cache.dtype).to(dtype)
    return cache.index_select(0, locations).to(dtype)
