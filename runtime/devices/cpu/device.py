"""The cpu device: kernels of our own where they are built, else plain torch; gloo between ranks."""

from pathlib import Path

import torch

from runtime import log
from runtime.devices.base import Collectives, Device
from runtime.devices.cores import usable_cores
from runtime.devices.cpu.collectives import GlooCollectives
from runtime.devices.cpu.decoder import DecoderPrograms
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cpu.ggml import CpuGgml
from runtime.devices.cpu.kept_matrices import KeptPackedWeights
from runtime.devices.cpu.kernels.choice import remedy
from runtime.devices.cpu.matrices import Threads
from runtime.devices.cpu.memory import CpuMemory
from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cpu.packed_folder import PackedFolder
from runtime.devices.cpu.recurrent import CpuRecurrent
from runtime.devices.cpu.row_quantizer import CpuRowQuantizer
from runtime.devices.cpu.sampling import CpuFusedOps
from runtime.devices.cpu.self_check import load_library
from runtime.devices.options import NoOptions, read_options
from runtime.devices.single_rank import SingleRank
from runtime.devices.torch_all_to_all import open_all_to_all
from runtime.devices.torch_collectives import open_attention_ranks, open_links
from runtime.messages.ranks import StartRank


def open_device(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
    """This rank's share of the CPU's threads. Raises StartError."""
    read_options(start, NoOptions)
    num_threads = start.num_threads or max(1, usable_cores() // start.ranks_on_machine)
    torch.set_num_threads(num_threads)
    library = load_library()
    threads = None if library is None else Threads(library, num_threads)
    if library is None:
        log.get("start").warning("no CPU kernels, torch computes: several times slower", remedy=remedy())
    torch_device = torch.device("cpu")
    ranks: Collectives = SingleRank()
    links = None
    if start.num_ranks > 1:
        ranks = gloo = GlooCollectives(rank, start.tp_size, start.rendezvous, num_stages=start.pp_size)
        links = open_links(gloo, torch_device, start.steps_in_flight)
    ops, memory = CpuOps(dtype, threads), CpuMemory(start.ranks_on_machine)
    experts = CpuExperts(ops)
    return Device(
        FACTS,
        torch_device,
        ops,
        experts,
        memory,
        ranks,
        None,
        ep_size=start.ep_size,
        all_to_all=open_all_to_all(start.moe_a2a_backend, start.deepep_mode, ranks, experts),
        fused=None if ops.logits_ops is None else CpuFusedOps(ops, ops.logits_ops),
        logits_ops=ops.logits_ops,
        programs=None if threads is None else DecoderPrograms(threads, memory),
        ggml=None if threads is None else CpuGgml(threads),
        recurrent=None
        if threads is None or start.recurrent_backend == "torch_native"
        else CpuRecurrent(threads),
        row_quantizer=None if threads is None else CpuRowQuantizer(threads),
        stage=start.stage_of(rank),
        links=links,
        kept_weights=None if threads is None else _kept_weights(start, threads),
        expert_places=start.expert_places,
        attention=open_attention_ranks(ranks, start),
        prompt_split=start.prompt_split,
        replicates_dense=start.replicates_dense,
        scatters_inputs=start.scatters_inputs,
        gathers_after_q=start.gathers_latents,
        overlap=start.overlap,
    )


def _kept_weights(start: StartRank, threads: Threads) -> KeptPackedWeights | None:
    """The folder in which packed weights are kept; None: they are not."""
    kept = start.kept_weights
    return (
        KeptPackedWeights(threads, PackedFolder(Path(kept.folder), kept.max_bytes)) if kept.folder else None
    )
