"""Ascend NPUs through torch_npu and CANN: `--device npu`."""

import os
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs

from runtime.devices.all_to_all import AllToAllModes, MoeAllToAll
from runtime.devices.ascend.facts import FACTS
from runtime.devices.ascend.options import AscendOptions
from runtime.devices.ascend.soc import HCCL_MB, Soc, soc_named
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.base import Collectives, Device, Ops
from runtime.devices.options import read_options
from runtime.devices.single_rank import SingleRank
from runtime.devices.stages import StageLinks
from runtime.devices.torch_all_to_all import open_all_to_all
from runtime.devices.torch_collectives import open_attention_ranks, open_links
from runtime.errors import StartError
from runtime.layers.side_stream import SideStream
from runtime.messages.ranks import StartRank
from runtime.models.config.block import ScoreKind
from runtime.models.config.mla_config import MlaConfig
from runtime.models.config.model_config import read_config
from runtime.models.config.shares import even_part

if TYPE_CHECKING:
    from runtime.devices.ascend.collectives import HcclCollectives
    from runtime.devices.ascend.moe import AscendExperts
    from runtime.devices.ascend.ops import AscendOps

MAX_KEYS = 1 << 20  # of one call without pages, which a long prompt's latents are expanded for
MAX_PROBED_QUERIES = 1024  # the most queries of a row in the attention that is tried at start
INSTALL = "install torch and torch_npu of one version, and the CANN toolkit, and source its set_env.sh"


def import_npu() -> ModuleType:
    """Imports torch_npu. Raises StartError where it is missing or does not fit torch or CANN."""
    try:
        import torch_npu
    except ModuleNotFoundError as error:
        raise StartError(f"--device npu needs {error.name}, which is not installed; {INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise StartError(
            f"torch_npu cannot be loaded with torch {torch.__version__} ({first_line(error)}); {INSTALL}"
        ) from error
    return torch_npu


def set_device(options: AscendOptions, rank: int, before: int = 0) -> torch.device:
    """Takes this rank's NPU, behind the `before` ones of other replicas. Raises StartError where there is
    none."""
    first, step = options.base_gpu_id, options.gpu_id_step
    number, count = first + (before + rank) * step, torch.npu.device_count()
    if count == 0:
        raise StartError(
            "--device npu finds no NPU; look at npu-smi info, at the driver, and at ASCEND_RT_VISIBLE_DEVICES"
        )
    if number >= count:
        raise StartError(
            f"rank {rank} needs NPU {number} (--base-gpu-id {first}, --gpu-id-step {step}), and there are "
            f"{count}, from 0; lower --tensor-parallel-size or these two"
        )
    try:
        torch.npu.set_device(number)
        # use installed operators; compile none for new shapes
        torch.npu.set_compile_mode(jit_compile=False)
    except RuntimeError as error:
        raise StartError(
            f"NPU {number} does not answer ({first_line(error)}); look at npu-smi info"
        ) from error
    torch.npu.config.allow_internal_format = True  # FRACTAL_NZ
    return torch.device("npu", number)


def open_device(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
    """Opens this rank's NPU. Raises StartError where something that it needs is missing."""
    import_npu()
    from runtime.devices.ascend.graphs import AscendGraphs
    from runtime.devices.ascend.memory import AscendMemory
    from runtime.devices.ascend.mla_prolog import Prologs
    from runtime.devices.ascend.moe import AscendExperts
    from runtime.devices.ascend.ops import AscendOps

    if start.num_threads is not None:
        torch.set_num_threads(start.num_threads)
    options = read_options(start, AscendOptions)
    torch_device = set_device(options, start.index_on_node(rank), start.first_device)
    check_soc(options)
    hccl, links = open_ranks(start, rank, torch_device)
    ranks: Collectives = SingleRank() if hccl is None else hccl
    prologs = Prologs(
        start.page_size,
        wants_fused=options.mla_prolog and start.adapters is None,
        requires_fused=options.requires_mla_prolog,
        is_nz=options.nz_cache,
    )
    ops = AscendOps(
        dtype, start.page_size, torch_device, is_nz=options.nz_cache, sampling=options.sampling_backend
    )
    check_model(start, ops, dtype, torch_device, rank % start.tp_size)
    experts = AscendExperts(dtype, has_remote_experts=start.ep_size > 1)
    return Device(
        FACTS,
        torch_device,
        ops,
        experts,
        AscendMemory(start.ranks_on_machine),
        ranks,
        AscendGraphs(ops.triangle),
        ep_size=start.ep_size,
        all_to_all=open_exchange(start, hccl, experts),
        streams=torch.npu,
        stage=start.stage_of(rank),
        links=links,
        mla_prologs=prologs,
        side_stream=SideStream(torch.npu) if options.multi_stream else None,
        gathers_after_q=options.gather_after_q or start.gathers_latents,
        expert_places=start.expert_places,
        attention=open_attention_ranks(ranks, start),
        prompt_split=start.prompt_split,
        replicates_dense=start.replicates_dense,
        scatters_inputs=start.scatters_inputs,
        overlap=start.overlap,
    )


def read_soc() -> Soc | None:
    """The generation of this rank's NPU; None: one whose limits are not known."""
    return soc_named(str(torch.npu.get_device_name()))


def check_soc(options: AscendOptions) -> None:
    """Raises StartError where the options plan for another generation than that of this rank's NPU."""
    soc = read_soc()
    if soc is not None and options.soc not in (None, soc.name):
        raise StartError(
            f"--npu-soc {options.soc}, and this NPU is {torch.npu.get_device_name()}, of {soc.title}; leave "
            "--npu-soc out, which is for plans made elsewhere"
        )


def open_exchange(
    start: StartRank, hccl: "HcclCollectives | None", experts: "AscendExperts"
) -> AllToAllModes | None:
    """The exchange of tokens between the ranks of experts; None: there is none."""
    from runtime.devices.ascend.all_to_all import DispatchCombine
    from runtime.devices.ascend.collectives import group_name

    if hccl is None:
        return None
    soc, buffer_mb = read_soc(), int(os.environ.get("HCCL_BUFFSIZE", HCCL_MB))

    def low_latency(fixed: MoeAllToAll) -> MoeAllToAll:
        if soc is None:
            return fixed
        group = group_name(hccl.rank, hccl.own_group())
        return DispatchCombine(group, hccl.rank, hccl.size, experts, fixed, soc, buffer_mb)

    return open_all_to_all(start.moe_a2a_backend, start.deepep_mode, hccl, experts, low_latency)


def open_ranks(
    start: StartRank, rank: int, torch_device: torch.device
) -> tuple["HcclCollectives | None", StageLinks | None]:
    """The ranks of this one's stage, None for a single one; of several stages also the links between them."""
    from runtime.devices.ascend.collectives import HcclCollectives

    if start.num_ranks == 1:
        return None, None
    hccl = HcclCollectives(rank, start.tp_size, start.rendezvous, torch_device, num_stages=start.pp_size)
    return hccl, open_links(hccl, torch_device, start.steps_in_flight)


def check_model(
    start: StartRank, ops: "AscendOps", dtype: torch.dtype, torch_device: torch.device, rank: int
) -> None:
    """Raises StartError where the model's attention, or any attention if there is no model, does not work on
    this NPU. `rank`: of its stage."""
    if not start.model_path:
        return check_attention(ops, dtype, start.page_size, torch_device)
    config = read_config(
        start.model_path,
        is_embedding=start.is_embedding,
        pooling=start.pooling,
        quantization=start.quantization,
        overrides=start.config_overrides,
        model_impl=start.model_impl,
    )
    if structs.replace(config.scores, chunk=0) != ScoreKind():
        raise StartError(
            "this model has attention score caps, sinks or biases of distance, which no paged attention "
            "operator of an NPU supports"
        )
    if config.mla is None:
        check_attention(ops, dtype, start.page_size, torch_device)
    else:
        sharing = start.attention_layout.num_head_ranks
        heads = even_part(config.num_heads, sharing, rank % sharing).size
        if start.max_len > MAX_KEYS:
            raise StartError(
                f"the latent attention of an NPU takes at most {MAX_KEYS} keys in a call; give "
                f"--context-length {MAX_KEYS} or less"
            )
        check_mla(ops, dtype, start.page_size, torch_device, config.mla, heads)
    return None


def check_attention(ops: Ops, dtype: torch.dtype, page_size: int, torch_device: torch.device) -> None:
    """Tries attention of one token. Raises StartError where CANN lacks the operator or it refuses the dtype,
    which would otherwise fail in a step."""
    page = torch.zeros(page_size, 1, 128, dtype=dtype, device=torch_device)
    tables = torch.zeros(1, 1, 1, dtype=torch.int32, device=torch_device)
    try:
        ops.attention(
            page[:1],
            page,
            page,
            ops.plan_attention(fresh_rows([1]), tables, page_size, (0,)),
            Scores(128**-0.5),
        )
        torch.npu.synchronize()
    except RuntimeError as error:
        name = str(dtype).removeprefix("torch.")
        raise StartError(
            f"the attention of this NPU does not work in {name} with --page-size {page_size} "
            f"({first_line(error)}); take --dtype bfloat16 and --page-size 128, and look at the versions of "
            "CANN and torch_npu"
        ) from error


def check_mla(
    ops: "AscendOps",
    dtype: torch.dtype,
    page_size: int,
    torch_device: torch.device,
    latent: MlaConfig,
    num_heads: int,
) -> None:
    """Tries MLA in its three forms, with the sizes of the model. Raises StartError."""
    made = latent.nope_dim + latent.value_dim
    up = ops.pack_latent(
        torch.zeros(num_heads, made, latent.kv_rank, dtype=dtype, device=torch_device), latent.nope_dim
    )
    counts = sorted({1, 2, min(ops.max_absorbed, MAX_PROBED_QUERIES) + 1})
    q = torch.zeros(
        sum(counts), num_heads, latent.nope_dim + latent.rope_dim, dtype=dtype, device=torch_device
    )
    caches = [
        torch.zeros(page_size, 1, size, dtype=dtype, device=torch_device)
        for size in (latent.kv_rank, latent.rope_dim)
    ]
    # one page, repeated
    tables = torch.zeros(1, 1, -(-counts[-1] // page_size), dtype=torch.int32, device=torch_device)
    try:
        plan = ops.plan_attention(fresh_rows(counts), tables, page_size, (0,))
        ops.latent_attention(*q.split((latent.nope_dim, latent.rope_dim), 2), *caches, up, plan, 1.0)
        torch.npu.synchronize()
    except RuntimeError as error:
        name = str(dtype).removeprefix("torch.")
        raise StartError(
            f"the latent attention of this NPU does not work in {name} with {num_heads} heads of "
            f"{latent.nope_dim} and {latent.rope_dim}, latents of {latent.kv_rank} and --page-size "
            f"{page_size} "
            f"({first_line(error)}); take --dtype bfloat16 and another --tensor-parallel-size, and look at "
            "the versions of CANN and torch_npu"
        ) from error


def fresh_rows(counts: list[int]) -> AttentionRows:
    """A step of prompts with `counts` tokens."""
    zeros = np.zeros(len(counts), np.int32)
    return AttentionRows(1, zeros, zeros, np.array(counts, np.int32))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
