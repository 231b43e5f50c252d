"""Fused kernels of the cuda device."""

from torch import Tensor

from runtime.devices.cuda.kernels.logits import apply_penalties
from runtime.devices.cuda.kernels.rotary import prepare_heads
from runtime.devices.operands import Seen
from runtime.layers.fused_ops import UnfusedOps


class CudaFusedOps(UnfusedOps):
    """FusedOps (devices/operands.py) in Triton, where several launches would take longer."""

    def prepare_heads(
        self,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        locations: Tensor,
    ) -> Tensor:
        """One launch; see FusedOps.prepare_heads."""
        return prepare_heads(qkv, norm, cos, sin, k_cache, v_cache, locations)

    def penalise(self, logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
        """Penalties of repetition, frequency and presence, in place."""
        apply_penalties(logits, rows, seen, at)
