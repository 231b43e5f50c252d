"""What a rank tries at start, with the sizes of its model, so that an NPU whose CANN lacks an operator or
refuses its sizes is told at start and not by a failing step. Everything here raises StartError."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from runtime.devices.ascend.device import first_line
from runtime.devices.ascend.facts import MAX_KEYS
from runtime.devices.ascend.fused import AscendFusedOps
from runtime.devices.ascend.ops import AscendOps
from runtime.devices.ascend.sparse_latents import AscendSparseLatents
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.errors import StartError
from runtime.messages.ranks import StartRank
from runtime.models.config.mla_config import MlaConfig
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.shares import even_part

MAX_PROBED_QUERIES = 1024  # the most queries of a row in the attention that is tried at start


def check_model(
    start: StartRank, config: ModelConfig | None, ops: AscendOps, torch_device: torch.device, rank: int
) -> None:
    """Raises StartError where the model's attention, or any attention if there is no model, does not work on
    this NPU. `rank`: of its stage."""
    if config is None:
        return check_attention(ops, torch_device)
    if ops.in_torch:
        return None
    if config.mla is None:
        if ops.is_nz:
            return check_nz(ops, torch_device, config.head_dim)
        return check_attention(ops, torch_device)
    sharing = start.attention_layout.num_head_ranks
    heads = even_part(config.num_heads, sharing, rank % sharing).size
    if config.mla.indexer is not None:
        return check_sparse(ops, torch_device, config.mla, heads)
    if start.max_len > MAX_KEYS:
        raise StartError(
            f"the latent attention of an NPU takes at most {MAX_KEYS} keys in a call; give "
            f"--context-length {MAX_KEYS} or less"
        )
    return check_mla(ops, torch_device, config.mla, heads)


def check_nz(ops: AscendOps, torch_device: torch.device, dim: int) -> None:
    """Tries pages in NZ of heads of `dim` numbers: their store behind norms, and attention of prompts and of
    single tokens."""
    counts = [1, 2]
    qkv = torch.zeros(sum(counts), 3 * dim, dtype=ops.dtype, device=torch_device)
    cache = qkv.new_zeros(ops.page_size, 1, dim)
    tables = torch.zeros(1, 1, 1, dtype=torch.int32, device=torch_device)
    cos, sin = ops.rotary_tables(*qkv.new_ones(2, sum(counts), dim // 2))
    locations = torch.arange(sum(counts), device=torch_device)

    def run() -> None:
        norm = qkv.new_ones(2, dim), 1e-6
        q = AscendFusedOps(ops).prepare_heads(qkv, norm, cos, sin, cache, cache.clone(), locations)
        plan = ops.plan_attention(fresh_rows(counts), tables, ops.page_size, (0,))
        ops.attention(q, cache, cache, plan, Scores(dim**-0.5))

    attempt(
        run,
        f"pages in NZ of heads of {dim} do not work on this NPU in {name_of(ops.dtype)} with --page-size "
        f"{ops.page_size}",
        "leave --npu-nz-cache out",
    )


def check_attention(ops: AscendOps, torch_device: torch.device) -> None:
    """Tries attention of one token."""
    dtype, page_size = ops.dtype, ops.page_size
    query = torch.zeros(1, 1, 128, dtype=dtype, device=torch_device)
    page = query.new_zeros(page_size, 1, 128, dtype=dtype if ops.unit is None else torch.int8)
    tables = torch.zeros(1, 1, 1, dtype=torch.int32, device=torch_device)

    def run() -> None:
        plan = ops.plan_attention(fresh_rows([1]), tables, page_size, (0,))
        ops.attention(query, page, page, plan, Scores(128**-0.5))

    attempt(
        run,
        f"the attention of this NPU does not work in {name_of(dtype)} with --page-size {page_size}",
        "take --dtype bfloat16 and --page-size 128",
    )


def check_mla(ops: AscendOps, torch_device: torch.device, latent: MlaConfig, num_heads: int) -> None:
    """Tries MLA in its three forms."""
    up = ops.pack_latent(up_projection(ops, torch_device, latent, num_heads), latent.nope_dim)
    counts = sorted({1, 2, min(ops.max_absorbed, MAX_PROBED_QUERIES) + 1})
    q = queries(ops, torch_device, latent, num_heads, sum(counts))
    caches = [page(ops, torch_device, size) for size in (latent.kv_rank, latent.rope_dim)]
    # one page, repeated
    tables = torch.zeros(1, 1, -(-counts[-1] // ops.page_size), dtype=torch.int32, device=torch_device)

    def run() -> None:
        plan = ops.plan_attention(fresh_rows(counts), tables, ops.page_size, (0,))
        ops.latent_attention(*q, *caches, up, plan, 1.0)

    attempt(
        run,
        f"the latent attention of this NPU does not work in {name_of(ops.dtype)} with {num_heads} heads of "
        f"{latent.nope_dim} and {latent.rope_dim}, latents of {latent.kv_rank} and --page-size "
        f"{ops.page_size}",
        "take --dtype bfloat16 and another --tensor-parallel-size",
    )


def check_sparse(ops: AscendOps, torch_device: torch.device, latent: MlaConfig, num_heads: int) -> None:
    """Tries sparse latent attention of a row of one token and of one of two. Raises ModelError as well."""
    assert latent.indexer is not None
    sparse = AscendSparseLatents(ops)
    up = up_projection(ops, torch_device, latent, num_heads)
    layer = sparse.open(up, latent, 1.0)
    q = queries(ops, torch_device, latent, num_heads, 3)
    heads = latent.indexer.num_heads
    index_queries = torch.zeros(3, heads, latent.indexer.dim, dtype=ops.dtype, device=torch_device)
    weights = torch.zeros(3, heads, dtype=ops.dtype, device=torch_device)
    caches = tuple(page(ops, torch_device, size) for size in sparse.cache_dims(latent))
    tables = torch.zeros(1, 1, 1, dtype=torch.int32, device=torch_device)
    location = torch.zeros(1, dtype=torch.int64, device=torch_device)
    sizes = latent.kv_rank, latent.rope_dim, latent.indexer.dim
    entries = [torch.zeros(1, 1, size, dtype=ops.dtype, device=torch_device) for size in sizes]

    def run() -> None:
        layer.store(*entries, caches, location)
        plan = ops.plan_attention(fresh_rows([1, 2]), tables, ops.page_size, (0,))
        layer.attend(*q, index_queries, weights, caches, plan)

    attempt(
        run,
        f"the sparse attention of this NPU does not work in {name_of(ops.dtype)} with {num_heads} heads, "
        f"latents of {latent.kv_rank} and {latent.rope_dim}, {heads} index heads of {latent.indexer.dim} and "
        f"--page-size {ops.page_size}",
        "take --dtype bfloat16 and another --tensor-parallel-size",
    )


def attempt(run: Callable[[], None], problem: str, remedy: str) -> None:
    """Runs something and waits for it. Raises StartError where the device refuses it."""
    try:
        run()
        torch.npu.synchronize()
    except RuntimeError as error:
        raise StartError(
            f"{problem} ({first_line(error)}); {remedy}, and look at the versions of CANN and torch_npu"
        ) from error


def up_projection(ops: AscendOps, torch_device: torch.device, latent: MlaConfig, num_heads: int) -> Tensor:
    """Zeros of the size of a rank's up-projection, [H, N + V, R]."""
    made = latent.nope_dim + latent.value_dim
    return torch.zeros(num_heads, made, latent.kv_rank, dtype=ops.dtype, device=torch_device)


def queries(
    ops: AscendOps, torch_device: torch.device, latent: MlaConfig, num_heads: int, count: int
) -> tuple[Tensor, Tensor]:
    """Zeros for queries [count, H, N] and their rotary parts [count, H, P], which are views of one tensor."""
    q = torch.zeros(count, num_heads, latent.nope_dim + latent.rope_dim, dtype=ops.dtype, device=torch_device)
    nope, rope = q.split((latent.nope_dim, latent.rope_dim), 2)
    return nope, rope


def page(ops: AscendOps, torch_device: torch.device, size: int) -> Tensor:
    """A page of zeros, [page size, 1, size]."""
    return torch.zeros(ops.page_size, 1, size, dtype=ops.dtype, device=torch_device)


def name_of(dtype: torch.dtype) -> str:
    """The dtype as --dtype has it."""
    return str(dtype).removeprefix("torch.")


def fresh_rows(counts: list[int]) -> AttentionRows:
    """A step of prompts with `counts` tokens."""
    zeros = np.zeros(len(counts), np.int32)
    return AttentionRows(1, zeros, zeros, np.array(counts, np.int32))
