"""Ascend NPUs through torch_npu and CANN: `--device npu`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from runtime.devices.all_to_all import AllToAllModes, MoeAllToAll
from runtime.devices.ascend.facts import FACTS
from runtime.devices.ascend.options import AscendOptions
from runtime.devices.ascend.soc import Soc, expert_layout, soc_named
from runtime.devices.base import Collectives, Device
from runtime.devices.options import read_options
from runtime.devices.single_rank import SingleRank
from runtime.devices.stages import StageLinks
from runtime.devices.torch_all_to_all import open_all_to_all
from runtime.devices.torch_collectives import open_attention_ranks, open_links
from runtime.errors import StartError
from runtime.layers.side_stream import SideStream
from runtime.messages.ranks import StartRank
from runtime.models.config.model_config import ModelConfig, read_config

if TYPE_CHECKING:
    from runtime.devices.ascend.collectives import HcclCollectives
    from runtime.devices.ascend.moe import AscendExperts
    from runtime.devices.ascend.ops import AscendOps
    from runtime.devices.ascend.prefetch import WeightPrefetch

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
    check_soc(options)
    torch.npu.config.allow_internal_format = True  # FRACTAL_NZ
    return torch.device("npu", number)


def open_device(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
    """Opens this rank's NPU. Raises StartError where something that it needs is missing."""
    import_npu()
    from runtime.devices.ascend.attention import tower_attention
    from runtime.devices.ascend.checks import check_model
    from runtime.devices.ascend.fused import AscendFusedOps
    from runtime.devices.ascend.graphs import AscendGraphs
    from runtime.devices.ascend.memory import AscendMemory
    from runtime.devices.ascend.mla_prolog import Prologs
    from runtime.devices.ascend.moe import AscendExperts
    from runtime.devices.ascend.profiler import AscendRecording
    from runtime.devices.ascend.sparse_latents import AscendSparseLatents

    set_threads(start)
    options = read_options(start, AscendOptions)
    torch_device = set_device(options, start.index_on_node(rank), start.first_device)
    hccl, links = open_ranks(start, rank, torch_device)
    ranks: Collectives = SingleRank() if hccl is None else hccl
    prefetch = open_prefetch(options.prefetch_mb, hccl)
    config = model_config(start)
    has_int8_cache = start.kv_dtype == "int8"
    ops_of = partial(make_ops, dtype, start.page_size, torch_device, options, has_int8_cache, prefetch)
    ops = ops_of(config)
    check_model(start, config, ops, torch_device, rank % start.tp_size)
    experts = AscendExperts(dtype, num_groups=start.ep_size, quantized=ops.quantized)
    return Device(
        FACTS,
        torch_device,
        ops,
        experts,
        AscendMemory(start.ranks_on_machine, is_sparse=ops.is_sparse, batches_copies=options.batches_copies),
        ranks,
        None if ops.in_torch else AscendGraphs(ops.triangle, is_sparse=ops.is_sparse),
        ep_size=start.ep_size,
        all_to_all=open_exchange(start, config, options.exchange_buffer_mb, hccl, experts),
        fused=AscendFusedOps(ops),
        tower_attention=tower_attention,
        streams=torch.npu,
        record_profile=AscendRecording,
        stage=start.stage_of(rank),
        links=links,
        mla_prologs=Prologs(
            start.page_size,
            wants_fused=options.mla_prolog and start.adapters is None,
            requires_fused=options.requires_mla_prolog,
            is_nz=options.nz_cache,
        ),
        sparse_latents=AscendSparseLatents(ops),
        side_stream=SideStream(torch.npu) if options.multi_stream else None,
        gathers_after_q=options.gather_after_q or start.gathers_latents,
        expert_places=start.expert_places,
        attention=open_attention_ranks(ranks, start),
        prompt_split=start.prompt_split,
        replicates_dense=start.replicates_dense,
        scatters_inputs=start.scatters_inputs,
        overlap=start.overlap,
        for_drafts=partial(device_of_drafts, ops_of=ops_of, is_sparse=ops.is_sparse),
    )


def set_threads(start: StartRank) -> None:
    """Sets the CPU threads of this rank, where they are given."""
    if start.num_threads is not None:
        torch.set_num_threads(start.num_threads)


def make_ops(
    dtype: torch.dtype,
    page_size: int,
    torch_device: torch.device,
    options: AscendOptions,
    has_int8_cache: bool,
    prefetch: "WeightPrefetch | None",
    config: ModelConfig | None,
) -> "AscendOps":
    """Ops for the weights of one model, or of none. `has_int8_cache`, `prefetch`: as of AscendOps."""
    from runtime.devices.ascend.ops import AscendOps

    return AscendOps(
        dtype,
        page_size,
        torch_device,
        is_nz=options.nz_cache and config is not None and keeps_nz(config),
        is_sparse=has_indexer(config),
        has_int8_index=options.int8_index,
        has_int8_cache=has_int8_cache,
        in_torch=config is not None and (bool(config.scores.cap) or config.scores.is_biased),
        prefetch=prefetch,
        sampling=options.sampling_backend,
    )


def keeps_nz(config: ModelConfig) -> bool:
    """Whether the pages of a model can be in NZ: those of latents, and those of heads whose attention in NZ
    CANN's tiling has."""
    if config.mla is not None:
        return True
    is_plain = not config.scores.cap and not config.scores.is_biased
    return is_plain and len(config.head_sizes) == 1 and config.head_dim in FACTS.nz_heads


def open_prefetch(megabytes: int, hccl: "HcclCollectives | None") -> "WeightPrefetch | None":
    """What loads weights during collectives; None: nothing does, or there are none."""
    from runtime.devices.ascend.prefetch import WeightPrefetch

    if not megabytes or hccl is None:
        return None
    prefetch = WeightPrefetch(megabytes << 20)
    hccl.meanwhile = prefetch.begin
    return prefetch


def has_indexer(config: ModelConfig | None) -> bool:
    """Whether tokens attend to those that an indexer chooses."""
    return config is not None and config.mla is not None and config.mla.indexer is not None


def device_of_drafts(
    device: Device, config: ModelConfig, *, ops_of: "Callable[[ModelConfig], AscendOps]", is_sparse: bool
) -> Device:
    """The device of a draft model's layers, whose attention may be of another kind than the target's, which
    `is_sparse` or not: Ops plan it by the weights that they have packed. Raises StartError for attention to
    all tokens behind attention to chosen ones, or the reverse: captured passes are planned as the target's
    steps are."""
    from runtime.devices.ascend.fused import AscendFusedOps
    from runtime.devices.ascend.sparse_latents import AscendSparseLatents

    if is_sparse != has_indexer(config):
        raise StartError(
            "on --device npu a draft model attends to tokens that an indexer chooses if the model does so, "
            "and only then; take NEXTN or NGRAM as --speculative-algorithm"
        )
    ops = ops_of(config)
    sparse = AscendSparseLatents(ops)
    return replace(device, ops=ops, fused=AscendFusedOps(ops), sparse_latents=sparse, for_drafts=None)


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
    start: StartRank,
    config: ModelConfig | None,
    buffer_mb: int | None,
    hccl: "HcclCollectives | None",
    experts: "AscendExperts",
) -> AllToAllModes | None:
    """The exchange of tokens between the ranks of experts; None: there is none. `buffer_mb`: of its buffer;
    None: as many megabytes as decode steps need."""
    from runtime.devices.ascend.all_to_all import DispatchCombine
    from runtime.devices.ascend.collectives import group_name

    if hccl is None or config is None or config.moe is None:
        return None
    soc, copies = read_soc(), 0 if start.expert_places is None else start.expert_places.num_copies
    layout = expert_layout(config.moe, config.hidden_size, hccl.size, copies)

    def low_latency(fixed: MoeAllToAll) -> MoeAllToAll:
        if soc is None or not soc.takes(layout):
            return fixed
        size = soc.buffer_mb(layout, decode_tokens(start)) if buffer_mb is None else buffer_mb
        group = group_name(hccl.rank, hccl.own_group(size))
        return DispatchCombine(group, hccl.rank, hccl.size, experts, fixed, soc, size)

    return open_all_to_all(start.moe_a2a_backend, start.deepep_mode, hccl, experts, low_latency)


def decode_tokens(start: StartRank) -> int:
    """The most tokens of one rank in a step that decodes or verifies drafts."""
    each = 1 if start.speculation is None else start.speculation.num_draft_tokens
    return -(-start.max_slots * each // start.attention_layout.group_size)


def open_ranks(
    start: StartRank, rank: int, torch_device: torch.device
) -> tuple["HcclCollectives | None", StageLinks | None]:
    """The ranks of this one's stage, None for a single one; of several stages also the links between them."""
    from runtime.devices.ascend.collectives import HcclCollectives

    if start.num_ranks == 1:
        return None, None
    hccl = HcclCollectives(rank, start.tp_size, start.rendezvous, torch_device, num_stages=start.pp_size)
    return hccl, open_links(hccl, torch_device, start.steps_in_flight)


def model_config(start: StartRank) -> ModelConfig | None:
    """The configuration of the model; None: there is none. Raises ModelError."""
    if not start.model_path:
        return None
    return read_config(
        start.model_path,
        is_embedding=start.is_embedding,
        pooling=start.pooling,
        quantization=start.quantization,
        overrides=start.config_overrides,
        model_impl=start.model_impl,
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
