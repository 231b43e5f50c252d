"""Launches of every kernel at the sizes of real models, for compiling ahead. Tensors are as small as strides allow."""

import numpy as np
import torch

from runtime.devices.base import Draw
from runtime.devices.cuda import attention
from runtime.devices.cuda.attention import AttentionPlan, Scores, Span
from runtime.devices.cuda.copies import copy
from runtime.devices.cuda.kernels.activation import act_and_mul
from runtime.devices.cuda.kernels.launch import Card
from runtime.devices.cuda.kernels.logits import mask, penalise_rows
from runtime.devices.cuda.kernels.norm import add_rms_norm, rms_norm
from runtime.devices.cuda.kernels.rotary import prepare_qkv, rotary
from runtime.devices.cuda.kernels.sampling import sample
from runtime.devices.cuda.kernels.store import store_kv

CARDS = {80: Card(108, 167936), 89: Card(128, 102400), 90: Card(132, 233472)}  # A100, RTX 4090, H200
ROWS = 4


def plan(page_size: int, count: int) -> AttentionPlan:
    rows = torch.zeros(4, ROWS, dtype=torch.int32)
    ends = None if count == 1 else np.array([[0] * ROWS, [count] * ROWS], np.int32)
    span = Span(rows, 0, ROWS * count, 4096, ends)
    return AttentionPlan((span,), torch.zeros(1, ROWS, 64, dtype=torch.int32), page_size)


def heads(num: int, kv: int, dim: int, dtype: torch.dtype, page_size: int, count: int, kv_dtype: torch.dtype | None = None,
          scores: Scores | None = None, *, card: Card) -> None:
    caches = [torch.zeros(64, kv, dim).to(kv_dtype or dtype) for _ in range(2)]
    q = torch.zeros(ROWS * count, num, dim, dtype=dtype)
    attention.attention(q, *caches, plan(page_size, count), scores or Scores(0.1), card)


def attend(card: Card) -> None:
    bf16 = torch.bfloat16
    for count in (1, 300):
        heads(32, 8, 128, bf16, 64, count, card=card)
        heads(32, 8, 128, bf16, 1, count, torch.float8_e4m3fn, card=card)
        heads(16, 8, 256, bf16, 16, count, None, Scores(0.1, window=1024, cap=50.0), card=card)
        heads(64, 8, 64, bf16, 16, count, None, Scores(0.1, window=128, sinks=torch.zeros(64)), card=card)
        heads(32, 32, 96, torch.float16, 16, count, card=card)
        heads(8, 2, 128, torch.float32, 16, count, card=card)


def llama(card: Card) -> None:
    """Attention of Llama-3.1-8B: decodes and prompts."""
    for count in (1, 300):
        heads(32, 8, 128, torch.bfloat16, 64, count, card=card)


def latent(card: Card) -> None:
    for num in (16, 128):
        for count in (1, 16):
            planned = plan(64, count)
            span, found = planned.spans[0], torch.empty(ROWS * count, num, 512, dtype=torch.bfloat16)
            q, rope = (torch.zeros(ROWS * count, num, dim, dtype=torch.bfloat16) for dim in (512, 64))
            caches = [torch.zeros(64, 1, dim, dtype=torch.bfloat16) for dim in (512, 64)]
            attention.attend_span(found, q, caches[0], caches[0], span, planned, Scores(0.1), card, rope, caches[1])


def rows(card: Card) -> None:
    """All that goes over rows of activations."""
    bf16 = torch.bfloat16
    x, weight, table = torch.zeros(4, 4096, dtype=bf16), torch.zeros(4096, dtype=bf16), torch.zeros(4, 64)
    add_rms_norm(x, torch.zeros_like(x), weight, 1e-6)
    rms_norm(x, weight, 1e-6)
    rms_norm(x.unflatten(1, (32, 128)), weight.unflatten(0, (32, 128)), 1e-6)
    rotary(x.unflatten(1, (32, 128)), table, table)
    pages, places = torch.zeros(4, 4096, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    copy(pages, pages, places, places)
    for kind in ("silu", "gelu", "gelu_tanh"):
        act_and_mul(x, kind)
    for dtype in (bf16, torch.float8_e4m3fn, torch.float8_e5m2):
        caches, at = [torch.zeros(64, 8, 128, dtype=bf16).to(dtype) for _ in range(2)], torch.zeros(4, dtype=torch.int64)
        store_kv(*x.unflatten(1, (32, 128)).split((8, 8, 16), 1)[:2], *caches, at)
        prepare_qkv(x, 16, *caches, at, table, table, weight, 1e-6)


def logits(card: Card) -> None:
    found, ids = torch.zeros(2, 151936), torch.zeros(2, dtype=torch.int64)
    draw = Draw(torch.zeros(2), torch.zeros(2), ids, torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    sample(found, draw)
    mask(found, ids, torch.zeros(2, 151936 // 32, dtype=torch.int32))
    penalise_rows(found, ids, ids, torch.zeros(2, 151936, dtype=torch.int32), torch.zeros(2, 151936, dtype=torch.bool), torch.zeros(2, 3))


LAUNCHES = {"attend": attend, "llama": llama, "latent": latent, "rows": rows, "logits": logits}
