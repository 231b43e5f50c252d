"""Page copies of a step between the device and host memory: when they begin, and what follows them."""

import numpy as np
import torch

from runtime.devices.base import Device, PageCopier, PageLoads
from runtime.messages.steps import StepPlan
from runtime.ranks.transfers import Transfers


def begin_copies(copies: PageCopier | None, plan: StepPlan, page_size: int) -> PageLoads | None:
    """Saves pages to host memory and begins to load others, before anything else of the step. `copies`: None
    without a host tier. -> the loads; None: there are none"""
    if copies is None:
        assert plan.page_copies is None, "page copies, but no host tier"
        return None
    loads = None
    if (own := plan.page_copies) is not None:
        if len(own.save_pages):
            copies.save(own.save_pages, own.save_hosts)
        if len(own.load_pages):
            loads = copies.load(own.load_hosts, own.load_pages)
    if len(pages := written_pages(plan, page_size)):
        copies.overwrite(pages)
    return loads


def written_pages(plan: StepPlan, page_size: int) -> np.ndarray:
    """The pages that a plan gives to sequences to write to: not those that a new sequence finds full."""
    if not plan.admits:
        return plan.page_ids
    known = {admit.slot: admit.length for admit in plan.admits}
    starts = np.array([known.get(slot, 0) for slot in plan.page_slots.tolist()], np.int64)
    is_written = (plan.page_rows.astype(np.int64) + 1) * page_size > starts
    pages: np.ndarray = plan.page_ids[is_written]
    return pages


def end_copies(copies: PageCopier | None, plan: StepPlan, transfers: Transfers, device: Device) -> None:
    """Saves pages that the step has computed, and orders all of its copies before its result, which is
    fetched next and speaks for all ranks of the attention group: they meet where pages were saved last.
    Called behind the rest of the step."""
    if copies is None or plan.page_copies is None:
        return
    computed = plan.page_copies.computed_pages
    if len(computed):
        copies.save(computed, plan.page_copies.computed_hosts)
    is_alone = device.collectives.size == 1 and device.stage.count == 1
    behind = copies.finish(is_alone=is_alone)
    if behind is not None:
        transfers.follow(behind)
    if len(computed) and device.group_ranks.size > 1:
        device.group_ranks.all_reduce(torch.zeros(1, device=device.torch_device))
