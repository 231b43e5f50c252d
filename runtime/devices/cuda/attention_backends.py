"""Attention kernels of other packages, chosen separately for prefill and decode: `--attention-backend`.

What each backend can do is data, in devices/attention_backends.py; this file opens them. A backend gets the
rows of one phase: all of them decode one token, or they are the other rows. Kernels without attention sinks
return the log-sum-exp of each row, from which `apply_sinks` computes the same result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_backends import BACKENDS
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import attention as paged
from runtime.devices.cuda.cudnn import CudnnBackend
from runtime.devices.cuda.cudnn_pages import USUAL_SIZES, GraphSizes
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.mla import UpProjection, mla_attention
from runtime.errors import StartError
from runtime.layers.attention import sdpa

Metadata = TypeVar("Metadata")
Planned = TypeVar("Planned", contravariant=True)


class AttentionBackend(Protocol[Metadata]):
    """Attention kernels of one phase. `Metadata`: what a step's layers share."""

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> Metadata:
        """Called once a step, with the rows of this phase alone; arguments as in Ops.plan_attention."""
        ...

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> Metadata:
        """The plan of captured decode rows, see Graphs.plan_decodes; for backends that can be captured."""
        ...

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, metadata: Metadata, scores: Scores) -> Tensor:
        """Attention of these rows' queries, see Ops.attention."""
        ...

    def replan(self, metadata: Metadata, lengths: np.ndarray) -> None:
        """Called before the replay of a graph in whose body `metadata` was made. `lengths`: int32 [rows], the
        number of keys of each row."""
        ...


class LatentAttention(Protocol[Planned]):
    """What backends with latent attention (MLA) have in addition."""

    def attend_latents(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: UpProjection,
        metadata: Planned,
        scale: float,
    ) -> Tensor:
        """Latent attention of these rows' queries, see Ops.latent_attention."""
        ...


class TritonBackend:
    """This project's Triton kernels, for one phase where the other phase has another backend."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        self.gpu = gpu

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> paged.AttentionPlan:
        """The plan of these rows."""
        return paged.plan_attention(plan, page_tables, page_size)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> paged.AttentionPlan:
        """The plan of captured decode rows."""
        return paged.plan_decodes(slots, lengths, page_tables, page_size)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, metadata: paged.AttentionPlan, scores: Scores
    ) -> Tensor:
        """Paged attention."""
        return paged.attention(q, keys, values, metadata, scores, self.gpu)

    def attend_latents(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: UpProjection,
        metadata: paged.AttentionPlan,
        scale: float,
    ) -> Tensor:
        """Absorbed or expanded latent attention."""
        return mla_attention(q, q_rope, latents, ropes, up, metadata, scale, self.gpu)

    def replan(self, metadata: paged.AttentionPlan, lengths: np.ndarray) -> None:
        """Nothing to do: the kernels read lengths on the device."""


class TorchNativeBackend:
    """torch's scaled_dot_product_attention over gathered pages, as on the cpu."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        self.dtype = dtype

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> sdpa.AttentionPlan:
        """Gathers the locations of the keys of these rows."""
        return sdpa.plan_attention(plan, page_tables, page_size, windows, self.dtype)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> sdpa.AttentionPlan:
        """Not supported."""
        raise AssertionError("torch_native is not captured")

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, metadata: sdpa.AttentionPlan, scores: Scores
    ) -> Tensor:
        """SDPA over the gathered keys."""
        return sdpa.attend(q, keys, values, metadata, scores)

    def replan(self, metadata: sdpa.AttentionPlan, lengths: np.ndarray) -> None:
        """Not supported."""
        raise AssertionError("torch_native is not captured")


@dataclass(frozen=True, slots=True)
class PhasePlan(Generic[Metadata]):
    """The queries of one phase in a step, with the plan of its backend."""

    queries: slice
    backend: AttentionBackend[Metadata]
    metadata: Metadata


# Backends with plans of different types meet here, and each is handed its own plans only.
AnyBackend = AttentionBackend[Any]
PhasePlans = tuple[PhasePlan[Any], ...]  # of the phases that a step has rows of


class HybridAttentionBackend:
    """A backend for prefill and one for decode, which may be the same."""

    def __init__(self, prefill: AnyBackend, decode: AnyBackend) -> None:
        self.prefill = prefill
        self.decode = decode

    def take_pages(self, caches: Sequence[tuple[Tensor, ...]]) -> None:
        """The caches that a rank keeps, before its first request; see Device.take_pages."""
        if isinstance(self.prefill, CudnnBackend):
            self.prefill.take_pages(caches)

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> PhasePlans:
        """One plan for each phase that the step has rows of; see Ops.plan_attention."""
        phases, num, end = [], plan.num_decodes, int(plan.counts.sum())
        if num:
            metadata = self.decode.plan(
                select_rows(plan, slice(0, num), num), page_tables, page_size, windows
            )
            phases.append(PhasePlan(slice(0, num), self.decode, metadata))
        if num < len(plan.slots):
            metadata = self.prefill.plan(
                select_rows(plan, slice(num, None), 0), page_tables, page_size, windows
            )
            phases.append(PhasePlan(slice(num, end), self.prefill, metadata))
        return tuple(phases)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> PhasePlans:
        """The plan of captured decode rows; see Graphs.plan_decodes."""
        metadata = self.decode.plan_decodes(slots, lengths, page_tables, page_size, windows)
        return (PhasePlan(slice(0, len(slots)), self.decode, metadata),)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, phases: PhasePlans, scores: Scores) -> Tensor:
        """Attention of all rows of the step; see Ops.attention."""
        if len(phases) == 1:
            return phases[0].backend.attend(q, keys, values, phases[0].metadata, scores)
        return torch.cat(
            [phase.backend.attend(q[phase.queries], keys, values, phase.metadata, scores) for phase in phases]
        )

    def attend_latents(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: UpProjection,
        phases: PhasePlans,
        scale: float,
    ) -> Tensor:
        """Latent attention of all rows of the step; see Ops.latent_attention."""
        found = []
        for phase in phases:
            backend = cast(LatentAttention[Any], phase.backend)  # options.rules.kernels refuses others
            part, rope = q[phase.queries], q_rope[phase.queries]
            found.append(backend.attend_latents(part, rope, latents, ropes, up, phase.metadata, scale))
        return found[0] if len(found) == 1 else torch.cat(found)


def select_rows(plan: AttentionRows, rows: slice, num_decodes: int) -> AttentionRows:
    """A plan with some of the rows of a step: slots, starts and counts, which is all that backends read."""
    return AttentionRows(num_decodes, plan.slots[rows], plan.starts[rows], plan.counts[rows])


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention output [T, H, D] with a sink in each head's sum. `lse` float32 [T, H]: the natural logarithm
    of the sums without sinks."""
    return (out * torch.sigmoid(lse - sinks).unsqueeze(2)).to(out.dtype)


# name -> module:class, constructed with (dtype, gpu), that of cuDNN with the sizes of steps as well
BACKEND_CLASSES = {
    "triton": "runtime.devices.cuda.attention_backends:TritonBackend",
    "torch_native": "runtime.devices.cuda.attention_backends:TorchNativeBackend",
    "flex_attention": "runtime.devices.cuda.flex:FlexAttentionBackend",
    "cudnn": "runtime.devices.cuda.cudnn:CudnnBackend",
    "flashinfer": "runtime.devices.cuda.flashinfer:FlashInferBackend",
    "fa3": "runtime.devices.cuda.flash:FlashAttention3Backend",
    "fa4": "runtime.devices.cuda.flash:FlashAttention4Backend",
    "flashmla": "runtime.devices.cuda.flashmla:FlashMlaBackend",
    "trtllm_mha": "runtime.devices.cuda.trtllm:TrtllmMhaBackend",
    "trtllm_mla": "runtime.devices.cuda.trtllm:TrtllmMlaBackend",
}


def open_backend(
    name: str, dtype: torch.dtype, gpu: Gpu, capability: tuple[int, int], sizes: GraphSizes
) -> AnyBackend:
    """The backend of this name. `sizes`: of steps, by which cuDNN's graphs are built. Raises StartError where
    the GPU or the installed packages lack it."""
    facts = BACKENDS[name]
    if facts.majors and capability[0] not in facts.majors:
        wanted, actual = ", ".join(f"{major}.x" for major in facts.majors), ".".join(map(str, capability))
        raise StartError(
            f"--attention-backend {name} needs a GPU of compute capability {wanted}, and this one has "
            f"{actual}; choose triton"
        )
    if facts.dtypes and str(dtype).removeprefix("torch.") not in facts.dtypes:
        raise StartError(
            f"--attention-backend {name} computes in {' and '.join(facts.dtypes)}; set one as --dtype, "
            "or choose triton"
        )
    module, _, kind = BACKEND_CLASSES[name].partition(":")
    make: Callable[..., AnyBackend] = getattr(import_module(module), kind)
    try:
        return make(dtype, gpu, sizes) if make is CudnnBackend else make(dtype, gpu)
    except ImportError as error:
        raise StartError(
            f"--attention-backend {name} needs the package {facts.package} ({error}); "
            f"install it as {facts.install or facts.package}, or choose triton"
        ) from error


def open_hybrid_backend(
    prefill: str,
    decode: str,
    dtype: torch.dtype,
    gpu: Gpu,
    capability: tuple[int, int],
    sizes: GraphSizes = USUAL_SIZES,
) -> HybridAttentionBackend | None:
    """The backends of both phases; None where both are triton, which needs no adapter. `sizes`: of steps."""
    if prefill == decode == "triton":
        return None
    backends = {name: open_backend(name, dtype, gpu, capability, sizes) for name in {prefill, decode}}
    return HybridAttentionBackend(backends[prefill], backends[decode])
