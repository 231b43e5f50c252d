"""What happens to rows of logits, by the kernels (logits.h, sampling.h, logprobs.h). layers/sampling says
what that is: from the same logits and random numbers come the same tokens."""

import ctypes
import weakref

import torch
from torch import Tensor

from runtime.devices.base import Ops
from runtime.devices.cpu.kernels.library import Choices, Logits, Masks, SeenTokens
from runtime.devices.cpu.matrices import Threads
from runtime.devices.operands import Seen, TokenMasks
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.fused_ops import UnfusedOps, penalise


class CpuLogitsOps:
    """LogitsOps by the threads of a rank."""

    needs_finite = False
    takes_masks = True

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.functions = threads.functions
        self.handle: int = self.functions.kernels_sampler(threads.handle)
        weakref.finalize(self, self.functions.kernels_free_sampler, self.handle).atexit = False

    def choose(
        self, logits: Tensor, inputs: SamplingInputs | None, masks: TokenMasks | None = None
    ) -> Tensor:
        """See LogitsOps.choose."""
        rows = logits.contiguous()
        tokens = torch.empty(len(rows), dtype=torch.int64)
        choices, arrays = None, list[Tensor]()
        kept = None if masks is None else _contiguous(masks)
        banned = None if kept is None else ctypes.byref(_masks(kept))
        if inputs is not None:
            wanted = (inputs.temperature, inputs.top_p, inputs.min_p, inputs.top_k, inputs.uniform)
            arrays = [each.contiguous() for each in wanted]
            choices = ctypes.byref(Choices(*(each.data_ptr() for each in arrays)))
        self.functions.kernels_sample(
            self.threads.handle, self.handle, ctypes.byref(_logits(rows)), banned, choices, tokens.data_ptr()
        )
        return tokens

    def logprobs(self, logits: Tensor, targets: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """See LogitsOps.logprobs."""
        rows, wanted = logits.contiguous(), targets.contiguous()
        width = min(width, rows.shape[1])
        chosen = torch.empty(len(rows))
        ids = torch.empty(len(rows), width, dtype=torch.int32)
        top = torch.empty(len(rows), width)
        self.functions.kernels_logprobs(
            self.threads.handle,
            ctypes.byref(_logits(rows)),
            wanted.data_ptr(),
            width,
            chosen.data_ptr(),
            ids.data_ptr(),
            top.data_ptr(),
        )
        return chosen, ids, top

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """See Ops.mask."""
        masks = _contiguous(TokenMasks(rows, bits))
        self.functions.kernels_mask(
            self.threads.handle, ctypes.byref(_logits(logits)), ctypes.byref(_masks(masks))
        )

    def penalise(self, logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
        """See FusedOps.penalise."""
        places, indices = rows.contiguous(), at.contiguous()
        arrays = [each.contiguous() for each in (seen.generated, seen.in_prompt, seen.penalties)]
        self.functions.kernels_penalise(
            self.threads.handle,
            ctypes.byref(_logits(logits)),
            places.data_ptr(),
            indices.data_ptr(),
            len(places),
            ctypes.byref(SeenTokens(*(each.data_ptr() for each in arrays))),
        )


class CpuFusedOps(UnfusedOps):
    """FusedOps of which one is a kernel."""

    def __init__(self, ops: Ops, logits_ops: CpuLogitsOps) -> None:
        super().__init__(ops)
        self.logits_ops = logits_ops

    def penalise(self, logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
        """See FusedOps.penalise."""
        (self.logits_ops.penalise if logits.is_contiguous() else penalise)(logits, rows, seen, at)


def _logits(rows: Tensor) -> Logits:
    return Logits(rows.shape[0], rows.shape[1], rows.data_ptr())


def _contiguous(masks: TokenMasks) -> TokenMasks:
    return TokenMasks(masks.rows.contiguous(), masks.bits.contiguous())


def _masks(masks: TokenMasks) -> Masks:
    """Both tensors are contiguous, and live as long as the structure is used."""
    return Masks(masks.rows.data_ptr(), len(masks.rows), masks.bits.data_ptr())
