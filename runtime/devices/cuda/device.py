"""NVIDIA GPUs through torch and Triton: `--device cuda`."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from runtime.devices.attention_backends import BACKENDS
from runtime.devices.base import Collectives, Device
from runtime.devices.cuda.facts import FACTS
from runtime.devices.cuda.green_contexts import open_partitions
from runtime.devices.cuda.options import CudaOptions
from runtime.devices.options import read_options
from runtime.devices.single_rank import SingleRank
from runtime.devices.stages import StageLinks
from runtime.devices.torch_all_to_all import open_all_to_all
from runtime.devices.torch_collectives import open_attention_ranks, open_links
from runtime.errors import StartError, install_line
from runtime.layers.side_stream import SideStream
from runtime.messages.ranks import StartRank

if TYPE_CHECKING:
    from runtime.devices.cuda.attention_backends import HybridAttentionBackend
    from runtime.devices.cuda.graphs import CudaGraphs
    from runtime.devices.cuda.kernels.launch import Gpu
    from runtime.devices.cuda.norm_sums import NormSums

INSTALL = f"install a torch that is built for CUDA, and triton: {install_line('cuda')}"
OLDEST = (8, 0)  # asynchronous copies and bfloat16 products
EARLY = (9, 0)  # programmatic dependent launch


def set_device(options: CudaOptions, rank: int, before: int = 0) -> torch.device:
    """Takes this rank's GPU, behind the `before` ones of other replicas. Raises StartError where there is
    none, or one too old."""
    if torch.version.cuda is None:
        raise StartError(
            f"--device cuda needs a torch with CUDA, and this is torch {torch.__version__}; {INSTALL}"
        )
    first, step = options.base_gpu_id, options.gpu_id_step
    number, count = first + (before + rank) * step, torch.cuda.device_count()
    if count == 0:
        raise StartError(
            "--device cuda finds no GPU; look at nvidia-smi, at the driver, and at CUDA_VISIBLE_DEVICES"
        )
    if number >= count:
        raise StartError(
            f"rank {rank} needs GPU {number} (--base-gpu-id {first}, --gpu-id-step {step}), and there are "
            f"{count}, from 0; lower --tensor-parallel-size or these two"
        )
    capability = torch.cuda.get_device_capability(number)
    if capability < OLDEST:
        raise StartError(
            f"GPU {number} ({torch.cuda.get_device_name(number)}) has compute capability "
            f"{'.'.join(map(str, capability))}; --device cuda needs {'.'.join(map(str, OLDEST))} or more"
        )
    if options.starts_early and capability < EARLY:
        raise StartError(
            f"--enable-pdl: GPU {number} ({torch.cuda.get_device_name(number)}) has compute capability "
            f"{'.'.join(map(str, capability))}, and kernels start early from {'.'.join(map(str, EARLY))} on; "
            "leave it out"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def check_peers(options: CudaOptions, own: int, first: int, count: int) -> None:
    """Raises StartError unless GPU `own` has access to the memory of the `count` GPUs of its replica on this
    machine, of which the first is number `first`."""
    for number in range(first, first + count * options.gpu_id_step, options.gpu_id_step):
        if number != own and not torch.cuda.can_device_access_peer(own, number):
            raise StartError(
                f"--enable-p2p-check: GPU {own} has no access to the memory of GPU {number} (nvidia-smi topo "
                "-p2p r shows it); choose others with --base-gpu-id and --gpu-id-step, or leave it out"
            )


def open_ranks(
    start: StartRank, rank: int, torch_device: torch.device, options: CudaOptions
) -> tuple[Collectives, StageLinks | None]:
    """Meets the other ranks: collectives of this rank's stage, and links to other stages. Raises
    StartError."""
    if start.num_ranks == 1:
        return SingleRank(), None
    if options.checks_peers:
        first = options.base_gpu_id + start.first_device * options.gpu_id_step
        check_peers(options, torch_device.index, first, start.ranks_on_node)
    from runtime.devices.cuda.collectives import NcclCollectives

    ranks = NcclCollectives(
        rank,
        start.tp_size,
        start.rendezvous,
        torch_device,
        symm_mem=options.symm_mem,
        nccl_window=options.nccl_window,
        num_stages=start.pp_size,
    )
    return ranks, open_links(ranks, torch_device, start.steps_in_flight)


def open_norm_sums(ranks: Collectives, torch_device: torch.device, options: CudaOptions) -> "NormSums | None":
    """Memory through which norms sum over ranks; None: ranks sum before."""
    from runtime.devices.cuda.collectives import NcclCollectives

    if options.kernel_fusion != "all" or not isinstance(ranks, NcclCollectives):
        return None
    return ranks.open_norm_sums(torch_device)


def has_all_experts(start: StartRank) -> bool:
    """Whether this rank has all experts, or a part of each, at places of their own numbers."""
    return start.ep_size == 1 and start.expert_places is None


def open_graphs(
    start: StartRank,
    torch_device: torch.device,
    options: CudaOptions,
    attention_backend: "HybridAttentionBackend | None",
) -> "CudaGraphs | None":
    """Graphs of a start that captures steps; None: it captures none."""
    from runtime.devices.cuda.graphs import CudaGraphs

    if not (start.graph_sizes or start.piecewise_sizes):
        return None
    return CudaGraphs(torch_device, allows_gc=options.cudagraph_gc, attention_backend=attention_backend)


def open_attention(
    start: StartRank, dtype: torch.dtype, gpu: "Gpu", options: CudaOptions
) -> "HybridAttentionBackend | None":
    """Attention of other packages; None: our own kernels are all."""
    from runtime.devices.cuda.attention_backends import open_hybrid_backend
    from runtime.devices.cuda.cudnn_pages import GraphSizes

    sizes = GraphSizes(start.max_slots, start.max_step_tokens, start.max_len)
    capability = torch.cuda.get_device_capability()
    return open_hybrid_backend(*options.attention_backends, dtype, gpu, capability, sizes)


def open_device(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
    """Opens this rank's GPU. Raises StartError where something that it needs is missing."""
    options = read_options(start, CudaOptions)
    torch_device = set_device(options, start.index_on_node(rank), start.first_device)
    try:
        from runtime.devices.cuda.compile_ahead import open_compiler
        from runtime.devices.cuda.flashinfer_states import open_state_steps
        from runtime.devices.cuda.fused import CudaFusedOps
        from runtime.devices.cuda.kernels.launch import gpu_of
        from runtime.devices.cuda.lora import open_lora_ops
        from runtime.devices.cuda.memory import CudaMemory
        from runtime.devices.cuda.mla_prolog import CudaPrologs
        from runtime.devices.cuda.moe import CudaExperts, route_counter
        from runtime.devices.cuda.ops import CudaOps, SplitCounters
        from runtime.devices.cuda.towers import open_towers
    except ModuleNotFoundError as error:
        raise StartError(f"--device cuda needs {error.name}, which is not installed; {INSTALL}") from error
    if start.num_threads is not None:
        torch.set_num_threads(start.num_threads)
    ranks, links = open_ranks(start, rank, torch_device, options)
    gpu = replace(gpu_of(torch_device), starts_early=options.starts_early)
    attention_backend = open_attention(start, dtype, gpu, options)
    fusion = options.kernel_fusion
    counters = SplitCounters.of(fusion, gpu, torch_device, lists=options.lists_work)
    ops = CudaOps(
        dtype, gpu, options.fp8_gemm_backend, attention_backend, fusion, counters, options.gemv_rows
    )
    counter = route_counter(torch_device, are_all_here=has_all_experts(start), fusion=fusion)
    experts = CudaExperts(gpu, fusion, counter=counter)
    return Device(
        FACTS,
        torch_device,
        ops,
        experts,
        CudaMemory(start.ranks_on_machine, torch_device),
        ranks,
        open_graphs(start, torch_device, options, attention_backend),
        ep_size=start.ep_size,
        all_to_all=open_all_to_all(start.moe_a2a_backend, start.deepep_mode, ranks, experts),
        tower_attention=open_towers(options.tower_attention, gpu),
        lora_ops=open_lora_ops(start.adapters, gpu, torch_device),
        fused=CudaFusedOps(ops, open_norm_sums(ranks, torch_device, options)),
        state_steps=open_state_steps(start.recurrent_backend),
        mla_prologs=None if fusion == "off" else CudaPrologs(),
        joins_latents=any(BACKENDS[name].joins_latents for name in options.attention_backends),
        streams=torch.cuda,
        partitions=open_partitions(start.multiplexing, torch_device),
        side_stream=SideStream(torch.cuda) if fusion == "all" else None,
        take_pages=None if attention_backend is None else attention_backend.take_pages,
        compiler=open_compiler(options, torch_device, start.ranks_on_machine),
        expert_places=start.expert_places,
        attention=open_attention_ranks(ranks, start),
        prompt_split=start.prompt_split,
        replicates_dense=start.replicates_dense,
        scatters_inputs=start.scatters_inputs,
        gathers_after_q=start.gathers_latents,
        overlap=start.overlap,
        stage=start.stage_of(rank),
        links=links,
    )
