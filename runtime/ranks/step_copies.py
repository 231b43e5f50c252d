"""The end of a step's page copies, behind its forward pass."""

import torch

from runtime.devices.base import Device
from runtime.devices.page_copies import PageCopier
from runtime.messages.steps import StepPlan


def end_page_copies(plan: StepPlan, copies: PageCopier | None, device: Device) -> None:
    """Saves pages that the step has computed, and waits for all of its copies, on devices with streams in the
    order of their work. The step's result speaks for all ranks, so they meet where pages were saved last."""
    if plan.page_copies is None or copies is None:
        return
    computed = plan.page_copies.computed_pages
    if len(computed):
        copies.save(computed, plan.page_copies.computed_hosts)
    copies.finish()
    if len(computed) and device.collectives.size > 1:
        device.collectives.all_reduce(torch.zeros(1, device=device.torch_device))
