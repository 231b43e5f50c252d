"""What the GPU does in one launch."""

from torch import Tensor

from runtime.devices.cuda.kernels.logits import apply_penalties
from runtime.devices.cuda.kernels.rotary import prepare_heads
from runtime.devices.operands import Seen


class CudaFused:
    """See devices/operands.py for what each one means."""

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
        return prepare_heads(qkv, norm, cos, sin, k_cache, v_cache, locations)

    def penalise(self, logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
        apply_penalties(logits, rows, seen, at)
