"""Page copies of a step between the device and host memory: when they begin, and what follows them."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from runtime.devices.base import Device, PageCopier, PageLoads
from runtime.messages.steps import StepPlan
from runtime.ranks.transfers import Transfers

Reported = Callable[[int, int], None]  # step, and parts of its computed pages that are in host memory


def unreported(step: int, num_parts: int) -> None:
    """A Reported that tells no one."""


class LayerSaves:
    """Saves of the pages that one step computes, of some layers at a time while later ones are computed. See
    PageSaves."""

    def __init__(
        self,
        copies: PageCopier,
        plan: StepPlan,
        layers: Sequence[Sequence[int]],
        reported: Reported,
        *,
        has_result: bool,
    ) -> None:
        """`layers`: of each layer the bytes of its parts of a page; `reported`: called when some are saved;
        `has_result`: this stage's step ends with the result, which speaks of the last ones."""
        assert plan.page_copies is not None, "there are computed pages"
        self._copies = copies
        self._pages, self._hosts = plan.page_copies.computed_pages, plan.page_copies.computed_hosts
        self._notice_bytes = plan.page_copies.notice_bytes
        self._step = plan.step
        self._layers = layers
        self._reported = reported
        self._has_result = has_result
        self._begin = 0  # the first layer that is not saved

    def wants(self, layer: int) -> bool:
        """See PageSaves.wants: the layers up to this one are worth a notice, and not all there are."""
        if not self._notice_bytes or layer + 1 >= len(self._layers):
            return False
        page_bytes = sum(map(sum, self._layers[self._begin : layer + 1]))
        return page_bytes * len(self._pages) >= self._notice_bytes

    def stored(self, layer: int) -> None:
        """See PageSaves.stored."""
        if self.wants(layer):
            self._save(layer + 1, tells=True)

    def end(self) -> None:
        """Saves the other layers."""
        self._save(len(self._layers), tells=self._notice_bytes > 0 and not self._has_result)

    def _save(self, end: int, *, tells: bool) -> None:
        done = None
        if tells:
            done = partial(self._reported, self._step, sum(map(len, self._layers[:end])))
        self._copies.save_layers(range(self._begin, end), self._pages, self._hosts, done)
        self._begin = end


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


def begin_saves(
    copies: PageCopier | None,
    plan: StepPlan,
    layers: Sequence[Sequence[int]],
    reported: Reported,
    device: Device,
) -> LayerSaves | None:
    """Saves of what the step computes, for LayerSaves. None: it saves none of it."""
    own = plan.page_copies
    if copies is None or own is None or not len(own.computed_pages):
        return None
    return LayerSaves(copies, plan, layers, reported, has_result=device.stage.is_last)


def end_copies(
    copies: PageCopier | None, plan: StepPlan, saves: LayerSaves | None, transfers: Transfers, device: Device
) -> None:
    """Ends the saves of pages that the step has computed, and orders all of its copies before its result,
    which is fetched next and speaks for all ranks of the attention group: they meet where pages were saved
    last. Called behind the rest of the step."""
    if copies is None or plan.page_copies is None:
        return
    if saves is not None:
        saves.end()
    is_alone = device.collectives.size == 1 and device.stage.count == 1
    behind = copies.finish(is_alone=is_alone)
    if behind is not None:
        transfers.follow(behind)
    if saves is not None and device.group_ranks.size > 1:
        device.group_ranks.all_reduce(torch.zeros(1, device=device.torch_device))
