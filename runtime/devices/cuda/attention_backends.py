"""Attention on the GPU by other kernels than ours, chosen for each phase: `--attention-backend`.

What each of them can do is data, in options/attention_backends.py; here is what makes them. Rows of one phase
come together: all of them decode one token, or none need to. Kernels that know no sinks tell the logarithm of
a row's sum instead, from which `apply_sinks` makes the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import attention as paged
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.errors import StartError
from runtime.layers.attention import sdpa as gathered
from runtime.messages.steps import StepPlan
from runtime.options.attention_backends import BACKENDS


class AttentionBackend(Protocol):
    """Of one phase."""

    def plan(self, plan: StepPlan, page_tables: Tensor, page_size: int, windows: tuple[int, ...]) -> Any:
        """Once a step, of rows of this phase alone."""
        ...

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> Any:
        """As Graphs.plan_decodes; only of those that can be captured."""
        ...

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, metadata: Any, scores: Scores) -> Tensor:
        """As Ops.attention, of these rows' queries."""
        ...

    def replan(self, metadata: Any, lengths: np.ndarray) -> None:
        """Called before a graph is replayed in whose body `metadata` was made: int32 [rows], keys of each."""
        ...


class TritonBackend:
    """Our own, where the other phase has others."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        self.gpu = gpu

    def plan(
        self, plan: StepPlan, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> paged.AttentionPlan:
        return paged.plan_attention(plan, page_tables, page_size)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> paged.AttentionPlan:
        return paged.plan_decodes(slots, lengths, page_tables, page_size)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, metadata: paged.AttentionPlan, scores: Scores
    ) -> Tensor:
        return paged.attention(q, keys, values, metadata, scores, self.gpu)

    def replan(self, metadata: paged.AttentionPlan, lengths: np.ndarray) -> None:
        """Its kernels read lengths on the device."""


class TorchNativeBackend:
    """torch's scaled_dot_product_attention over gathered pages: what the cpu does."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        self.dtype = dtype

    def plan(
        self, plan: StepPlan, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> gathered.AttentionPlan:
        return gathered.plan_attention(plan, page_tables, page_size, windows, self.dtype)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> Any:
        raise AssertionError("torch_native is not captured")

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, metadata: gathered.AttentionPlan, scores: Scores
    ) -> Tensor:
        return gathered.attend(q, keys, values, metadata, scores)

    def replan(self, metadata: gathered.AttentionPlan, lengths: np.ndarray) -> None:
        raise AssertionError("torch_native is not captured")


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The queries of a phase in a step, and what their kernels made of it."""

    queries: slice
    backend: AttentionBackend
    metadata: Any


class HybridAttentionBackend:
    """Prompts with one kind of kernels, decodes with another, or the same."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill = prefill
        self.decode = decode

    def plan(
        self, plan: StepPlan, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> tuple[PhasePlan, ...]:
        parts, num, end = [], plan.num_decodes, int(plan.counts.sum())
        if num:
            metadata = self.decode.plan(rows_of(plan, slice(0, num), num), page_tables, page_size, windows)
            parts.append(PhasePlan(slice(0, num), self.decode, metadata))
        if num < len(plan.slots):
            metadata = self.prefill.plan(rows_of(plan, slice(num, None), 0), page_tables, page_size, windows)
            parts.append(PhasePlan(slice(num, end), self.prefill, metadata))
        return tuple(parts)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> tuple[PhasePlan, ...]:
        metadata = self.decode.plan_decodes(slots, lengths, page_tables, page_size, windows)
        return (PhasePlan(slice(0, len(slots)), self.decode, metadata),)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, parts: tuple[PhasePlan, ...], scores: Scores
    ) -> Tensor:
        if len(parts) == 1:
            return parts[0].backend.attend(q, keys, values, parts[0].metadata, scores)
        return torch.cat(
            [part.backend.attend(q[part.queries], keys, values, part.metadata, scores) for part in parts]
        )


def rows_of(plan: StepPlan, rows: slice, num_decodes: int) -> StepPlan:
    """Some of a step's rows, of which kernels want to know no more than where they are."""
    return structs.replace(
        plan,
        num_decodes=num_decodes,
        slots=plan.slots[rows],
        starts=plan.starts[rows],
        counts=plan.counts[rows],
    )


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """What [T, H, D] becomes when each head's sum has a sink beside it: `lse` float32 [T, H], the natural
    logarithm of the sum without."""
    return (out * torch.sigmoid(lse - sinks).unsqueeze(2)).to(out.dtype)


# name -> module:class, made with (dtype, GPU)
BACKEND_CLASSES = {
    "triton": "runtime.devices.cuda.attention_backends:TritonBackend",
    "torch_native": "runtime.devices.cuda.attention_backends:TorchNativeBackend",
    "flex_attention": "runtime.devices.cuda.flex:FlexAttentionBackend",
    "flashinfer": "runtime.devices.cuda.flashinfer:FlashInferBackend",
    "fa3": "runtime.devices.cuda.flash:FlashAttention3Backend",
    "fa4": "runtime.devices.cuda.flash:FlashAttention4Backend",
}


def open_backend(name: str, dtype: torch.dtype, gpu: Gpu, capability: tuple[int, int]) -> AttentionBackend:
    """Raises StartError where the GPU or its packages do not have them."""
    facts = BACKENDS[name]
    if facts.majors and capability[0] not in facts.majors:
        wanted, found = ", ".join(f"{major}.x" for major in facts.majors), ".".join(map(str, capability))
        raise StartError(
            f"--attention-backend {name} needs a GPU of compute capability {wanted}, and this one has {found}; take triton"
        )
    if facts.dtypes and str(dtype).removeprefix("torch.") not in facts.dtypes:
        raise StartError(
            f"--attention-backend {name} computes in {' and '.join(facts.dtypes)}; give one as --dtype, or take triton"
        )
    module, _, kind = BACKEND_CLASSES[name].partition(":")
    made: Callable[[torch.dtype, Gpu], AttentionBackend] = getattr(import_module(module), kind)
    try:
        return made(dtype, gpu)
    except ImportError as error:
        raise StartError(
            f"--attention-backend {name} needs the package {facts.package} ({error}); "
            f"install it as {facts.install or facts.package}, or take triton"
        ) from error


def open_hybrid_backend(
    prefill: str, decode: str, dtype: torch.dtype, gpu: Gpu, capability: tuple[int, int]
) -> HybridAttentionBackend | None:
    """None: both are our own."""
    if prefill == decode == "triton":
        return None
    made = {name: open_backend(name, dtype, gpu, capability) for name in {prefill, decode}}
    return HybridAttentionBackend(made[prefill], made[decode])
