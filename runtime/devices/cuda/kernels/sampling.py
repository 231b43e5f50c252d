"""Tokens from logits without sorting them, with the result of layers/sampling/sampler.py.

Four launches:

    chunk_max_kernel           the largest logit of each chunk of a row, and where it is
    chunk_sums_kernel          sums of exp((logit - largest) / temperature) of each chunk, in all and
                               above fixed weights
    collect_candidates_kernel  for rows with top_k or top_p: ids and weights of the tokens above the largest
                               of these weights that keeps enough tokens, in order
    sample_kernel              searches a row's candidates (top_k_top_p.py), or finds the chunk and in it the
                               token where the running sum passes the random number

Sums are float64 in an order that depends on the row alone, so a row's token does not depend on the batch. It
is the token of the cpu device except for rounding of exp (float32) and of sums in another order (float64).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.launch import next_power_of_2
from runtime.devices.cuda.kernels.top_k_top_p import Candidates, sample_truncated, token_weight
from runtime.devices.sampling_inputs import SamplingInputs

CHUNK = 4096
NUM_MARKS = 8  # fixed weights: 1/2, 1/8, ... 1/8192, and whatever is above 0
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # of float32
HELD = 4096  # candidates that sample_kernel holds in registers


@triton.jit
def chunk_max_kernel(
    logits: tl.tensor,
    chunk_max: tl.tensor,
    ids: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Grid (rows, chunks): the largest logit of each chunk, and its smallest id."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf"))
    top = tl.max(values, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(chunk_max + place, top)
    tl.store(ids + place, tl.min(tl.where(values == top, at, vocab), 0))


@triton.jit
def chunk_sums_kernel(
    logits: tl.tensor,
    chunk_max: tl.tensor,
    chunk_sums: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    settings: tl.tensor,
    bounds: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MARKS: tl.constexpr,
) -> None:
    """Grid (rows, chunks): the weight of each chunk, and the number and weight of its tokens above each mark.
    `settings` float32 [rows, 3]: temperature, top_p, min_p; `bounds` int32 [rows]: top_k, vocab for all."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(settings + row * 3)
    if temperature > 0:
        is_cut = (tl.load(settings + row * 3 + 1) < 1) | (tl.load(bounds + row) < vocab)
        chunks = tl.arange(0, CHUNKS)
        num_chunks = tl.num_programs(1)
        row_max = tl.max(
            tl.load(chunk_max + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")), 0
        )
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        weights = token_weight(
            tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")), row_max, temperature
        )
        least = tl.where(is_cut, 0.0, tl.load(settings + row * 3 + 2))
        place = row * num_chunks + chunk
        tl.store(chunk_sums + place, tl.sum(tl.where(weights >= least, weights, 0.0).to(tl.float64), 0))
        if is_cut:
            for j in tl.static_range(MARKS):
                is_in = weights >= (0.5 * 0.25**j if j < MARKS - 1 else SMALLEST_NORMAL)
                tl.store(counts + place * MARKS + j, tl.sum(is_in.to(tl.int32), 0))
                tl.store(sums + place * MARKS + j, tl.sum(tl.where(is_in, weights, 0.0).to(tl.float64), 0))


@triton.jit
def collect_candidates_kernel(
    logits: tl.tensor,
    chunk_max: tl.tensor,
    chunk_sums: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    candidates: tl.tensor,
    candidate_weights: tl.tensor,
    num_candidates: tl.tensor,
    settings: tl.tensor,
    bounds: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MARKS: tl.constexpr,
) -> None:
    """Grid (rows, chunks): ids and weights of the tokens above the largest mark that keeps top_k tokens, or
    top_p of the weight where there is no top_k."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p, top_k = (
        tl.load(settings + row * 3),
        tl.load(settings + row * 3 + 1),
        tl.load(bounds + row),
    )
    if (temperature > 0) & ((top_p < 1) | (top_k < vocab)):
        chunks, marks = tl.arange(0, CHUNKS), tl.arange(0, MARKS)
        num_chunks = tl.num_programs(1)
        is_chunk = chunks < num_chunks
        places = (row * num_chunks + chunks)[:, None] * MARKS + marks[None, :]
        held = tl.load(counts + places, mask=is_chunk[:, None], other=0)
        mass = tl.sum(tl.load(sums + places, mask=is_chunk[:, None], other=0.0), 0)
        total = tl.sum(tl.load(chunk_sums + row * num_chunks + chunks, mask=is_chunk, other=0.0), 0)
        by_k, by_p = tl.sum(held, 0) >= top_k, mass >= top_p.to(tl.float64) * total
        is_enough = tl.where(top_k < vocab, by_k, by_p)
        chosen = tl.min(tl.where(is_enough, marks, MARKS - 1), 0)
        bound = tl.where(
            chosen == MARKS - 1, SMALLEST_NORMAL, ((126 - 2 * chosen) << 23).to(tl.float32, bitcast=True)
        )
        of_mark = tl.sum(tl.where(marks[None, :] == chosen, held, 0), 1)
        first = tl.sum(tl.where(chunks < chunk, of_mark, 0), 0)
        row_max = tl.max(
            tl.load(chunk_max + row * num_chunks + chunks, mask=is_chunk, other=float("-inf")), 0
        )
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        line = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf"))
        weights = token_weight(line, row_max, temperature)
        is_in = weights >= bound
        place = row * vocab + first + tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(candidates + place, at, mask=is_in)
        tl.store(candidate_weights + place, weights, mask=is_in)
        if chunk == 0:
            tl.store(num_candidates + row, tl.sum(of_mark, 0))


@triton.jit
def _sample_full(
    line: tl.tensor,
    chunk_sums: tl.tensor,
    num_chunks: tl.tensor,
    row_max: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    vocab: tl.tensor,
    uniform: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """The token id of a row without top_k and top_p, in the order of the vocabulary: the chunk where the
    running sum passes the random number, then the token."""
    chunks = tl.arange(0, CHUNKS)
    sums = tl.cumsum(tl.load(chunk_sums + chunks, mask=chunks < num_chunks, other=0.0), 0)
    target = uniform * tl.max(sums, 0)
    chunk = tl.min(tl.where(sums > target, chunks, CHUNKS - 1), 0)
    before = tl.max(tl.where(chunks < chunk, sums, 0.0), 0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    weights = token_weight(tl.load(line + at, mask=at < vocab, other=float("-inf")), row_max, temperature)
    weights = tl.where(weights >= min_p, weights, 0.0)
    running = before + tl.cumsum(weights.to(tl.float64), 0)
    last = tl.max(tl.where(weights > 0, at, 0), 0)  # should rounding have made the chunk's own sum larger
    return tl.minimum(tl.min(tl.where(running > target, at, vocab), 0), last)


@triton.jit
def sample_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    chunk_max: tl.tensor,
    chunk_argmax: tl.tensor,
    chunk_sums: tl.tensor,
    candidates: tl.tensor,
    candidate_weights: tl.tensor,
    num_candidates: tl.tensor,
    settings: tl.tensor,
    bounds: tl.tensor,
    uniforms: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    num_chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
) -> None:
    """Grid (rows,): the token id of each row, int64."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(settings + row * 3)
    top_p, min_p = tl.load(settings + row * 3 + 1), tl.load(settings + row * 3 + 2)
    top_k, uniform = tl.load(bounds + row), tl.load(uniforms + row)
    line = logits + row * stride
    chunks = tl.arange(0, CHUNKS)
    is_chunk, at = chunks < num_chunks, row * num_chunks + chunks
    values = tl.load(chunk_max + at, mask=is_chunk, other=float("-inf"))
    row_max = tl.max(values, 0)
    if temperature > 0:
        if (top_p < 1) | (top_k < vocab):
            total = tl.sum(tl.load(chunk_sums + at, mask=is_chunk, other=0.0), 0)
            num = tl.load(num_candidates + row)
            of = Candidates(candidates + row * vocab, candidate_weights + row * vocab, num)
            token = sample_truncated(of, total, top_p, min_p, top_k, vocab, uniform, HELD)
        else:
            sums = chunk_sums + row * num_chunks
            token = _sample_full(
                line, sums, num_chunks, row_max, temperature, min_p, vocab, uniform, CHUNKS, CHUNK
            )
    else:
        ids = tl.load(chunk_argmax + at, mask=is_chunk, other=0)
        token = tl.min(tl.where(values == row_max, ids, vocab), 0)
    tl.store(tokens + row, token.to(tl.int64))


def sample(logits: Tensor, inputs: SamplingInputs, chunk: int = CHUNK, held: int = HELD) -> Tensor:
    """A token id, int64 [N], for each row of finite float32 logits [N, V]; see Ops.sample. Nothing is read
    from the device."""
    num, vocab = logits.shape
    tokens = torch.empty(num, dtype=torch.int64, device=logits.device)
    if num == 0:
        return tokens

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num, *shape, dtype=dtype, device=logits.device)

    num_chunks = triton.cdiv(vocab, chunk)
    settings, bounds = inputs.settings, inputs.bounds
    if settings is None or bounds is None:
        settings = torch.stack((inputs.temperature, inputs.top_p, inputs.min_p), dim=1)
        bounds = torch.where(inputs.top_k > 0, inputs.top_k, vocab).clamp_max(vocab).int()
    chunk_max, chunk_argmax = empty(torch.float32, num_chunks), empty(torch.int32, num_chunks)
    chunk_sums = empty(torch.float64, num_chunks)
    marks = empty(torch.int32, num_chunks, NUM_MARKS), empty(torch.float64, num_chunks, NUM_MARKS)
    candidates = empty(torch.int32, vocab), empty(torch.float32, vocab), empty(torch.int32)
    grid, stride = (num, num_chunks), logits.stride(0)
    sizes = {"CHUNKS": next_power_of_2(num_chunks, 2), "CHUNK": chunk, "num_warps": 8}
    rows = (settings, bounds, vocab, stride)
    chunk_max_kernel[grid](logits, chunk_max, chunk_argmax, vocab, stride, CHUNK=chunk, num_warps=8)
    chunk_sums_kernel[grid](logits, chunk_max, chunk_sums, *marks, *rows, MARKS=NUM_MARKS, **sizes)
    collect_candidates_kernel[grid](
        logits, chunk_max, chunk_sums, *marks, *candidates, *rows, MARKS=NUM_MARKS, **sizes
    )
    sample_kernel[(num,)](
        logits,
        tokens,
        chunk_max,
        chunk_argmax,
        chunk_sums,
        *candidates,
        settings,
        bounds,
        inputs.uniform,
        vocab,
        stride,
        num_chunks,
        HELD=held,
        **sizes,
    )
    return tokens
