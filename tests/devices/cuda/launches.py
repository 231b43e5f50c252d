"""Launches of every kernel at the sizes of real models, for compiling ahead. Tensors are as small as strides allow."""

import numpy as np
import torch

from runtime.devices.cuda import attention
from runtime.devices.cuda.attention import AttentionPlan, Scores, Span
from runtime.devices.cuda.kernels.launch import Card

H200 = Card(132, 233472)
ROWS = 4


def plan(dtype: torch.dtype, page_size: int, count: int) -> AttentionPlan:
    rows = torch.zeros(4, ROWS, dtype=torch.int32)
    ends = None if count == 1 else np.array([[0] * ROWS, [count] * ROWS], np.int32)
    span = Span(rows, 0, ROWS * count, 4096, ends)
    return AttentionPlan((span,), torch.zeros(1, ROWS, 64, dtype=torch.int32), page_size)


def heads(num: int, kv: int, dim: int, dtype: torch.dtype, page_size: int, count: int, kv_dtype: torch.dtype | None = None,
          scores: Scores | None = None) -> None:
    caches = [torch.zeros(64, kv, dim).to(kv_dtype or dtype) for _ in range(2)]
    attention.attention(torch.zeros(ROWS * count, num, dim, dtype=dtype), *caches, plan(dtype, page_size, count), scores or Scores(0.1), H200)


def attend() -> None:
    bf16 = torch.bfloat16
    for count in (1, 300):
        heads(32, 8, 128, bf16, 64, count)
        heads(32, 8, 128, bf16, 1, count, torch.float8_e4m3fn)
        heads(16, 8, 256, bf16, 16, count, None, Scores(0.1, window=1024, cap=50.0))
        heads(64, 8, 64, bf16, 16, count, None, Scores(0.1, window=128, sinks=torch.zeros(64)))
        heads(32, 32, 96, torch.float16, 16, count)
        heads(8, 2, 128, torch.float32, 16, count)


def latent() -> None:
    for num in (16, 128):
        for count in (1, 16):
            planned = plan(torch.bfloat16, 64, count)
            q, rope = (torch.zeros(ROWS * count, num, dim, dtype=torch.bfloat16) for dim in (512, 64))
            caches = [torch.zeros(64, 1, dim, dtype=torch.bfloat16) for dim in (512, 64)]
            attention.attend_span(torch.empty_like(q), q, caches[0], caches[0], planned.spans[0], planned, Scores(0.1), H200, rope, caches[1])


LAUNCHES = {"attend": attend, "latent": latent}
