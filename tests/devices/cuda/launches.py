"""Launches of every kernel at the sizes of real models, for compiling ahead. Tensors are as small as strides
allow."""

from dataclasses import replace

import numpy as np
import torch

from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import attention, attention_tiles
from runtime.devices.cuda import gemm as gemms
from runtime.devices.cuda.attention import AttentionLaunch, AttentionPlan
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.gemm import gemm
from runtime.devices.cuda.kernels.activation import act_and_mul
from runtime.devices.cuda.kernels.gemv import gemv
from runtime.devices.cuda.kernels.latents import LatentNorms, prepare_latents
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kernels.logits import apply_penalties, mask
from runtime.devices.cuda.kernels.moe_permute import moe_align_block_size
from runtime.devices.cuda.kernels.norm import add_rms_norm, rms_norm
from runtime.devices.cuda.kernels.norm_product import norm_product
from runtime.devices.cuda.kernels.recurrent import TritonStateSteps
from runtime.devices.cuda.kernels.rotary import prepare_heads, rotary
from runtime.devices.cuda.kernels.sampling import sample
from runtime.devices.cuda.kernels.store import store_kv
from runtime.devices.cuda.lora import CudaLoraOps
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.cuda.norm_sums import NormSums
from runtime.devices.cuda.ops import CudaOps
from runtime.devices.cuda.page_copies import copy_pages
from runtime.devices.cuda.towers import TritonTowers
from runtime.devices.cuda.weights import pack_dense
from runtime.devices.lora import LoraWeights
from runtime.devices.operands import NormInputs, Seen, SlotParams, SlotTensors
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.models.config.moe_config import Routing
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme
from tests.devices.cuda.lacking import by_block, fragments, lacking

# A100, RTX 4090, H200
GPUS = {80: Gpu(108, 167936), 89: Gpu(128, 102400, True), 90: Gpu(132, 233472, True, is_hopper=True)}
ROWS = 4


def plan(page_size: int, count: int) -> AttentionPlan:
    """A plan of ROWS rows with `count` queries each."""
    rows = torch.zeros(4, ROWS, dtype=torch.int32)
    ends = None if count == 1 else np.array([[0] * ROWS, [count] * ROWS], np.int32)
    launch = AttentionLaunch(rows, 0, ROWS * count, 4096, ends)
    return AttentionPlan((launch,), torch.zeros(1, ROWS, 64, dtype=torch.int32), page_size)


def heads(
    num: int,
    kv: int,
    dim: int,
    dtype: torch.dtype,
    page_size: int,
    count: int,
    kv_dtype: torch.dtype | None = None,
    scores: Scores | None = None,
    *,
    gpu: Gpu,
    counters: torch.Tensor | None = None,
    lists: bool = False,
) -> None:
    """Attention with so many heads."""
    caches = [torch.zeros(64, kv, dim).to(kv_dtype or dtype) for _ in range(2)]
    q = torch.zeros(ROWS * count, num, dim, dtype=dtype)
    attention.attention(q, *caches, plan(page_size, count), scores or Scores(0.1), gpu, counters, lists=lists)


def attend(gpu: Gpu) -> None:
    """Attention of all kinds."""
    bf16 = torch.bfloat16
    for count in (1, 300):
        heads(32, 8, 128, bf16, 64, count, gpu=gpu)
        heads(32, 8, 128, bf16, 1, count, torch.float8_e4m3fn, gpu=gpu)
        heads(16, 8, 256, bf16, 16, count, None, Scores(0.1, window=1024, cap=50.0), gpu=gpu)
        heads(64, 8, 64, bf16, 16, count, None, Scores(0.1, window=128, sinks=torch.zeros(64)), gpu=gpu)
        heads(32, 32, 96, torch.float16, 16, count, gpu=gpu)
        heads(32, 32, 128, bf16, 16, count, None, Scores(0.1, slopes=torch.zeros(32)), gpu=gpu)
        heads(8, 2, 128, torch.float32, 16, count, gpu=gpu)


def llama(gpu: Gpu) -> None:
    """Attention of Llama-3.1-8B: decodes and prompts."""
    for count in (1, 300):
        heads(32, 8, 128, torch.bfloat16, 64, count, gpu=gpu)


def narrow(gpu: Gpu) -> None:
    """Attention of Llama-3.1-8B over pages of 8 bits: decodes alone."""
    heads(32, 8, 128, torch.bfloat16, 64, 1, torch.float8_e4m3fn, gpu=gpu)


def fused(gpu: Gpu) -> None:
    """Kernels that do the work of several, at the sizes of Llama-3.1-8B, and of DeepSeek-V3's latents."""
    bf16, counters = torch.bfloat16, attention.split_counters(gpu, torch.device("cpu"))
    heads(32, 8, 128, bf16, 64, 1, gpu=gpu, counters=counters)
    ops = CudaFusedOps(CudaOps(bf16, gpu))
    x, weight = torch.zeros(4, 4096, dtype=bf16), torch.zeros(4096, dtype=bf16)
    for scheme in (Fp8(), Fp8(128), Int8()):
        ops.add_rms_norm(x, torch.zeros_like(x), weight, 1e-6, lacking(scheme, 1, 6144, 4096))
        ops.act_and_mul(torch.zeros(4, 28672, dtype=bf16), "silu", lacking(scheme, 1, 4096, 14336))
    sums = gemms.split_counters(gpu, torch.device("cpu"))
    gemms.gemm(x[:1], lacking(Fp8(), 1, 4096, 4096), gpu, counters=sums)
    gemms.gemm(x, lacking(Int8(), 1, 4096, 4096), gpu, counters=sums)
    gemms.gated_product(x, torch.empty(1, dtype=bf16).expand(28672, 4096), gpu)
    router = torch.empty(1, dtype=bf16).expand(128, 4096)
    norm_inputs = NormInputs(x, torch.zeros_like(x), weight, 1e-6)
    norm_product(norm_inputs, torch.empty(1, dtype=bf16).expand(28672, 4096), gpu, bf16, is_gated=True)
    norm_product(norm_inputs, router, gpu, torch.float32, keeps_norm=True)
    route = torch.zeros(64, 8, dtype=torch.int64)
    moe_align_block_size(route, 128, 16, fuses=True)
    counter = torch.zeros(1, dtype=torch.int32)
    for num_experts, groups in ((128, 1), (256, 8)):
        routing = Routing(top_k=8, normalizes=True, num_groups=groups, top_groups=(groups + 1) // 2)
        CudaExperts(gpu, "all", counter=counter).route(torch.zeros(4, num_experts), None, routing)
    ints = torch.zeros(256, dtype=torch.int64)
    tables = torch.zeros(1, 257, 64, dtype=torch.int32)
    ops.begin_decodes(torch.zeros(4, 256, dtype=torch.int32), SlotTensors(tables, ints, ints), 64)
    ops.sampling_inputs(ints, ints, SlotParams(torch.zeros(3, 256), ints, ints, 128256), (0, False))
    norms = LatentNorms(torch.zeros(1536, dtype=bf16), 1e-6, torch.zeros(512, dtype=bf16), 1e-6)
    caches = torch.zeros(64, 1, 512, dtype=bf16), torch.zeros(64, 1, 64, dtype=bf16)
    table = torch.zeros(4, 32)
    prepare_latents(torch.zeros(4, 2112, dtype=bf16), norms, table, table, caches, ints[:4])


def summed(gpu: Gpu) -> None:
    """Norms of sums over two and over eight ranks, of Llama-3.1-8B and of Qwen2.5-72B, also in 8 bits and
    where kernels start early."""
    bf16 = torch.bfloat16
    for ranks, size, scheme, early in ((2, 4096, None, False), (8, 8192, Fp8(), gpu.is_hopper)):
        sums = NormSums(torch.zeros(1, dtype=torch.uint8), [0] * ranks, 0)
        x, weight = torch.zeros(4, size, dtype=bf16), torch.zeros(size, dtype=bf16)
        ops = CudaFusedOps(CudaOps(bf16, replace(gpu, starts_early=early)), sums)
        feeds = None if scheme is None else lacking(scheme, 1, 1024, size)
        ops.add_rms_norm_of_ranks(NormInputs(x, torch.zeros_like(x), weight, 1e-6), feeds)


def absorbed(num: int, count: int, gpu: Gpu) -> None:
    """Absorbed MLA with so many heads, of rows of `count` queries."""
    metadata = plan(64, count)
    launch, found = metadata.launches[0], torch.empty(ROWS * count, num, 512, dtype=torch.bfloat16)
    q, rope = (torch.zeros(ROWS * count, num, dim, dtype=torch.bfloat16) for dim in (512, 64))
    caches = [torch.zeros(64, 1, dim, dtype=torch.bfloat16) for dim in (512, 64)]
    attention.launch_attention(
        found, q, caches[0], caches[0], launch, metadata, Scores(0.1), gpu, rope, caches[1]
    )


def latent(gpu: Gpu) -> None:
    """Absorbed MLA."""
    for num in (16, 128):
        for count in (1, 16):
            absorbed(num, count, gpu)


def forms(gpu: Gpu) -> None:
    """Attention in forms that are not the default on Hopper (attention_tiles.py), of prompts and of MLA."""
    tiles, chosen = attention_tiles, dict(attention_tiles.CHOSEN)
    for name in ("tma", "tma, steps of 128", "roles, 2 groups"):
        tiles.CHOSEN["prompt"] = tiles.PROMPTS[name]
        heads(32, 8, 128, torch.bfloat16, 64, 300, gpu=gpu)
    tiles.CHOSEN["few latents"] = tiles.FEW_LATENTS["tma, 64 keys"]
    absorbed(16, 1, gpu)
    tiles.CHOSEN.update(chosen)


def latent_roles(gpu: Gpu) -> None:
    """Absorbed MLA whose warps have roles: decodes of 16 and of 128 heads with splits of keys, and chunks."""
    tiles, chosen = attention_tiles, dict(attention_tiles.CHOSEN)
    tiles.CHOSEN.update({"few latents": tiles.ROLES, "latents": tiles.ROLES})
    for num, count in ((16, 1), (128, 1), (128, 16)):
        absorbed(num, count, gpu)
    tiles.CHOSEN.update(chosen)


def few(gpu: Gpu) -> None:
    """A layer of Llama-3.1-8B for one sequence and for eight, where kernels start early."""
    gpu, bf16 = replace(gpu, starts_early=True), torch.bfloat16
    weight = torch.empty(1, dtype=bf16).expand(28672, 4096)
    for count in (1, 8):
        x = torch.zeros(count, 4096, dtype=bf16)
        gemv(x, weight[:6144], None, gpu)
        gemv(x, weight, None, gpu, is_gated=True)
    norm_product(NormInputs(x, torch.zeros_like(x), weight[0], 1e-6), weight, gpu, bf16, is_gated=True)
    ops = CudaOps(bf16, gpu)
    ops.add_rms_norm(x, torch.zeros_like(x), weight[0], 1e-6)
    caches, at = [torch.zeros(64, 8, 128, dtype=bf16) for _ in range(2)], torch.zeros(4, dtype=torch.int64)
    table = torch.zeros(4, 64)
    CudaFusedOps(ops).prepare_heads(torch.zeros(4, 6144, dtype=bf16), None, table, table, *caches, at)
    counters = attention.split_counters(gpu, torch.device("cpu"), lists=True)
    heads(32, 8, 128, bf16, 64, 1, gpu=gpu, counters=counters, lists=True)


def rows(gpu: Gpu) -> None:
    """Kernels over rows of activations."""
    bf16 = torch.bfloat16
    x, weight, table = torch.zeros(4, 4096, dtype=bf16), torch.zeros(4096, dtype=bf16), torch.zeros(4, 64)
    add_rms_norm(x, torch.zeros_like(x), weight, 1e-6)
    rms_norm(x, weight, 1e-6)
    rms_norm(x.unflatten(1, (32, 128)), weight.unflatten(0, (32, 128)), 1e-6)
    rotary(x.unflatten(1, (32, 128)), table, table)
    pages, places = torch.zeros(4, 4096, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    copy_pages(pages.unsqueeze(1), pages.unsqueeze(1), places, places)
    for kind in ("silu", "gelu", "gelu_tanh"):
        act_and_mul(x, kind)
    for dtype in (bf16, torch.float8_e4m3fn, torch.float8_e5m2):
        caches, at = (
            [torch.zeros(64, 8, 128, dtype=bf16).to(dtype) for _ in range(2)],
            torch.zeros(4, dtype=torch.int64),
        )
        store_kv(*x.unflatten(1, (32, 128)).split((8, 8, 16), 1)[:2], *caches, at)
        prepare_heads(x, (weight, 1e-6), table, table, *caches, at)


def logits(gpu: Gpu) -> None:
    """Sampling, grammar masks and penalties."""
    found, ids = torch.zeros(2, 151936), torch.zeros(2, dtype=torch.int64)
    sampling_inputs = SamplingInputs(
        torch.zeros(2), torch.zeros(2), ids, torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    )
    sample(found, sampling_inputs)
    mask(found, ids, torch.zeros(2, 151936 // 32, dtype=torch.int32))
    apply_penalties(
        found,
        ids,
        Seen(
            torch.zeros(2, 151936, dtype=torch.int32),
            torch.zeros(2, 151936, dtype=torch.bool),
            torch.zeros(2, 3),
        ),
        ids,
    )


def adapted(gpu: Gpu) -> None:
    """Queries, keys and values of Llama-3.1-8B with adapters of rank 16, decoding and prompting."""
    parts = ((0, 4096), (4096, 1024), (5120, 1024))
    weights = LoraWeights(
        torch.empty(8, 3, 16, 4096, dtype=torch.bfloat16),
        torch.empty(8, 6144, 16, dtype=torch.bfloat16),
        parts,
    )
    layer = CudaLoraOps(gpu, torch.device("cpu"), 8)
    for count in (64, 4096):
        out, x = (
            torch.empty(count, 6144, dtype=torch.bfloat16),
            torch.empty(count, 4096, dtype=torch.bfloat16),
        )
        layer.add(out, x, weights, layer.plan_rows(torch.zeros(count, dtype=torch.int64)))


def packings(gpu: Gpu) -> None:
    """What no card has run yet: weights in fragments, experts of gpt-oss in MXFP4, sums by block."""
    bf16 = torch.bfloat16
    for count in (1, 4096):
        gemm(torch.empty(count, 4096, dtype=bf16), fragments("fragments4", 1, 6144, 4096), gpu)
    layer = CudaExperts(gpu)
    for count in (1, 4096):
        pair = fragments("mxfp4", 32, 5760, 2880), fragments("mxfp4", 32, 2880, 2880)
        x, ids = torch.empty(count, 2880, dtype=bf16), torch.zeros(count, 4, dtype=torch.int64)
        layer.apply(x, ids, torch.zeros(count, 4), pair)
    gemm(torch.empty(4096, 4096, dtype=bf16), by_block(1, 6144, 4096), gpu)


SCHEMES: list[Scheme] = [
    Fp8(),
    Fp8(activations="none"),
    Fp8(128),
    Int8(),
    PackedInt(4, 128, has_zero_points=True),
    PackedInt(4, 0, activations="token"),
    PackedInt(4, 128, activations="token"),
    PackedInt(8, 128),
]


def linears(gpu: Gpu) -> None:
    """A layer of Llama-3.1-8B, from one row to many."""
    for scheme in SCHEMES:
        for count in (1, 30, 64, 4096):
            gemm(torch.empty(count, 4096, dtype=torch.bfloat16), lacking(scheme, 1, 6144, 4096), gpu)


def experts(gpu: Gpu) -> None:
    """Qwen3-30B-A3B, and how DeepSeek-V3 routes."""
    layer = CudaExperts(gpu)
    whole = tuple(
        pack_dense(torch.empty(1, dtype=torch.bfloat16).expand(128, *shape))
        for shape in ((1536, 2048), (2048, 768))
    )
    pairs = [
        whole,
        *((lacking(scheme, 128, 1536, 2048), lacking(scheme, 128, 2048, 768)) for scheme in SCHEMES),
    ]
    for pair in pairs:
        for tokens in (1, 64, 4096):
            ids, shares = torch.zeros(tokens, 8, dtype=torch.int64), torch.zeros(tokens, 8)
            layer.apply(torch.empty(tokens, 2048, dtype=torch.bfloat16), ids, shares, pair)
    layer.route(torch.zeros(2, 128), None, Routing(top_k=8, normalizes=True))
    layer.route(
        torch.zeros(2, 256),
        torch.zeros(256),
        Routing(
            top_k=8,
            score="sigmoid",
            num_groups=8,
            top_groups=4,
            group_score="two largest",
            normalizes=True,
            scale=2.5,
        ),
    )


def hopper(gpu: Gpu) -> None:
    """The few launches of linear layers and experts that tests compile."""
    for scheme, count in (
        (Fp8(), 4096),
        (Fp8(128), 1),
        (Int8(), 64),
        (PackedInt(4, 128, has_zero_points=True), 1),
    ):
        gemm(torch.empty(count, 4096, dtype=torch.bfloat16), lacking(scheme, 1, 6144, 4096), gpu)
    pair = tuple(
        pack_dense(torch.empty(1, dtype=torch.bfloat16).expand(128, *shape))
        for shape in ((1536, 2048), (2048, 768))
    )
    layer, ids = CudaExperts(gpu), torch.zeros(4096, 8, dtype=torch.int64)
    layer.apply(torch.empty(4096, 2048, dtype=torch.bfloat16), ids, torch.zeros(4096, 8), pair)
    layer.route(torch.zeros(2, 128), None, Routing(top_k=8, normalizes=True))


def states(gpu: Gpu) -> None:
    """A token of Nemotron-H's scan, of Qwen3-Next's delta rule and of Kimi Linear's."""
    steps, slots = TritonStateSteps(), torch.zeros(ROWS, dtype=torch.int64)
    x, step, groups = torch.zeros(ROWS, 128, 64), torch.zeros(ROWS, 128), torch.zeros(ROWS, 8, 128)
    for dtype in (torch.float32, torch.bfloat16):
        steps.scan(torch.zeros(128), (x, step, groups, groups), torch.zeros(2, 128, 64, 128).to(dtype), slots)
    heads, rate = torch.zeros(ROWS, 32, 128), torch.zeros(ROWS, 32)
    for decay in (torch.zeros(ROWS, 32, 1), heads):
        steps.delta((heads, heads, heads, decay, rate), torch.zeros(2, 32, 128, 128), slots)


def towers(gpu: Gpu) -> None:
    """Towers of Qwen2.5-VL (whole images and windows), of SigLIP, whose pooling has one query, and of
    Whisper; and one in float32."""
    attend, bf16 = TritonTowers(gpu), torch.bfloat16
    for count, keys, heads, dim in (
        (4096, 4096, 16, 80),
        (64, 64, 16, 80),
        (729, 729, 16, 72),
        (1, 729, 16, 72),
    ):
        attend(*(torch.empty(1, heads, num, dim, dtype=bf16) for num in (count, keys, keys)))
    for dim, dtype in ((64, bf16), (128, bf16), (80, torch.float32)):
        attend(*(torch.empty(1, 4, 1500, dim, dtype=dtype) for _ in range(3)))


LAUNCHES = {
    "attend": attend,
    "llama": llama,
    "narrow": narrow,
    "fused": fused,
    "summed": summed,
    "few": few,
    "forms": forms,
    "latent": latent,
    "latent_roles": latent_roles,
    "rows": rows,
    "logits": logits,
    "linears": linears,
    "experts": experts,
    "hopper": hopper,
    "packings": packings,
    "adapted": adapted,
    "states": states,
    "towers": towers,
}
