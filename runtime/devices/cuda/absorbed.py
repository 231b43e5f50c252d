"""Latent attention (MLA) by kernels of other packages over pages of latents: `--attention-backend flashmla`,
`--decode-attention-backend trtllm_mla`.

Such kernels read the latent and the rotary part of a token as one row of a page, so both caches of a layer
are halves of one tensor (Backend.joins_latents, Device.joins_latents). Queries are absorbed as for our own
kernel (mla.py), and rows with equally many of them are one call. Chunks for which absorbing costs more than
expanding keys and values are expanded, and attend by our own kernel.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import attention as paged
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kv_ranges import decode_page_table, page_table_of
from runtime.devices.cuda.mla import UpProjection, mla_attention
from runtime.layers.upload import upload_int64

Schedule = TypeVar("Schedule")


@dataclass(frozen=True, slots=True)
class LatentRows(Generic[Schedule]):
    """Rows of a phase with equally many queries. `Schedule`: what the package prepares for them once a
    step."""

    count: int  # queries of each row
    queries: Tensor | slice  # which of the phase's queries are theirs, row after row
    table: Tensor  # int32 [R, pages]
    lengths: Tensor  # int32 [R]: keys of each row, with its queries' own
    longest: int  # the most keys that a row has; of captured rows, that it may have
    schedule: Schedule
    paged: paged.AttentionPlan | None  # the same rows for our own kernel; None: rows that decode


@dataclass(frozen=True, slots=True)
class LatentPlan(Generic[Schedule]):
    """The rows of one phase of a step, by number of queries."""

    page_size: int
    rows: tuple[LatentRows[Schedule], ...]


class Absorbed(Protocol[Schedule]):
    """A package's attention of absorbed queries [R, n, H, 576] over pages [pages, page_size, 576] -> [R, n,
    H, 512]. The last query of a row stands at the row's last key."""

    def __call__(self, q: Tensor, pages: Tensor, rows: LatentRows[Schedule], scale: float) -> Tensor: ...


class LatentBackend(ABC, Generic[Schedule]):
    """What backends over pages of latents share; see AttentionBackend."""

    absorbed: Absorbed[Schedule]
    gpu: Gpu

    @abstractmethod
    def open_schedule(self) -> Schedule:
        """What the package prepares for the rows of one call, and keeps for the other layers of the step."""

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> LatentPlan[Schedule]:
        """Page tables and lengths of these rows, for each number of queries."""
        counts = np.unique(plan.counts).tolist()
        return LatentPlan(
            page_size, tuple(self._rows_of(plan, count, page_tables, page_size) for count in counts)
        )

    def _rows_of(
        self, plan: AttentionRows, count: int, page_tables: Tensor, page_size: int
    ) -> LatentRows[Schedule]:
        chosen = np.flatnonzero(plan.counts == count)
        part = AttentionRows(0, plan.slots[chosen], plan.starts[chosen], plan.counts[chosen])
        queries: Tensor | slice = slice(0, int(plan.counts.sum()))
        if len(chosen) < len(plan.counts):
            first = plan.counts.cumsum() - plan.counts
            at = (first[chosen, None] + np.arange(count)).ravel()
            queries = upload_int64(at, page_tables.device)
        table, lengths = page_table_of(part, page_tables[0], page_size, 0)
        own = None if plan.num_decodes else paged.plan_attention(part, page_tables, page_size)
        longest = int((part.starts + part.counts).max())
        return LatentRows(count, queries, table, lengths, longest, self.open_schedule(), own)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> LatentPlan[Schedule]:
        """The plan of captured decode rows, from tensors on the device alone."""
        table, keys = decode_page_table(slots, lengths, page_tables[0], page_size, 0)
        longest, every = table.shape[1] * page_size, slice(0, len(slots))
        rows = LatentRows(1, every, table, keys, longest, self.open_schedule(), None)
        return LatentPlan(page_size, (rows,))

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, metadata: LatentPlan[Schedule], scores: Scores
    ) -> Tensor:
        """Not supported: options.rules.kernels refuses models without latents."""
        raise AssertionError("this backend is for latent attention alone")

    def attend_latents(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: UpProjection,
        metadata: LatentPlan[Schedule],
        scale: float,
    ) -> Tensor:
        """Attention of these rows' queries; see Ops.latent_attention."""
        out = q.new_empty(*q.shape[:2], up.values.shape[2])
        pages = joined_pages(latents, ropes, metadata.page_size)
        for rows in metadata.rows:
            part, part_rope = q[rows.queries], q_rope[rows.queries]
            if rows.paged is not None and not up.absorbs(rows.count):
                out[rows.queries] = mla_attention(
                    part, part_rope, latents, ropes, up, rows.paged, scale, self.gpu
                )
                continue
            absorbed = torch.cat((torch.bmm(part.transpose(0, 1), up.keys).transpose(0, 1), part_rope), 2)
            found = self.absorbed(absorbed.unflatten(0, (-1, rows.count)), pages, rows, scale)
            values = torch.bmm(found.flatten(0, 1).transpose(0, 1), up.values)
            out[rows.queries] = values.transpose(0, 1)
        return out

    def replan(self, metadata: LatentPlan[Schedule], lengths: np.ndarray) -> None:
        """Nothing to do: lengths are read on the device."""


def joined_pages(latents: Tensor, ropes: Tensor, page_size: int) -> Tensor:
    """Latents [tokens, 1, R] and rotary parts [tokens, 1, P] that stand one behind the other in memory, as
    [pages, page_size, R + P]."""
    width = latents.shape[2] + ropes.shape[2]
    behind = latents.data_ptr() + latents.shape[2] * latents.itemsize
    assert latents.stride(0) == ropes.stride(0) == width and ropes.data_ptr() == behind
    shape = (len(latents) // page_size, page_size, width)
    return latents.as_strided(shape, (page_size * width, width, 1))
