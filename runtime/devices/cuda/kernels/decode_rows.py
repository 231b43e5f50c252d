"""The beginning of a captured decode step, and what sampling needs of the slots: each in one launch of few
programs, where plain operators are some twenty launches of next to no work."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.launch import next_power_of_2
from runtime.devices.operands import SlotParams, SlotTensors
from runtime.devices.sampling_inputs import SamplingInputs

MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
BLOCK = 128  # rows of a program of sampling_inputs_kernel


@triton.jit(do_not_specialize=["num_rows"])
def begin_decodes_kernel(
    packed: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    last_token: tl.tensor,
    ints: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    pool_stride: tl.tensor,
    table_stride: tl.tensor,
    POOLS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (1,): page updates of `packed` int32 [1 + 3 * POOLS, rows], then `ints` int64 [3 + POOLS, rows]:
    slots, positions, tokens and locations, and `rows` int32 [4, rows] as AttentionLaunch has them."""
    at = tl.arange(0, BLOCK)
    is_row = at < num_rows
    for pool in tl.static_range(POOLS):
        updates = packed + (1 + 3 * pool) * num_rows + at
        slot = tl.load(updates, mask=is_row, other=0).to(tl.int64)
        page_row = tl.load(updates + num_rows, mask=is_row, other=0)
        ids = tl.load(updates + 2 * num_rows, mask=is_row, other=0)
        tl.store(tables + pool * pool_stride + slot * table_stride + page_row, ids, mask=is_row)
    tl.debug_barrier()  # the pages that follow are those of the updates
    slots = tl.load(packed + at, mask=is_row, other=0).to(tl.int64)
    positions = tl.load(lengths + slots, mask=is_row, other=0)
    tokens = tl.load(last_token + slots, mask=is_row, other=0)
    tl.store(ints + at, slots, mask=is_row)
    tl.store(ints + num_rows + at, positions, mask=is_row)
    tl.store(ints + 2 * num_rows + at, tokens, mask=is_row)
    for pool in tl.static_range(POOLS):
        page_at = tables + pool * pool_stride + slots * table_stride + positions // PAGE
        page = tl.load(page_at, mask=is_row, other=0).to(tl.int64)
        tl.store(ints + (3 + pool) * num_rows + at, page * PAGE + positions % PAGE, mask=is_row)
    tl.store(rows + at, slots.to(tl.int32), mask=is_row)
    tl.store(rows + num_rows + at, positions.to(tl.int32), mask=is_row)
    tl.store(rows + 2 * num_rows + at, at * 0 + 1, mask=is_row)
    tl.store(rows + 3 * num_rows + at, at, mask=is_row)


def begin_decodes(packed: Tensor, slots: SlotTensors, page_size: int) -> tuple[Tensor, Tensor]:
    """See FusedOps.begin_decodes: int64 [3 + pools, N], slots, positions, tokens and locations, and int32 [4,
    N], the rows of AttentionLaunch."""
    tables, num = slots.page_tables, packed.shape[1]
    ints = torch.empty(3 + len(tables), num, dtype=torch.int64, device=packed.device)
    rows = torch.empty(4, num, dtype=torch.int32, device=packed.device)
    block = next_power_of_2(num, 32)
    begin_decodes_kernel[(1,)](
        packed,
        tables,
        slots.lengths,
        slots.last_token,
        ints,
        rows,
        num,
        tables.stride(0),
        tables.stride(1),
        POOLS=len(tables),
        PAGE=page_size,
        BLOCK=block,
        num_warps=max(1, min(8, block // 32)),
    )
    return ints, rows


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["num_rows"])
def sampling_inputs_kernel(
    slots: tl.tensor,
    lengths: tl.tensor,
    floats: tl.tensor,
    seeds: tl.tensor,
    top_k: tl.tensor,
    settings: tl.tensor,
    bounds: tl.tensor,
    uniforms: tl.tensor,
    num_rows: tl.tensor,
    float_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (blocks of rows,): settings float32 [rows, 3], bounds int32 [rows] and uniforms float64 [rows]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = at < num_rows
    slot = tl.load(slots + at, mask=is_row, other=0)
    for i in tl.static_range(3):
        value = tl.load(floats + i * float_stride + slot, mask=is_row, other=0.0)
        tl.store(settings + at * 3 + i, value, mask=is_row)
    most = tl.load(top_k + slot, mask=is_row, other=0)
    most = tl.where((most > 0) & (most < vocab), most, vocab)
    tl.store(bounds + at, most.to(tl.int32), mask=is_row)
    seed = tl.load(seeds + slot, mask=is_row, other=0).to(tl.uint64, bitcast=True)
    place = tl.load(lengths + at, mask=is_row, other=0).to(tl.uint64, bitcast=True) + 1
    bits = _mix(_mix(seed) + place * GAMMA) >> 12
    tl.store(uniforms + at, bits.to(tl.int64).to(tl.float64) * 2.220446049250313e-16, mask=is_row)


def sampling_inputs(
    slots: Tensor, lengths: Tensor, params: SlotParams, filters: tuple[int, bool]
) -> SamplingInputs:
    """See FusedOps.sampling_inputs."""
    num = len(slots)
    settings = torch.empty(num, 3, dtype=torch.float32, device=slots.device)
    bounds = torch.empty(num, dtype=torch.int32, device=slots.device)
    uniforms = torch.empty(num, dtype=torch.float64, device=slots.device)
    sampling_inputs_kernel[(triton.cdiv(num, BLOCK),)](
        slots,
        lengths,
        params.floats,
        params.seeds,
        params.top_k,
        settings,
        bounds,
        uniforms,
        num,
        params.floats.stride(0),
        params.vocab_size,
        BLOCK=BLOCK,
        num_warps=1,
    )
    temperature, top_p, min_p = settings.unbind(1)
    return SamplingInputs(temperature, top_p, bounds, min_p, uniforms, *filters, settings, bounds)
