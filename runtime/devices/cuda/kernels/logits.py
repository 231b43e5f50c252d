"""Kernels that change logits in place before sampling: penalties and grammar masks."""

import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.operands import Seen
from runtime.layers.sampling.sampler import BANNED

BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["rows", "bits"])
def mask_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    bits: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    banned: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, blocks of the vocabulary): bans tokens whose bit is 0."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + tl.program_id(0).to(tl.int64) * words + at // 32, mask=at < vocab, other=-1)
    tl.store(
        logits + row * stride + at, banned + at * 0.0, mask=(at < vocab) & (((word >> (at % 32)) & 1) == 0)
    )


def mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Bans tokens whose bit is 0, int32 `bits` [M, ceil(V / 32)], in `rows` [M] of logits; see Ops.mask."""
    if len(rows):
        mask_kernel[(len(rows), triton.cdiv(logits.shape[1], BLOCK))](
            logits,
            rows,
            bits,
            logits.shape[1],
            logits.stride(0),
            bits.stride(0),
            BANNED,
            BLOCK=BLOCK,
            num_warps=4,
        )


@triton.jit(do_not_specialize_on_alignment=["places", "index"])
def penalties_kernel(
    logits: tl.tensor,
    places: tl.tensor,
    index: tl.tensor,
    generated: tl.tensor,
    in_prompt: tl.tensor,
    penalties: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, blocks of the vocabulary): repetition, frequency and presence penalties."""
    row, state_row = (
        tl.load(places + tl.program_id(0)).to(tl.int64),
        tl.load(index + tl.program_id(0)).to(tl.int64),
    )
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < vocab
    count = tl.load(generated + state_row * vocab + at, mask=is_there, other=0)
    is_known = (count > 0) | (tl.load(in_prompt + state_row * vocab + at, mask=is_there, other=0) != 0)
    frequency, presence = tl.load(penalties + state_row * 3), tl.load(penalties + state_row * 3 + 1)
    repetition = tl.load(penalties + state_row * 3 + 2)
    values = tl.load(logits + row * stride + at, mask=is_there, other=0.0)
    scaled = tl.where(values > 0, values / repetition, values * repetition)
    values = (
        tl.where(is_known, scaled, values)
        - frequency * count.to(tl.float32)
        - tl.where(count > 0, presence, 0.0)
    )
    tl.store(logits + row * stride + at, values, mask=is_there & is_known)


def apply_penalties(logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
    """Penalizes `rows` [M] of float32 logits [N, V] by rows `at` [M] of `seen`; see FusedOps.penalise."""
    if len(rows):
        penalties_kernel[(len(rows), triton.cdiv(logits.shape[1], BLOCK))](
            logits,
            rows,
            at,
            seen.generated,
            seen.in_prompt,
            seen.penalties,
            logits.shape[1],
            logits.stride(0),
            BLOCK=BLOCK,
            num_warps=4,
        )
