"""Options that only the cuda device has. Torch-free."""

from typing import Literal

from msgspec import Struct

SymmetricMemory = Literal["off", "try", "on"]
# how far kernels are joined to fewer launches. off: as they ran on a card. safe: also where a program needs
# rows of its own alone, and where the last of the programs that split a sum merges it. all: also what may be
# slower than the kernels that it replaces, and what runs beside other work
KernelFusion = Literal["off", "safe", "all"]

MOST_GEMV_ROWS = 8  # kernels/gemv.py multiplies rows one by one
GEMV_ROWS = 1  # on an H100 cuBLAS was faster with two


class CudaOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """StartRank.device_options of the cuda device."""

    base_gpu_id: int = 0  # card of rank 0
    gpu_id_step: int = 1  # from a rank's card to the next rank's
    cudagraph_gc: bool = False  # Python's garbage collector runs while steps are captured
    # whether small sums over ranks go through memory that the cards share, by torch; try: if they can
    symm_mem: SymmetricMemory = "off"
    nccl_window: bool = False  # the same, by NCCL
    checks_peers: bool = False  # ranks start only where the cards have access to each other's memory
    kernel_fusion: KernelFusion = "safe"
    gemv_rows: int = GEMV_ROWS  # the most rows of products of kernels/gemv.py
    lists_work: bool = False  # decode rows are divided among programs by a list on the device
    starts_early: bool = False  # kernels start before those ahead of them have ended
    fp8_gemm_backend: str = "by_rows"
    prefill_attention_backend: str = "triton"
    decode_attention_backend: str = "triton"
    tower_attention: str = "sdpa"

    @property
    def attention_backends(self) -> tuple[str, str]:
        """Names of what computes the attention of prompts, and that of decodes."""
        return self.prefill_attention_backend, self.decode_attention_backend
