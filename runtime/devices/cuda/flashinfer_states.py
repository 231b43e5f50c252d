"""FlashInfer's kernel for one token of Mamba 2: `--mamba-backend flashinfer`, the package flashinfer-python.
Delta rules, which it has no such kernel for, are Triton's."""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from runtime.devices.cuda.kernels.recurrent import TritonStateSteps
from runtime.errors import StartError


class FlashInferStateSteps(TritonStateSteps):
    """See StateSteps."""

    def __init__(self) -> None:
        """Raises StartError where the package is missing, or has no such kernel."""
        try:
            self.update: Callable[..., Tensor] = import_module("flashinfer.mamba").selective_state_update
        except (ImportError, AttributeError) as error:
            raise StartError(
                f"--mamba-backend flashinfer: {error}; pip install 'flashinfer-python>=0.6', or choose triton"
            ) from error

    def scan(self, a: Tensor, inputs: tuple[Tensor, ...], state: Tensor, slots: Tensor) -> Tensor:
        """See StateSteps.scan. Its input without a state (D) is added by the layer."""
        x, step, b, c = (part.contiguous() for part in inputs)
        _, heads, size, kept = state.shape
        return self.update(
            state,
            x,
            step.unsqueeze(2).expand_as(x),
            a.float().view(-1, 1, 1).expand(heads, size, kept),
            b,
            c,
            torch.zeros(1, 1, dtype=x.dtype, device=x.device).expand(heads, size),
            state_batch_indices=slots,
        )


def open_state_steps(backend: str) -> TritonStateSteps | None:
    """The kernels of --mamba-backend; None: torch computes. Raises StartError."""
    match backend:
        case "flashinfer":
            return FlashInferStateSteps()
        case "triton":
            return TritonStateSteps()
    return None
