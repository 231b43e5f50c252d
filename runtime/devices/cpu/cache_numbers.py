"""Dtypes and sizes of the key/value cache that the kernels read."""

import torch

# step::Number of step.h
CACHE_NUMBERS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
MAX_DIM = 608  # numbers of a head's key, and of its value: cache::MAX_DIM, less what padding may take
