"""LogitsOps in plain Ops and torch: what devices without kernels for them do, and the specification of those
kernels."""

from torch import Tensor

from runtime.devices.base import Device, Ops
from runtime.devices.operands import LogitsOps, TokenMasks
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.sampling.sampler import logprobs


class PlainLogitsOps:
    """LogitsOps on any device."""

    needs_finite = True
    takes_masks = False

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def choose(
        self, logits: Tensor, inputs: SamplingInputs | None, masks: TokenMasks | None = None
    ) -> Tensor:
        """See LogitsOps.choose."""
        assert masks is None, "masks are written to logits before (Ops.mask)"
        return logits.argmax(dim=1) if inputs is None else self.ops.sample(logits, inputs)

    def logprobs(self, logits: Tensor, targets: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """See LogitsOps.logprobs."""
        found = logprobs(logits, targets, width)
        return found.chosen, found.top_ids, found.top


def logits_ops_of(device: Device) -> LogitsOps:
    """The device's own, or plain ones."""
    return device.logits_ops or PlainLogitsOps(device.ops)
